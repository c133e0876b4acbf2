"""Curves and ridges: norms by site, how far two dumps are apart, and histograms of one tensor over
iterations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from megatron_flex import figures
from megatron_flex.errors import FlexError
from megatron_flex.figures import ComparisonLike, Divergence, Histograms, Norms, Source
from megatron_flex.figures.tensor_figures import LAYER_OUTPUTS
from megatron_flex.plot.canvas import (
    GREY,
    RED,
    SMALL,
    add_iteration_bar,
    finish_figure,
    iteration_colors,
    label_sites,
    new_figure,
)
from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, LOWEST_EXPONENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LOG_RATIO = 20  # ratio of greatest to least value from which an axis is logarithmic


def norms(source: Source | Norms, pattern: str = LAYER_OUTPUTS, *, rms: bool = False) -> Figure:
    """The norm of the residual stream, or of other tensors, by layer: a curve for each iteration.

    Of one tensor over several iterations the curve goes over these.

    Args:
        source: a dump, statistics, a cache, a path of one of the first two, or the result of `figures.norms`.
        pattern: a site's name, a module's (for its output) or a glob, as for hooks.
        rms: draw the root of the mean square, which does not grow with the number of values.

    Raises:
        FlexError: nothing of that name was dumped or measured; matplotlib is not installed.
    """
    figure_data = source if isinstance(source, Norms) else figures.norms(source, pattern)
    values = figure_data.values
    if rms:
        import numpy as np

        values = values / np.sqrt(np.maximum(figure_data.counts, 1))
    figure = new_figure(max(6.0, min(16.0, 0.3 * len(figure_data.sites) + 3)), 4.2)
    axes = figure.subplots()
    many = len(figure_data.iterations)
    if len(figure_data.sites) == 1 and many > 1:
        axes.plot(figure_data.iterations, values[:, 0], marker="o", markersize=3)
        _mark_nonfinite(axes, figure_data.iterations, values[:, 0], figure_data.broken[:, 0])
        axes.set_xlabel("iteration")
    else:
        places = range(len(figure_data.sites))
        for line, color, broken in zip(
            values, iteration_colors(figure_data.iterations), figure_data.broken, strict=True
        ):
            axes.plot(places, line, color=color, marker="o", markersize=3)
            _mark_nonfinite(axes, places, line, broken)
        label_sites(axes, figure_data.sites)
        add_iteration_bar(figure, axes, figure_data.iterations)
    _log_where_wide(axes, values)
    if figure_data.broken.any():
        axes.legend(*_unique_legend(axes), fontsize=8)
    axes.set_ylabel("RMS" if rms else "norm")
    axes.grid(alpha=0.3)
    return finish_figure(figure, "RMS by site" if rms else "Norm by site", figure_data.caption)


def _mark_nonfinite(axes: Axes, places: Any, values: Any, broken: Any) -> None:
    """Mark NaNs and infinities, which the norm excludes; at zero where there is nothing else."""
    at = [n for n, count in enumerate(broken) if count]
    if at:
        heights = [0.0 if math.isnan(values[n]) else values[n] for n in at]
        axes.plot([places[n] for n in at], heights, "x", color=RED, label="NaNs or infinities", zorder=5)


def _unique_legend(axes: Axes) -> tuple[list[Any], list[str]]:
    named = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(named.values()), list(named)


def _log_where_wide(axes: Axes, values: Any) -> None:
    there = values[(values > 0) & (values < math.inf)]
    if there.size and there.max() > LOG_RATIO * there.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def divergence(comparison: ComparisonLike | Divergence) -> Figure:
    """The error of each site in execution order, against its tolerance; the first divergence marked.

    Where two dumps are equal bit for bit the error is on the floor, below the dotted line; where one has
    NaNs that the other has not, at the ceiling.

    Args:
        comparison: the result of `compare.compare(a, b)` or `figures.divergence`.

    Raises:
        FlexError: nothing was compared; matplotlib is not installed.
    """
    figure_data = comparison if isinstance(comparison, Divergence) else figures.divergence(comparison)
    figure = new_figure(max(7.0, min(18.0, 0.16 * len(figure_data.sites) + 4)), 5.6)
    axes = figure.subplots()
    floor, ceiling = _error_bounds(figure_data)
    places = range(len(figure_data.sites))
    heights = figure_data.errors.clip(floor, ceiling)
    for line, color in zip(heights, iteration_colors(figure_data.iterations), strict=True):
        axes.plot(places, line, color=color, marker="o", markersize=3, linewidth=1)
    axes.plot(
        places,
        _max_tolerances(figure_data.tolerances),
        color=GREY,
        linestyle="--",
        linewidth=1,
        label="tolerance",
    )
    above = figure_data.errors > figure_data.tolerances
    for line, over in zip(heights, above, strict=True):
        at = [n for n in places if over[n]]
        axes.plot(at, line[at], "o", color=RED, markersize=4, label="above tolerance" if at else None)
    axes.axhline(floor * 3, color=GREY, linestyle=":", linewidth=0.8)
    axes.text(1.0, floor * 1.2, "equal ", ha="right", fontsize=8, color=GREY, transform=_axis_transform(axes))
    if figure_data.first is not None:
        _mark_first(axes, figure_data, heights)
    axes.set(
        yscale="log", ylabel="error", ylim=(floor / 2, ceiling * 3), xlim=(-0.8, len(figure_data.sites) - 0.2)
    )
    label_sites(axes, figure_data.sites)
    axes.grid(alpha=0.3, axis="y")
    handles, labels = _unique_legend(axes)  # above the axes, where there are no curves and marks
    axes.legend(handles, labels, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    add_iteration_bar(figure, axes, figure_data.iterations)
    return finish_figure(figure, "Divergence by site, in the order of execution", figure_data.caption)


def _axis_transform(axes: Axes) -> Any:
    return axes.get_yaxis_transform()


def _error_bounds(figure_data: Divergence) -> tuple[float, float]:
    """The positions of zero and infinite errors on a logarithmic axis."""
    both = [*figure_data.errors.flat, *figure_data.tolerances.flat]
    there = [v for v in both if 0 < v < math.inf] or [1e-7, 1.0]
    return min(there) / 10, max(there) * (10 if math.inf in both else 1)


def _max_tolerances(tolerances: Any) -> Any:
    """For each site over the iterations."""
    import numpy as np

    return np.where(np.isnan(tolerances), 0, tolerances).max(0)


def _mark_first(axes: Axes, figure_data: Divergence, heights: Any) -> None:
    assert figure_data.first is not None
    site, iteration = figure_data.first
    at = figure_data.sites.index(site)
    height = heights[figure_data.iterations.index(iteration), at]
    left = at < len(figure_data.sites) / 2
    axes.axvline(at, color=RED, linewidth=0.8, alpha=0.6)
    axes.annotate(
        f"first: {site}",
        (at, height),
        xytext=(8 if left else -8, 8),
        textcoords="offset points",
        ha="left" if left else "right",
        color=RED,
        fontsize=8,
        parse_math=False,
    )


MAX_RIDGES = 24  # maximum that is still readable
OVERLAP = 2.2  # overlap of the highest ridge, in rows


def histograms(source: Source | Histograms, site: str = "") -> Figure:
    """The distribution of a tensor's values, a ridge for each iteration, the first one at the top.

    Bins are powers of two, negative ones on the left, exact zeros in the middle; bins that are empty in all
    iterations at either end, and around zero, are left out. Of many iterations 24 are drawn.

    Args:
        source: a dump, statistics, a cache, a path of those, or the result of `figures.histograms`.
        site: its name, or the module's for its output.

    Raises:
        FlexError: it was not dumped or measured, or without histograms; matplotlib is not installed.
    """
    import numpy as np

    figure_data = source if isinstance(source, Histograms) else figures.histograms(source, site)
    if not figure_data.counts.sum():
        raise FlexError(f"{figure_data.site}: no finite values, of which there could be a histogram")
    rows = np.unique(
        np.linspace(0, len(figure_data.iterations) - 1, min(MAX_RIDGES, len(figure_data.iterations))).round()
    )
    shown = [int(row) for row in rows]
    numbers = [figure_data.iterations[row] for row in shown]
    columns, exponents = _used_bins(figure_data.counts)
    shares = figure_data.counts[np.ix_(shown, columns)] / np.maximum(
        figure_data.counts[shown].sum(1, keepdims=True), 1
    )
    figure = new_figure(8.5, max(3.2, 0.34 * len(shown) + 2.2))
    axes = figure.subplots()
    height = OVERLAP / shares.max() if len(shown) > 1 else 1 / shares.max()
    places = np.arange(len(columns))
    for depth, (share, color) in enumerate(zip(shares, iteration_colors(numbers), strict=True)):
        base = -float(depth)
        axes.fill_between(
            places,
            base,
            base + share * height,
            color=color,
            alpha=0.75,
            linewidth=0,
            step="mid",
            zorder=depth,
        )
        axes.step(
            places, base + share * height, color="white", linewidth=0.7, where="mid", zorder=depth + 0.5
        )
    axes.set_yticks([-float(n) for n in range(len(shown))], [str(n) for n in numbers], fontsize=SMALL)
    axes.set_ylabel("iteration")
    axes.set_xlabel("value")
    _label_powers(axes, exponents)
    few = (
        ""
        if len(shown) == len(figure_data.iterations)
        else f" · {len(shown)} of {len(figure_data.iterations)} drawn"
    )
    return finish_figure(figure, f"Values of {figure_data.site}", figure_data.caption + few)


def _used_bins(counts: Any) -> tuple[list[int], list[int]]:
    """The bins from the least to the greatest exponent that occurs, of both signs, with the zero bin.

    Returns:
        The bins, and the exponents of the positive ones.
    """
    used = counts.sum(0)
    both = used[:BINS_PER_SIGN][::-1] + used[BINS_PER_SIGN + 1 :]
    there = [n for n, count in enumerate(both) if count] or [-LOWEST_EXPONENT]
    low, high = there[0], there[-1]
    inside = list(range(low, high + 1))
    return [
        *(BINS_PER_SIGN - 1 - n for n in reversed(inside)),
        BINS_PER_SIGN,
        *(BINS_PER_SIGN + 1 + n for n in inside),
    ], [LOWEST_EXPONENT + n for n in inside]


def _label_powers(axes: Axes, exponents: list[int]) -> None:
    """Label bins of both signs with their powers of two, zeros with 0."""
    middle = len(exponents)
    step = max(1, -(-middle // 8))
    chosen = range(middle - 1, -1, -step)
    right = [(middle + 1 + n, f"$2^{{{exponents[n]}}}$") for n in chosen]
    left = [(middle - 1 - n, f"$-2^{{{exponents[n]}}}$") for n in chosen]
    every = sorted([*left, (middle, "0"), *right])
    axes.set_xticks([at for at, _ in every], [label for _, label in every], fontsize=SMALL)
    axes.set_xlim(-0.7, 2 * middle + 0.7)
