"""Curves over sites: norms by layer, and how far two dumps are apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from megatron_flex import figures
from megatron_flex.figures import ComparisonLike, Divergence, Norms, Source
from megatron_flex.figures.streams import LAYER_OUTPUTS
from megatron_flex.plot.canvas import GREY, RED, finish_figure, add_iteration_bar, iteration_colors, new_figure, label_sites

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_RATIO = 20  # how many times the least value the greatest is, where an axis becomes logarithmic


def norms(source: Source | Norms, pattern: str = LAYER_OUTPUTS, *, rms: bool = False) -> Figure:
    """The norm of the residual stream, or of other tensors, by layer: a curve for each iteration.

    Of one tensor over several iterations the curve goes over these.

    Args:
        source: a dump, statistics, a cache, a path of one of the first two, or what `figures.norms` gave.
        pattern: a site's name, a module's (its output is meant) or a glob, as for hooks.
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
        for line, color, broken in zip(values, iteration_colors(figure_data.iterations), figure_data.broken, strict=True):
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
    """Mark where there were NaNs or infinities, which are in no norm; at zero where nothing else was."""
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
    """The error of each site in the order of execution, against its tolerance; the first divergence marked.

    Where two dumps are equal bit for bit the error stands on the floor, below the dotted line; where one has
    NaNs that the other has not, at the ceiling.

    Args:
        comparison: what `compare.compare(a, b)` or `figures.divergence` gave.

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
    axes.plot(places, _max_tolerances(figure_data.tolerances), color=GREY, linestyle="--", linewidth=1, label="tolerance")
    above = figure_data.errors > figure_data.tolerances
    for line, over in zip(heights, above, strict=True):
        at = [n for n in places if over[n]]
        axes.plot(at, line[at], "o", color=RED, markersize=4, label="above tolerance" if at else None)
    axes.axhline(floor * 3, color=GREY, linestyle=":", linewidth=0.8)
    axes.text(1.0, floor * 1.2, "equal ", ha="right", fontsize=8, color=GREY, transform=_axis_transform(axes))
    if figure_data.first is not None:
        _mark_first(axes, figure_data, heights)
    axes.set(yscale="log", ylabel="error", ylim=(floor / 2, ceiling * 3), xlim=(-0.8, len(figure_data.sites) - 0.2))
    label_sites(axes, figure_data.sites)
    axes.grid(alpha=0.3, axis="y")
    handles, labels = _unique_legend(axes)  # above the axes, where no curve and no mark can be
    axes.legend(handles, labels, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    add_iteration_bar(figure, axes, figure_data.iterations)
    return finish_figure(figure, "Divergence by site, in the order of execution", figure_data.caption)


def _axis_transform(axes: Axes) -> Any:
    return axes.get_yaxis_transform()


def _error_bounds(figure_data: Divergence) -> tuple[float, float]:
    """Where errors of zero and infinite ones stand on a logarithmic axis."""
    both = [*figure_data.errors.flat, *figure_data.tolerances.flat]
    there = [v for v in both if 0 < v < math.inf] or [1e-7, 1.0]
    return min(there) / 10, max(there) * (10 if math.inf in both else 1)


def _max_tolerances(tolerances: Any) -> Any:
    """Of each site over the iterations."""
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
