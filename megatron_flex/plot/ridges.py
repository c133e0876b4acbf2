"""Histograms of one tensor over iterations, one behind the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_flex import figures
from megatron_flex.errors import FlexError
from megatron_flex.figures import Histograms, Source
from megatron_flex.plot.canvas import SMALL, finish_figure, iteration_colors, new_figure
from megatron_flex.statistics.measured import LOWEST_EXPONENT, BINS_PER_SIGN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RIDGES = 24  # that can be told apart
OVERLAP = 2.2  # rows that the highest ridge reaches over


def histograms(source: Source | Histograms, site: str = "") -> Figure:
    """How a tensor's values are spread, a ridge for each iteration, the first one at the top.

    Bins are powers of two, negative ones on the left, exact zeros in the middle; bins that are empty in all
    iterations at either end, and around zero, are left out. Of many iterations 24 are drawn.

    Args:
        source: a dump, statistics, a cache, a path of one of those two, or what `figures.histograms` gave.
        site: its name, or the module's whose output is meant.

    Raises:
        FlexError: it was not dumped or measured, or without histograms; matplotlib is not installed.
    """
    import numpy as np

    figure_data = source if isinstance(source, Histograms) else figures.histograms(source, site)
    if not figure_data.counts.sum():
        raise FlexError(f"{figure_data.site}: no finite values, of which there could be a histogram")
    rows = np.unique(np.linspace(0, len(figure_data.iterations) - 1, min(MAX_RIDGES, len(figure_data.iterations))).round())
    shown = [int(row) for row in rows]
    numbers = [figure_data.iterations[row] for row in shown]
    columns, exponents = _used_bins(figure_data.counts)
    shares = figure_data.counts[np.ix_(shown, columns)] / np.maximum(figure_data.counts[shown].sum(1, keepdims=True), 1)
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
    few = "" if len(shown) == len(figure_data.iterations) else f" · {len(shown)} of {len(figure_data.iterations)} drawn"
    return finish_figure(figure, f"Values of {figure_data.site}", figure_data.caption + few)


def _used_bins(counts: Any) -> tuple[list[int], list[int]]:
    """The bins from the least to the greatest exponent that occurs, of both signs, with that of zeros.

    Returns:
        The bins, and the exponents of the positive ones.
    """
    used = counts.sum(0)
    both = used[:BINS_PER_SIGN][::-1] + used[BINS_PER_SIGN + 1 :]
    there = [n for n, count in enumerate(both) if count] or [-LOWEST_EXPONENT]
    low, high = there[0], there[-1]
    inside = list(range(low, high + 1))
    return [*(BINS_PER_SIGN - 1 - n for n in reversed(inside)), BINS_PER_SIGN, *(BINS_PER_SIGN + 1 + n for n in inside)], [
        LOWEST_EXPONENT + n for n in inside
    ]


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
