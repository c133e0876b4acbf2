"""Curves over sites: norms by layer, and how far two dumps are apart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from megatron_flex import figures
from megatron_flex.figures import ComparisonLike, Divergence, Norms, Source
from megatron_flex.figures.streams import STREAM
from megatron_flex.plot.canvas import GREY, RED, finish, iteration_bar, iteration_colors, new, site_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 20  # how many times the least value the greatest is, where an axis becomes logarithmic


def norms(source: Source | Norms, pattern: str = STREAM, *, rms: bool = False) -> Figure:
    """The norm of the residual stream, or of other tensors, by layer: a curve for each iteration.

    Of one tensor over several iterations the curve goes over these.

    Args:
        source: a dump, statistics, a cache, a path of one of the first two, or what `figures.norms` gave.
        pattern: a site's name, a module's (its output is meant) or a glob, as for hooks.
        rms: draw the root of the mean square, which does not grow with the number of values.

    Raises:
        FlexError: nothing of that name was dumped or measured; matplotlib is not installed.
    """
    made = source if isinstance(source, Norms) else figures.norms(source, pattern)
    values = made.values
    if rms:
        import numpy as np

        values = values / np.sqrt(np.maximum(made.counts, 1))
    figure = new(max(6.0, min(16.0, 0.3 * len(made.sites) + 3)), 4.2)
    axes = figure.subplots()
    many = len(made.iterations)
    if len(made.sites) == 1 and many > 1:
        axes.plot(made.iterations, values[:, 0], marker="o", markersize=3)
        _mark(axes, made.iterations, values[:, 0], made.broken[:, 0])
        axes.set_xlabel("iteration")
    else:
        places = range(len(made.sites))
        for line, color, broken in zip(values, iteration_colors(made.iterations), made.broken, strict=True):
            axes.plot(places, line, color=color, marker="o", markersize=3)
            _mark(axes, places, line, broken)
        site_ticks(axes, made.sites)
        iteration_bar(figure, axes, made.iterations)
    _log_where_wide(axes, values)
    if made.broken.any():
        axes.legend(*_first_of_each(axes), fontsize=8)
    axes.set_ylabel("RMS" if rms else "norm")
    axes.grid(alpha=0.3)
    return finish(figure, "RMS by site" if rms else "Norm by site", made.caption)


def _mark(axes: Axes, places: Any, values: Any, broken: Any) -> None:
    """Mark where there were NaNs or infinities, which are in no norm; at zero where nothing else was."""
    at = [n for n, count in enumerate(broken) if count]
    if at:
        heights = [0.0 if math.isnan(values[n]) else values[n] for n in at]
        axes.plot([places[n] for n in at], heights, "x", color=RED, label="NaNs or infinities", zorder=5)


def _first_of_each(axes: Axes) -> tuple[list[Any], list[str]]:
    named = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    return list(named.values()), list(named)


def _log_where_wide(axes: Axes, values: Any) -> None:
    there = values[(values > 0) & (values < math.inf)]
    if there.size and there.max() > WIDE * there.min():
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
    made = comparison if isinstance(comparison, Divergence) else figures.divergence(comparison)
    figure = new(max(7.0, min(18.0, 0.16 * len(made.sites) + 4)), 5.6)
    axes = figure.subplots()
    floor, ceiling = _ends(made)
    places = range(len(made.sites))
    heights = made.errors.clip(floor, ceiling)
    for line, color in zip(heights, iteration_colors(made.iterations), strict=True):
        axes.plot(places, line, color=color, marker="o", markersize=3, linewidth=1)
    axes.plot(places, _greatest(made.tolerances), color=GREY, linestyle="--", linewidth=1, label="tolerance")
    above = made.errors > made.tolerances
    for line, over in zip(heights, above, strict=True):
        at = [n for n in places if over[n]]
        axes.plot(at, line[at], "o", color=RED, markersize=4, label="above tolerance" if at else None)
    axes.axhline(floor * 3, color=GREY, linestyle=":", linewidth=0.8)
    axes.text(1.0, floor * 1.2, "equal ", ha="right", fontsize=8, color=GREY, transform=_across(axes))
    if made.first is not None:
        _mark_first(axes, made, heights)
    axes.set(yscale="log", ylabel="error", ylim=(floor / 2, ceiling * 3), xlim=(-0.8, len(made.sites) - 0.2))
    site_ticks(axes, made.sites)
    axes.grid(alpha=0.3, axis="y")
    handles, labels = _first_of_each(axes)  # above the axes, where no curve and no mark can be
    axes.legend(handles, labels, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    iteration_bar(figure, axes, made.iterations)
    return finish(figure, "Divergence by site, in the order of execution", made.caption)


def _across(axes: Axes) -> Any:
    return axes.get_yaxis_transform()


def _ends(made: Divergence) -> tuple[float, float]:
    """Where errors of zero and infinite ones stand on a logarithmic axis."""
    both = [*made.errors.flat, *made.tolerances.flat]
    there = [v for v in both if 0 < v < math.inf] or [1e-7, 1.0]
    return min(there) / 10, max(there) * (10 if math.inf in both else 1)


def _greatest(tolerances: Any) -> Any:
    """Of each site over the iterations."""
    import numpy as np

    return np.where(np.isnan(tolerances), 0, tolerances).max(0)


def _mark_first(axes: Axes, made: Divergence, heights: Any) -> None:
    assert made.first is not None
    site, iteration = made.first
    at = made.sites.index(site)
    height = heights[made.iterations.index(iteration), at]
    left = at < len(made.sites) / 2
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
