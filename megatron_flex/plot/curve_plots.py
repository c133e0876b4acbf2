"""Curves and ridges: norms by site, how far two dumps are apart, and histograms of one tensor over
iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_flex import figures
from megatron_flex.errors import FlexError
from megatron_flex.figures import Divergence, Histograms, Norms, Source
from megatron_flex.figures.histogram_bins import fold_bins, symlog
from megatron_flex.figures.tensor_figures import LAYER_OUTPUTS
from megatron_flex.plot.canvas import (
    GREY,
    LAYER_NUMBER,
    RED,
    SERIES_COLORS,
    SMALL,
    add_iteration_bar,
    finish_figure,
    iteration_colors,
    label_sites,
    label_ticks,
    new_figure,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from megatron_flex.compare import Comparison


LOG_RATIO = 20  # ratio of greatest to least value from which an axis is logarithmic
BAND_NAME = "10th to 90th percentile of tokens"


@styled
def norms(source: Source | Norms, pattern: str = LAYER_OUTPUTS, *, rms: bool = False) -> Figure:
    """The norm of a token in the residual stream, or in other tensors, by layer: a curve for each iteration.

    A curve is the mean over all tokens; the band around the last iteration's has the 10th to the 90th
    percentile. Statistics do not have the norms of single tokens: there, and for tensors without tokens, it
    is the norm of the full tensor. Of one tensor over several iterations the curve goes over these.

    Args:
        source: a dump, statistics, a cache, a path of one of the first two, or the result of `figures.norms`.
        pattern: a site's name, a module's (for its output) or a glob, as for hooks.
        rms: draw the root of the mean square of the full tensor, which does not grow with the number of
            values.

    Returns:
        A figure of matplotlib.

    Raises:
        FlexError: nothing of that name was dumped or measured; matplotlib is not installed.

    Examples:
        >>> plot.norms("stats/run", rms=True).savefig("norms.png")
    """
    import numpy as np

    figure_data = source if isinstance(source, Norms) else figures.norms(source, pattern, tokens=not rms)
    values, band, label = figure_data.values, None, "norm of the full tensor"
    if rms:
        values, label = values / np.sqrt(np.maximum(figure_data.counts, 1)), "RMS"
    elif figure_data.token_norms is not None and np.isfinite(figure_data.token_norms).any():
        values, *band = figure_data.token_norms
        label = "mean norm of a token"
    figure = new_figure(max(6.0, min(16.0, 0.3 * len(figure_data.sites) + 3)), 4.2)
    axes = figure.subplots()
    if len(figure_data.sites) == 1 and len(figure_data.iterations) > 1:
        places: Any = figure_data.iterations
        lines, marks, bands = values.T, figure_data.broken.T, None if band is None else [b.T for b in band]
        colors: list[Any] = [None]
        axes.set_xlabel("iteration")
    else:
        places = range(len(figure_data.sites))
        lines, marks, bands = values, figure_data.broken, band
        colors = iteration_colors(figure_data.iterations)
        label_sites(axes, figure_data.sites)
        add_iteration_bar(figure, axes, figure_data.iterations)
    for line, color, broken in zip(lines, colors, marks, strict=True):
        axes.plot(places, line, color=color, marker="o")
        _mark_nonfinite(axes, places, line, broken)
    if bands is not None:  # of the last one alone: several would cover each other
        low, high = (b[-1] for b in bands)
        color = axes.get_lines()[0].get_color() if colors[-1] is None else colors[-1]
        axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0, label=BAND_NAME)
        values = np.concatenate([values, *bands]) if values.shape == bands[0].shape else values
    _log_where_wide(axes, values)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(*_unique_legend(axes), loc="best")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    return finish_figure(figure, "RMS by site" if rms else "Norm by site", figure_data.caption)


def _mark_nonfinite(axes: Axes, places: Any, values: Any, broken: Any) -> None:
    """Mark NaNs and infinities, which the norm excludes; at zero where there is nothing else."""
    at = [n for n, count in enumerate(broken) if count]
    if at:
        heights = [0.0 if math.isnan(values[n]) else values[n] for n in at]
        axes.plot(
            [places[n] for n in at],
            heights,
            "x",
            color=RED,
            markersize=6,
            label="NaNs or infinities",
            zorder=5,
        )


def _unique_legend(axes: Axes) -> tuple[list[Any], list[str]]:
    named = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(named.values()), list(named)


def _log_where_wide(axes: Axes, values: Any) -> None:
    drawn = values[(values > 0) & (values < math.inf)]
    if drawn.size and drawn.max() > LOG_RATIO * drawn.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


MAX_SERIES = 10  # kinds of sites with a colour and a name of their own
BEFORE, AFTER = "before", "after"  # where sites outside of layers are drawn
MARKERS = "osD^vP"


@styled
def divergence(comparison: Comparison | Divergence, *, iteration: int | None = None) -> Figure:
    """The error by layer, a series for each kind of site, and the tolerances; the first divergence marked.

    A kind is what sites of different layers have in common, such as `mlp.linear_fc1:output`. Sites before
    and after the layers are at the left and right end. Tensors that are equal bit for bit are on the floor,
    which the axis names; where one dump has NaNs that the other has not, at the ceiling. Of many kinds those
    that are nearest to their tolerance, or farthest above, have colours and names.

    Args:
        comparison: the result of `compare.compare(a, b)` or `figures.divergence`.
        iteration: the one to draw; by default that of the first divergence, or else the last.

    Returns:
        A figure of matplotlib.

    Raises:
        FlexError: nothing was compared, or not that iteration; matplotlib is not installed.

    Examples:
        >>> from megatron_flex.compare import compare
        >>> plot.divergence(compare("dumps/run", "dumps/changed")).savefig("divergence.png")
    """
    figure_data = comparison if isinstance(comparison, Divergence) else figures.divergence(comparison)
    number = _drawn_iteration(figure_data, iteration)
    line = figure_data.iterations.index(number)
    errors, tolerances = figure_data.errors[line], figure_data.tolerances[line]
    places, ticks = _places_of_sites(figure_data.sites)
    floor, ceiling = _error_bounds(errors, tolerances)
    series = _series(figure_data, errors, tolerances, number)
    named = set(list(series)[:MAX_SERIES])
    figure = new_figure(max(8.0, min(18.0, 0.28 * len(ticks) + 6)), 5.0)
    axes = figure.subplots()
    for rank, (kind, sites) in enumerate(series.items()):
        xs = [places[n] for n in sites]
        ys = [min(max(errors[n], floor), ceiling) for n in sites]
        how: dict[str, Any] = {"color": "0.75", "linewidth": 0.7, "zorder": 1}
        if kind in named:
            lap, hue = divmod(rank, len(SERIES_COLORS))
            marker = MARKERS[(hue + lap) % len(MARKERS)]  # a color that comes again has another marker
            how = {
                "color": SERIES_COLORS[hue],
                "marker": marker,
                "label": _short_kind(kind, series),
                "zorder": 3,
            }
        axes.plot(xs, ys, **how)
    if len(series) > MAX_SERIES:
        axes.plot([], [], color="0.75", linewidth=0.7, label=f"{len(series) - MAX_SERIES} other kinds")
    at, least, greatest = _tolerance_band(places, tolerances)
    axes.plot(at, greatest, "--", color=GREY, linewidth=1, label="tolerance")
    if least != greatest:  # kinds of tensors at one place have tolerances of their own
        axes.plot(at, least, "--", color=GREY, linewidth=1)
        axes.fill_between(at, least, greatest, color=GREY, alpha=0.12, linewidth=0, zorder=0)
    over = [n for n in range(len(errors)) if errors[n] > tolerances[n]]
    axes.plot(
        [places[n] for n in over],
        [min(errors[n], ceiling) for n in over],
        "o",
        color=RED,
        markersize=8,
        fillstyle="none",
        label="above its own tolerance" if over else None,
        zorder=4,
    )
    axes.set(yscale="log", ylabel="error", ylim=(floor / 3, ceiling * 3), xlim=(-0.6, len(ticks) - 0.4))
    _label_floor(axes, floor, ceiling, math.inf in errors)
    label_ticks(axes.xaxis, ticks, 48)
    axes.set_xlabel("layer")
    if figure_data.first is not None and figure_data.first[1] == number:
        _mark_first(axes, figure_data, places, ceiling)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, labelspacing=0.35)
    return finish_figure(figure, f"Divergence by layer, iteration {number}", figure_data.caption)


def _drawn_iteration(figure_data: Divergence, iteration: int | None) -> int:
    if iteration is None:
        return figure_data.iterations[-1] if figure_data.first is None else figure_data.first[1]
    if iteration not in figure_data.iterations:
        compared = ", ".join(map(str, figure_data.iterations))
        raise FlexError(f"iteration {iteration} was not compared; there are {compared}")
    return iteration


def _places_of_sites(sites: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """The place of each site on the axis, and the labels of the places: layers, and what is outside them."""
    matches = [LAYER_NUMBER.search(name) for name in sites]
    inside = [n for n, match in enumerate(matches) if match is not None]
    layers = sorted({int(match[0]) for match in matches if match is not None})
    first, last = (inside[0], inside[-1]) if inside else (0, -1)
    ends = [n < first for n in range(len(sites)) if n not in set(inside)]
    labels = [*([BEFORE] if any(ends) else []), *map(str, layers), *([] if all(ends) else [AFTER])]
    at = {label: n for n, label in enumerate(labels)}
    middle = (first + last) / 2  # a site between layers, such as of another stack, is with the nearer end
    places = [
        at[str(int(match[0]))]
        if match is not None
        else at[BEFORE if n < first or (n < middle and BEFORE in at) else AFTER]
        for n, match in enumerate(matches)
    ]
    return places, labels


def _kind(site: str) -> str:
    return LAYER_NUMBER.sub("*", site, count=1)


def _series(figure_data: Divergence, errors: Any, tolerances: Any, iteration: int) -> dict[str, list[int]]:
    """The sites of each kind; the kind of the first divergence first, then by error over tolerance."""
    kinds: dict[str, list[int]] = {}
    for n, site in enumerate(figure_data.sites):
        if not math.isnan(errors[n]):
            kinds.setdefault(_kind(site), []).append(n)
    first = (
        None
        if figure_data.first is None or figure_data.first[1] != iteration
        else _kind(figure_data.first[0])
    )

    def weight(kind: str) -> tuple[bool, float]:
        return kind == first, max(
            errors[n] / tolerances[n] if tolerances[n] > 0 else errors[n] for n in kinds[kind]
        )

    return {kind: kinds[kind] for kind in sorted(kinds, key=weight, reverse=True)}


def _short_kind(kind: str, series: Iterable[str]) -> str:
    """Without the path of the layers, where all kinds with layers have the same."""
    fronts = {k.partition("*")[0] for k in series if "*" in k}
    return kind.partition("*")[2].lstrip(".:") if len(fronts) == 1 and "*" in kind else kind


def _tolerance_band(places: list[int], tolerances: Any) -> tuple[list[int], list[float], list[float]]:
    """The places with tolerances, and the least and the greatest tolerance at each of them."""
    by_place: dict[int, list[float]] = {}
    for place, tolerance in zip(places, tolerances, strict=True):
        if tolerance > 0:
            by_place.setdefault(place, []).append(float(tolerance))
    at = sorted(by_place)
    return at, [min(by_place[place]) for place in at], [max(by_place[place]) for place in at]


def _error_bounds(errors: Any, tolerances: Any) -> tuple[float, float]:
    """The positions of zero and infinite errors on a logarithmic axis."""
    both = [*errors, *tolerances]
    drawn = [v for v in both if 0 < v < math.inf] or [1e-7, 1.0]
    return min(drawn) / 10, max(drawn) * (10 if math.inf in both else 1)


def _label_floor(axes: Axes, floor: float, ceiling: float, infinite: bool) -> None:
    """Name the floor, and the ceiling where something is at it, among the powers of ten between."""
    powers = [10.0**p for p in range(math.ceil(math.log10(floor * 3)), math.floor(math.log10(ceiling)) + 1)]
    powers = powers[:: max(1, -(-len(powers) // 8))]
    marks = [(floor, "equal"), *((p, f"$10^{{{round(math.log10(p))}}}$") for p in powers)]
    if infinite:
        marks = [*((p, text) for p, text in marks if p < ceiling / 3), (ceiling, "NaN")]
    axes.set_yticks([p for p, _ in marks], [text for _, text in marks])
    axes.minorticks_off()
    axes.axhline(floor, color=GREY, linestyle=":", linewidth=0.8, zorder=0)


def _mark_first(axes: Axes, figure_data: Divergence, places: list[int], ceiling: float) -> None:
    assert figure_data.first is not None
    site, _ = figure_data.first
    at = places[figure_data.sites.index(site)]
    left = at < max(places, default=0) / 2
    axes.axvline(at, color=RED, linewidth=0.8, alpha=0.6)
    axes.annotate(
        f"first: {site}",
        (at, ceiling * 1.4),
        xytext=(5 if left else -5, 0),
        textcoords="offset points",
        ha="left" if left else "right",
        color=RED,
        fontsize=SMALL,
        parse_math=False,
    )


MAX_RIDGES = 24  # maximum that is still readable
OVERLAP = 2.2  # overlap of the highest ridge, in rows


@styled
def histograms(source: Source | Histograms, site: str = "") -> Figure:
    """The distribution of a tensor's values, a ridge for each iteration, the first one at the top.

    Ridges are densities on a symmetric logarithmic axis: linear as far as nine of ten values are, which the
    dotted lines mark, and one unit for each power of two beyond. Exact zeros have no width: their share is
    written at the right. Of many iterations 24 are drawn.

    Args:
        source: a dump, statistics, a cache, a path of those, or the result of `figures.histograms`.
        site: its name, or the module's for its output.

    Returns:
        A figure of matplotlib.

    Raises:
        FlexError: it was not dumped or measured, or without histograms; matplotlib is not installed.

    Examples:
        >>> plot.histograms("stats/run", "decoder.layers.3").savefig("histograms.png")
    """
    import numpy as np

    figure_data = source if isinstance(source, Histograms) else figures.histograms(source, site)
    if not figure_data.counts.sum():
        raise FlexError(f"{figure_data.site}: no finite values, of which there could be a histogram")
    many = len(figure_data.iterations)
    rows = np.unique(np.linspace(0, many - 1, min(MAX_RIDGES, many)).round())
    shown = [int(row) for row in rows]
    numbers = [figure_data.iterations[row] for row in shown]
    bins = fold_bins(figure_data.counts[shown].tolist())
    places = np.array([symlog(edge, bins.linear) for edge in bins.edges])
    counts = np.array(bins.counts)
    densities = counts / np.diff(places) / np.maximum(counts.sum(1, keepdims=True), 1)
    figure = new_figure(8.5, max(3.2, 0.34 * len(shown) + 2.2))
    axes = figure.subplots()
    height = (OVERLAP if len(shown) > 1 else 1) / max(float(densities.max()), 1e-12)
    for depth, (density, color) in enumerate(zip(densities, iteration_colors(numbers), strict=True)):
        base = -float(depth)
        axes.stairs(
            base + density * height, places, baseline=base, fill=True, color=color, alpha=0.75, zorder=depth
        )
        axes.stairs(
            base + density * height, places, baseline=base, color="white", linewidth=0.7, zorder=depth + 0.5
        )
        if zeros := bins.zeros[depth]:
            text = f" {100 * zeros / (zeros + counts[depth].sum()):.3g} % zeros"
            axes.annotate(text, (places[-1], base), va="bottom", fontsize=SMALL, color=GREY)
    for end in (-1.0, 1.0):
        axes.axvline(end, color=GREY, linestyle=":", linewidth=0.8, zorder=-1)
    axes.set_yticks([-float(n) for n in range(len(shown))], [str(n) for n in numbers])
    axes.set(ylabel="iteration", xlabel="value (linear between the dotted lines, logarithmic beyond)")
    _label_powers(axes, places, bins.linear)
    few = "" if len(shown) == many else f" · {len(shown)} of {many} drawn"
    return finish_figure(figure, f"Values of {figure_data.site}", figure_data.caption + few)


MIN_TICK = 0.055  # of the axis' width, between two labels


def _label_powers(axes: Axes, places: Any, linear: float) -> None:
    """Label zero, the ends of the linear part, their halves, and powers of two beyond."""
    low, high = min(float(places[0]), 0.0), max(float(places[-1]), 0.0)
    exponent = round(math.log2(linear))
    step = max(1, math.ceil(MIN_TICK * (high - low)))
    marks = {0.0: "0"}
    for sign, end in ((-1, -low), (1, high)):
        minus = "-" if sign < 0 else ""
        marks |= {
            sign * (1.0 + n): f"${minus}2^{{{exponent + n}}}$"
            for n in range(0, math.floor(end), step)
            if 1 + n <= end
        }
        if end >= 0.5 > MIN_TICK * (high - low):
            marks[sign * 0.5] = f"${minus}2^{{{exponent - 1}}}$"
    axes.set_xticks(sorted(marks), [marks[at] for at in sorted(marks)])
    axes.set_xlim(low - 0.01 * (high - low), high + 0.01 * (high - low))
