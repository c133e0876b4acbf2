"""The bins of histograms as they are drawn: on an axis that is linear as far as most values are, and
logarithmic beyond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, compute_bin_edges

LINEAR_SHARE = 0.9  # of the values, at least this share is on the linear part of the axis
NARROW = 5  # powers of two below the linear part's end: bins nearer to zero are one, as they hold few values


class DrawnBins(NamedTuple):
    """Histograms of one tensor, as far as they have values.

    Attributes:
        edges: of the bins, ascending; all finite; with zero between or at an end if there are zeros.
        counts: of each histogram the values in each bin, without exact zeros, which have no width.
        zeros: of each histogram the exact zeros.
        linear: the power of two up to which most values are.
    """

    edges: list[float]
    counts: list[list[int]]
    zeros: list[int]
    linear: float


def fold_bins(histograms: Sequence[Sequence[int]]) -> DrawnBins:
    """Merge the bins that are near zero, and leave out the empty ones at either end.

    Args:
        histograms: counts as in a row of statistics: negative values, zeros, positive values.
    """
    table = torch.tensor(histograms, dtype=torch.int64)
    zeros = table[:, BINS_PER_SIGN].tolist()
    negative, positive = table[:, :BINS_PER_SIGN], table[:, BINS_PER_SIGN + 1 :]
    inner = compute_bin_edges()[BINS_PER_SIGN + 2 : -1]
    powers = [*inner, 2 * inner[-1]]  # the upper ends of positive bins; of the endless one the next power
    magnitudes = (negative.flip(1) + positive).sum(0)
    if not magnitudes.any():
        return DrawnBins([-1.0, 1.0], [[0] for _ in zeros], zeros, 1.0)
    within = magnitudes.cumsum(0) >= LINEAR_SHARE * magnitudes.sum()
    most = int(within.int().argmax())
    near = max(1, most - NARROW + 1)  # bins of each sign that are merged
    sides = [side.tensor_split([BINS_PER_SIGN - near], 1) for side in (negative, positive.flip(1))]
    (below, below_near), (above, above_near) = ((far, close.sum(1, keepdim=True)) for far, close in sides)
    outer = powers[near - 1 :]
    if below.any() and above.any():
        middle, zero = below_near + above_near, []
    else:  # of one sign, or next to zero alone: zero stays an edge
        middle, zero = torch.cat([below_near, above_near], 1), [0.0]
    edges = [*(-power for power in reversed(outer)), *zero, *outer]
    counts = torch.cat([below, middle, above.flip(1)], 1)
    filled = counts.sum(0).nonzero().flatten().tolist()
    first, last = filled[0], filled[-1] + 1
    if zero and any(zeros):  # the axis begins or ends where the zeros are
        first, last = min(first, edges.index(0.0)), max(last, edges.index(0.0))
    return DrawnBins(edges[first : last + 1], counts[:, first:last].tolist(), zeros, powers[most])


def symlog(value: float, linear: float) -> float:
    """Where a value is: in units of `linear` up to it, beyond a unit for each power of two."""
    size = abs(value) / linear
    return math.copysign(size if size <= 1 else 1 + math.log2(size), value)
