"""Records of statistics: a tensor's numbers in an iteration, a run's header, and the sink of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

LOWEST_EXPONENT, HIGHEST_EXPONENT = (
    -40,
    23,
)  # exponents of the first and the last bin; what lies beyond is counted in those
BINS_PER_SIGN = (
    HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
)  # bins of positive values, and as many of negative ones

StatisticsKind = Literal["value", "gradient", "parameter_gradient"]


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """The statistics of one tensor, whole, over all microbatches and data parallel ranks of an iteration.

    NaNs and infinities are counted and are in none of the other numbers, which are of the finite values;
    those of no values are None.

    Attributes:
        iteration: as the framework counts.
        site: the name of the site or parameter, with `.grad` appended for a gradient.
        kind: what it is of.
        order: the tensor's place among all that are measured: sites in model order, each one's gradient
            after it, then parameters.
        stage: the pipeline stage that has it.
        count: how many values there were, NaNs and infinities included. mean, std, rms: `std` is over all
        values, not an estimate for a sample of them.
        absmax: the greatest magnitude.
        zeros: the fraction of all values that are exactly zero.
        kurtosis: the fourth central moment over the variance squared: 3 for normal values; None where they
            are all equal.
        norm: the root of the sum of squares. nans, infinities: how many.
        histogram: how many values are in each bin, ascending (`compute_bin_edges` has the bounds): negative
        ones by the
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
        """Return the row in plain values; the histogram as a list."""
        return {**asdict(self), "histogram": list(self.histogram)}


def compute_bin_edges() -> list[float]:
    """Return the bounds of the histogram's bins, one more than there are bins.

    `2 * SIDE + 1` bins: those of `-2^e` with e descending, one for zero alone, those of `2^e` ascending. The
    outermost bins reach to infinity, and those beside zero to zero. A magnitude m is in the bin of e for
    `2^e <= m < 2^(e+1)`.
    """
    powers = [2.0**e for e in range(LOWEST_EXPONENT + 1, HIGHEST_EXPONENT + 1)]
    return [-math.inf, *(-p for p in reversed(powers)), 0.0, 0.0, *powers, math.inf]


STATISTICS_FORMAT = "megatron_flex statistics"
STATISTICS_VERSION = 1


@dataclass(frozen=True, slots=True)
class MeasuredSite:
    """A hook point, or a parameter, that is measured.

    Attributes:
        name: the global name.
        layout: the layout of the shards, in plain JSON values.
        shape: of the full tensor; a name (`s`, `b`) for a dim whose length depends on the data.
    """

    name: str
    layout: Mapping[str, Any]
    shape: Sequence[int | str]


@dataclass(frozen=True, slots=True)
class StatisticsHeader:
    """The header of one start of a run.

    Attributes:
        created: the time, in UTC, ISO 8601.
        versions: of the packages that wrote the statistics.
        framework: the adapter's name.
        axes: the mesh, name to size, including the axes of experts.
        sites: the measured hook points, in model order, then parameters.
        settings: of the Statistics.
    """

    created: str
    versions: Mapping[str, str]
    framework: str
    axes: Mapping[str, int]
    sites: Sequence[MeasuredSite]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the header in plain values, with the exponents of the histogram's first and last bins."""
        bins = {"lowest": LOWEST_EXPONENT, "highest": HIGHEST_EXPONENT}
        return {"format": STATISTICS_FORMAT, "version": STATISTICS_VERSION, "bins": bins, **asdict(self)}

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> StatisticsHeader:
        """Convert the result of `to_json` back to a header.

        Raises:
            ValueError: the document is not a header, or of another version, which the message names.
            KeyError, TypeError: the document is damaged.
        """
        if record["format"] != STATISTICS_FORMAT:
            raise ValueError("no statistics")
        version, bins = record["version"], (record["bins"]["lowest"], record["bins"]["highest"])
        if version != STATISTICS_VERSION or bins != (LOWEST_EXPONENT, HIGHEST_EXPONENT):
            raise ValueError(
                f"version {str(version)[:20]}; this megatron_flex reads version {STATISTICS_VERSION}: use "
                "the one that wrote it, or a newer one"
            )
        sites = tuple(
            MeasuredSite(
                str(s["name"]),
                dict(s["layout"]),
                tuple(int(n) if isinstance(n, int) else str(n) for n in s["shape"]),
            )
            for s in record["sites"]
        )
        plain = {name: dict(record[name]) for name in ("versions", "axes", "settings")}
        return StatisticsHeader(
            created=str(record["created"]), framework=str(record["framework"]), sites=sites, **plain
        )


class Sink(Protocol):
    """Receives statistics; every rank has one, and no method is collective.

    Attributes:
        reads_statistics: whether the sink of this rank uses statistics; if no rank's does, none are computed.
    """

    @property
    def reads_statistics(self) -> bool: ...

    def write(self, iteration: int, rows: Sequence[TensorStatistics]) -> None:
        """Receive an iteration: a row for each tensor that was measured. Must not raise."""

    def close(self) -> None:
        """Close the sink after the last iteration."""
