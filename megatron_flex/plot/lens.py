"""The logit lens: what each layer would say next, at each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_flex import figures
from megatron_flex.figures import LogitLens, Source
from megatron_flex.plot.canvas import SMALL, Tokenizer, finish, new, place_labels, ticks, token_labels
from megatron_flex.plot.grids import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST = slice(-16, None)  # positions that fit side by side
SHORT = 5  # letters of a label that need not be turned
WRITTEN = 48  # positions up to which tokens are written into their cells


def logit_lens(
    source: Source | LogitLens,
    *,
    iteration: int | None = None,
    sample: int = 0,
    positions: slice | Sequence[int] = LAST,
    tied: bool | None = None,
    tokens: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Figure:
    """The likeliest next token behind each layer, shaded by its probability; the model's own is on top.

    Of a cache the weights are fetched from all ranks: every rank calls it alike.

    Args:
        source: a dump, a cache, a dump's path, or what `figures.logit_lens` gave.
        iteration: the last one if none is said.
        sample: which of those that the source has, counted from 0.
        positions: which tokens are drawn.
        tied: whether the word embeddings make the logits, where a dump does not tell.
        tokens: of the whole sample, which label the axis instead of positions.
        tokenizer: tells what the number of a token stands for: `tokenizer.decode`.

    Raises:
        FlexError: the source lacks streams or weights; matplotlib is not installed.
    """
    made = (
        source
        if isinstance(source, LogitLens)
        else figures.logit_lens(source, iteration, sample, 1, positions=positions, tied=tied)
    )
    best = made.probabilities[:, :, 0]
    layers, places = best.shape
    figure = new(max(6.0, 0.62 * min(places, WRITTEN) + 1.8), max(3.0, 0.32 * layers + 1.8))
    axes = figure.subplots()
    image = axes.imshow(best, cmap="magma", vmin=0, vmax=1, aspect="auto", origin="lower")
    if places <= WRITTEN:
        words = [token_labels(line, tokenizer, 8) for line in made.ids[:, :, 0].tolist()]
        write(axes, best, words, 1.0)
    labels = place_labels(made.tokens, tokens, tokenizer)
    turned = 45 if max(map(len, labels)) > SHORT else 0
    ticks(axes.xaxis, labels, WRITTEN, fontsize=SMALL, rotation=turned)
    ticks(axes.yaxis, [_layer(n) for n in made.layers], 32, fontsize=SMALL)
    axes.set_xlabel("token" if tokens is not None else "position")
    figure.colorbar(image, ax=axes, label="probability", pad=0.02)
    return finish(figure, "Logit lens: the likeliest next token", made.caption)


def _layer(behind: int) -> str:
    return f"behind layer {behind - 1}" if behind else "embeddings"
