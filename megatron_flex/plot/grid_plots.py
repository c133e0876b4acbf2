"""Grids: attention patterns head by head, induction scores, one sample tokens x features, and the logit
lens layers x positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from megatron_flex import figures
from megatron_flex.errors import FlexError
from megatron_flex.figures import Attention, Heat, Induction, LogitLens, Source
from megatron_flex.plot.canvas import (
    GREY,
    RED,
    SMALL,
    TINY,
    Tokenizer,
    finish_figure,
    label_ticks,
    new_figure,
    place_labels,
    styled,
    token_labels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PANELS_IN_ROW = 4  # panels in a row
MAX_WRITTEN_HEADS = 16  # layers and heads up to which scores are written into their cells
COLOR_PERCENTILE = (
    99.5  # percentile of magnitudes at the end of a heat map's colors; outliers would hide the rest
)


@styled
def attention(
    source: Source | Attention,
    layer: int = 0,
    *,
    iteration: int | None = None,
    sample: int = 0,
    heads: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Figure:
    """The attention patterns of a layer, a panel for each head: queries downwards, keys to the right.

    All heads share one scale, on which colors go with the square root of the attention.

    Args:
        source: a dump, a cache, a dump's path, or the result of `figures.attention`.
        layer: its number.
        iteration: by default the last one.
        sample: the index among the source's samples, from 0.
        heads: these only.
        tokens: of the full sample, to label the axes instead of positions.
        tokenizer: the text of a token id: `tokenizer.decode`.

    Returns:
        A figure of matplotlib.

    Raises:
        FlexError: the source has no patterns of that layer; matplotlib is not installed.

    Examples:
        >>> plot.attention("dumps/run", layer=1).savefig("attention.png")
    """
    figure_data = (
        source
        if isinstance(source, Attention)
        else figures.attention(source, layer, iteration=iteration, sample=sample)
    )
    shown = list(range(len(figure_data.values))) if heads is None else list(heads)
    wrong = next((h for h in shown if not 0 <= h < len(figure_data.values)), None)
    if wrong is not None or not shown:
        problem = "none was named" if wrong is None else f"{wrong} is not one of them"
        raise FlexError(f"layer {figure_data.layer} has heads 0 to {len(figure_data.values) - 1}; {problem}")
    across = min(PANELS_IN_ROW, len(shown))
    down = math.ceil(len(shown) / across)
    figure = new_figure(2.6 * across + 1.2, 2.5 * down + 1.2)
    from matplotlib.colors import PowerNorm

    panels = figure.subplots(down, across, squeeze=False)
    rows = place_labels(figure_data.queries, tokens, tokenizer)
    columns = place_labels(figure_data.keys, tokens, tokenizer)
    scale = PowerNorm(
        0.5, 0, float(figure_data.values[shown].max())
    )  # the first query's only key always has 1
    for number, axes in enumerate(panels.flat):
        if number >= len(shown):
            axes.set_visible(False)
            continue
        image = axes.imshow(figure_data.values[shown[number]], cmap="viridis", norm=scale, aspect="auto")
        axes.set_title(f"head {shown[number]}", fontsize=9)
        _label_axes(axes, rows, columns, tokens is not None)
        below = number + across < len(shown)
        axes.tick_params(labelbottom=not below, labelleft=number % across == 0)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=panels, label="attention to a key (color: square root)", pad=0.02)
    return finish_figure(figure, f"Attention patterns, layer {figure_data.layer}", figure_data.caption)


def _label_axes(axes: Axes, rows: Sequence[str], columns: Sequence[str], are_tokens: bool) -> None:
    many = 24 if are_tokens else 6
    label_ticks(axes.yaxis, rows, many, fontsize=TINY)
    label_ticks(axes.xaxis, columns, many, fontsize=TINY, rotation=90 if are_tokens else 0)


@styled
def induction(source: Source | Induction, *, iteration: int | None = None) -> Figure:
    """The heads that attend after the earlier copy of a repeated token, or to the previous token.

    Scores are multiples of chance, which is what uniform attention gives; the best head of each panel is
    framed and named. Layers go downwards, as in a table.

    Args:
        source: a dump, a cache, a dump's path, or the result of `figures.induction`.
        iteration: by default the last one.

    Returns:
        A figure of matplotlib.

    Raises:
        FlexError: the source has no patterns, or repeats nothing; matplotlib is not installed.

    Examples:
        >>> repeated = tokens[:, :8].repeat(1, 2)
        >>> logits, cache = flex.interp.run_with_cache(repeated, lambda name: "pattern" in name)
        >>> plot.induction(cache).savefig("induction.png")
    """
    figure_data = source if isinstance(source, Induction) else figures.induction(source, iteration=iteration)
    layers, heads = figure_data.scores.shape
    figure = new_figure(max(7.5, 1.1 * heads + 2.2), max(2.8, 0.42 * layers + 1.9))
    panels = figure.subplots(1, 2, sharey=True)
    chance = figure_data.uniform
    most = max(float(figure_data.scores.max()), float(figure_data.previous.max())) / chance
    titles = "to the token after the earlier copy", "to the token before"
    for axes, values, title in zip(panels, (figure_data.scores, figure_data.previous), titles, strict=True):
        times = values / chance
        image = axes.imshow(times, cmap="viridis", vmin=0, vmax=most, aspect="auto")
        layer, head = divmod(int(values.argmax()), heads)
        best = f"best: layer {figure_data.layers[layer]}, head {head}, {times[layer, head]:.1f}×"
        axes.set_title(f"{title}\n{best}")
        axes.set_xlabel("head")
        label_ticks(axes.xaxis, [str(n) for n in range(heads)], 16)
        label_ticks(axes.yaxis, [str(n) for n in figure_data.layers], 24)
        if layers <= MAX_WRITTEN_HEADS and heads <= MAX_WRITTEN_HEADS:
            write_cells(axes, times, [[f"{v:.1f}" for v in row] for row in times], most)
        frame_cell(axes, layer, head)
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="mean attention, times chance", pad=0.02)
    caption_text = f"{figure_data.caption} · chance (uniform attention) is {chance:.3f}"
    return finish_figure(figure, "Induction scores", caption_text)


def frame_cell(axes: Axes, row: int, column: int) -> None:
    """Frame a cell of an image."""
    from matplotlib.patches import Rectangle

    place = (column - 0.47, row - 0.47)
    axes.add_patch(Rectangle(place, 0.94, 0.94, fill=False, edgecolor=RED, linewidth=2, label="best"))


def write_cells(
    axes: Axes, values: Any, words: Sequence[Sequence[str]], most: float, reverse: bool = False
) -> None:
    """Write text into the cells of an image, light on dark colors and dark on light ones.

    Args:
        axes: with the image.
        values: `[row, column]`.
        words: the texts.
        most: the value of the lightest color.
        reverse: whether low values have light colors.
    """
    for row, line in enumerate(words):
        for column, word in enumerate(line):
            light = (values[row][column] < 0.6 * most) != reverse
            color = "white" if light else "black"
            axes.text(
                column, row, word, ha="center", va="center", color=color, fontsize=TINY, parse_math=False
            )


@styled
def heat(
    source: Source | Heat,
    site: str = "",
    *,
    iteration: int | None = None,
    sample: int = 0,
    most: tuple[int, int] = (256, 256),
    tokens: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Figure:
    """One sample of a tensor: tokens downwards, features to the right.

    Colors are centred at zero; of a tensor that is larger than `most` they are the means of |x| over blocks.

    Args:
        source: a dump, a cache, a dump's path, or the result of `figures.heat`.
        site: its name, or the module's for its output.
        iteration: by default the last one.
        sample: the index among the source's samples, from 0.
        most: maximum number of tokens and features.
        tokens: of the full sample, to label the axis instead of positions.
        tokenizer: the text of a token id: `tokenizer.decode`.

    Returns:
        A figure of matplotlib.

    Raises:
        FlexError: the source has no such tensor of tokens; matplotlib is not installed.

    Examples:
        >>> plot.heat("dumps/run", "decoder.layers.3").savefig("heat.png")
    """
    figure_data = source if isinstance(source, Heat) else figures.heat(source, site, iteration, sample, most)
    figure = new_figure(9, 4.8)
    axes = figure.subplots()
    bound = _color_bound(figure_data.values)
    signed = figure_data.block == (1, 1)
    image = axes.imshow(
        figure_data.values,
        cmap="RdBu_r" if signed else "magma",
        vmin=-bound if signed else 0,
        vmax=bound,
        aspect="auto",
        interpolation="nearest",
    )
    label_ticks(
        axes.yaxis,
        place_labels(figure_data.rows, tokens, tokenizer),
        32 if tokens is not None else 12,
        fontsize=SMALL,
    )
    label_ticks(axes.xaxis, [str(c) for c in figure_data.columns], 12, fontsize=SMALL)
    axes.set_ylabel("token")
    axes.set_xlabel("feature", color=GREY)
    label = "value" if signed else "mean |x| of a block"
    figure.colorbar(image, ax=axes, label=label, pad=0.02, extend="both" if signed else "max")
    return finish_figure(
        figure, figure_data.site, f"{figure_data.caption} · colors reach {COLOR_PERCENTILE} % of magnitudes"
    )


def _color_bound(values: Any) -> float:
    """The magnitude at the end of the colors, without NaNs and infinities, which stay blank."""
    import numpy as np

    finite = np.abs(values[np.isfinite(values)])
    return float(np.percentile(finite, COLOR_PERCENTILE)) or 1.0 if finite.size else 1.0


LAST_POSITIONS = slice(-16, None)  # positions that fit
SHORT_LABEL = 5  # letters of a label that is not rotated
MAX_WRITTEN_POSITIONS = 48  # positions up to which tokens are written into their cells
LensNumber = Literal["probability", "rank", "entropy"]
LENS_TITLES = {
    "probability": "Logit lens: the likeliest next token",
    "rank": "Logit lens: the rank of {}",
    "entropy": "Logit lens: the entropy of the next token",
}


@styled
def logit_lens(
    source: Source | LogitLens,
    *,
    iteration: int | None = None,
    sample: int = 0,
    positions: slice | Sequence[int] = LAST_POSITIONS,
    tied: bool | None = None,
    tokens: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    show: LensNumber = "probability",
) -> Figure:
    """The most likely next token after each layer, shaded by its probability.

    Rows go downwards as the model runs, as in a table: the model's own answer is at the bottom. Of a cache
    the weights are fetched from all ranks: every rank calls it alike.

    Args:
        source: a dump, a cache, a dump's path, or the result of `figures.logit_lens`.
        iteration: by default the last one.
        sample: the index among the source's samples, from 0.
        positions: the tokens to draw.
        tied: whether the output layer shares the word embeddings, where a dump does not have that.
        tokens: of the full sample, to label the axis instead of positions.
        tokenizer: the text of a token id, or its bytes: `tokenizer.decode`.
        show: `probability` writes the likeliest token, shaded by its probability; `rank` the rank of the
            answer that the last layer gives (1 is the likeliest), or of `targets` of `figures.logit_lens`;
            `entropy` the entropy of the distribution in nats.

    Returns:
        A figure of matplotlib.

    Raises:
        FlexError: the source lacks streams or weights, or figure data lack what is to be shown; matplotlib
            is not installed.

    Examples:
        >>> plot.logit_lens("dumps/run", tokenizer=str).savefig("lens.png")
    """
    figure_data = (
        source
        if isinstance(source, LogitLens)
        else figures.logit_lens(source, iteration, sample, 1, positions=positions, tied=tied)
    )
    shown, words, how = _lens_cells(figure_data, show, tokenizer)
    layers, places = shown.shape
    figure = new_figure(
        max(6.0, 0.62 * min(places, MAX_WRITTEN_POSITIONS) + 1.8), max(3.0, 0.32 * layers + 1.8)
    )
    axes = figure.subplots()
    image = axes.imshow(shown, aspect="auto", **how)
    if places <= MAX_WRITTEN_POSITIONS:
        write_cells(axes, image.norm(shown), words, 1.0, how["cmap"].endswith("_r"))
    labels = place_labels(figure_data.tokens, tokens, tokenizer)
    turned = 45 if max(map(len, labels)) > SHORT_LABEL else 0
    label_ticks(axes.xaxis, labels, MAX_WRITTEN_POSITIONS, fontsize=SMALL, rotation=turned)
    label_ticks(axes.yaxis, [_stream_label(n) for n in figure_data.layers], 32, fontsize=SMALL)
    axes.set_xlabel("token" if tokens is not None else "position")
    label = {"entropy": "entropy, nats", "rank": "rank (color: logarithm)"}.get(show, show)
    figure.colorbar(image, ax=axes, label=label, pad=0.02)
    last = figure_data.targets is not None and (figure_data.targets == figure_data.ids[-1, :, 0]).all()
    ranked = "the last layer's answer" if last else "the target token"
    return finish_figure(figure, LENS_TITLES[show].format(ranked), figure_data.caption)


def _lens_cells(
    figure_data: LogitLens, show: LensNumber, tokenizer: Tokenizer | None
) -> tuple[Any, list[list[str]], dict[str, Any]]:
    """The numbers that are drawn, the text of each cell, and how the image is coloured."""
    if show not in LENS_TITLES:
        raise FlexError(f"show={show!r}: show one of {', '.join(LENS_TITLES)}")
    if show == "probability":
        words = [token_labels(line, tokenizer, 8) for line in figure_data.ids[:, :, 0].tolist()]
        return figure_data.probabilities[:, :, 0], words, {"cmap": "magma", "vmin": 0, "vmax": 1}
    numbers = figure_data.ranks if show == "rank" else figure_data.entropies
    if numbers is None:
        raise FlexError(f"this logit lens has no {show}: make it by figures.logit_lens of this version")
    if show == "entropy":
        words = [[f"{value:.2f}" for value in line] for line in numbers.tolist()]
        return numbers, words, {"cmap": "magma_r", "vmin": 0}
    from matplotlib.colors import LogNorm

    words = [[str(rank) for rank in line] for line in numbers.tolist()]
    return numbers, words, {"cmap": "magma_r", "norm": LogNorm(1, max(2, int(numbers.max())))}


def _stream_label(layers: int) -> str:
    return f"layer {layers - 1} output" if layers else "embeddings"
