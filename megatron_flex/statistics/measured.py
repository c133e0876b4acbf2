"""What is known of one tensor in one iteration: the numbers that all ranks came to together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

LOWEST_EXPONENT, HIGHEST_EXPONENT = -40, 23  # exponents of the first and the last bin; what lies beyond is counted in those
BINS_PER_SIGN = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1  # bins of positive values, and as many of negative ones

StatisticsKind = Literal["value", "gradient", "parameter_gradient"]


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """The statistics of one tensor, whole, over all microbatches and data parallel ranks of an iteration.

    NaNs and infinities are counted and are in none of the other numbers, which are of the finite values;
    those of no values are None.

    Attributes:
        iteration: as the framework counts.
        site: the name of the site or parameter, with `.grad` behind it for a gradient.
        kind: what it is of.
        order: the tensor's place among all that are measured: sites in model order, each one's gradient
            behind it, then parameters.
        stage: the pipeline stage that has it.
        count: how many values there were, NaNs and infinities included.
        mean, std, rms: `std` is over all values, not an estimate for a sample of them.
        absmax: the greatest magnitude.
        zeros: the fraction of all values that are exactly zero.
        kurtosis: the fourth central moment over the variance squared: 3 for normal values; None where they
            are all equal.
        norm: the root of the sum of squares.
        nans, infinities: how many.
        histogram: how many values lie in each bin, ascending (`compute_bin_edges` has the bounds): negative ones by the
            power of two of their magnitude, zeros, positive ones. Empty if it is not wanted.
        microbatches: how many passes through the site were added up, over all data parallel ranks.
    """

    iteration: int
    site: str
    kind: StatisticsKind
    order: int
    stage: int
    count: int
    mean: float | None
    std: float | None
    rms: float | None
    absmax: float | None
    zeros: float | None
    kurtosis: float | None
    norm: float | None
    nans: int
    infinities: int
    histogram: tuple[int, ...]
    microbatches: int

    def to_json(self) -> dict[str, Any]:
        """In plain values; the histogram as a list."""
        return {**asdict(self), "histogram": list(self.histogram)}


def compute_bin_edges() -> list[float]:
    """The bounds of the histogram's bins, one more than there are bins.

    `2 * SIDE + 1` bins: those of `-2^e` with e descending, one for zero alone, those of `2^e` ascending. The
    outermost reach to infinity, and those beside zero to zero. A magnitude m is in the bin of e for
    `2^e <= m < 2^(e+1)`.
    """
    powers = [2.0**e for e in range(LOWEST_EXPONENT + 1, HIGHEST_EXPONENT + 1)]
    return [-math.inf, *(-p for p in reversed(powers)), 0.0, 0.0, *powers, math.inf]
