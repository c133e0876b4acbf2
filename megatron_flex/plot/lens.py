"""The logit lens: what each layer would say next, at each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_flex import figures
from megatron_flex.figures import LogitLens, Source
from megatron_flex.plot.canvas import SMALL, Tokenizer, finish_figure, new_figure, place_labels, label_ticks, token_labels
from megatron_flex.plot.grids import write_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST_POSITIONS = slice(-16, None)  # positions that fit side by side
SHORT_LABEL = 5  # letters of a label that need not be turned
MAX_WRITTEN_POSITIONS = 48  # positions up to which tokens are written into their cells


def logit_lens(
    source: Source | LogitLens,
    *,
    iteration: int | None = None,
    sample: int = 0,
    positions: slice | Sequence[int] = LAST_POSITIONS,
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
    figure_data = (
        source
        if isinstance(source, LogitLens)
        else figures.logit_lens(source, iteration, sample, 1, positions=positions, tied=tied)
    )
    best = figure_data.probabilities[:, :, 0]
    layers, places = best.shape
    figure = new_figure(max(6.0, 0.62 * min(places, MAX_WRITTEN_POSITIONS) + 1.8), max(3.0, 0.32 * layers + 1.8))
    axes = figure.subplots()
    image = axes.imshow(best, cmap="magma", vmin=0, vmax=1, aspect="auto", origin="lower")
    if places <= MAX_WRITTEN_POSITIONS:
        words = [token_labels(line, tokenizer, 8) for line in figure_data.ids[:, :, 0].tolist()]
        write_cells(axes, best, words, 1.0)
    labels = place_labels(figure_data.tokens, tokens, tokenizer)
    turned = 45 if max(map(len, labels)) > SHORT_LABEL else 0
    label_ticks(axes.xaxis, labels, MAX_WRITTEN_POSITIONS, fontsize=SMALL, rotation=turned)
    label_ticks(axes.yaxis, [_stream_label(n) for n in figure_data.layers], 32, fontsize=SMALL)
    axes.set_xlabel("token" if tokens is not None else "position")
    figure.colorbar(image, ax=axes, label="probability", pad=0.02)
    return finish_figure(figure, "Logit lens: the likeliest next token", figure_data.caption)


def _stream_label(behind: int) -> str:
    return f"behind layer {behind - 1}" if behind else "embeddings"
