"""The numbers of all tensors of a step side by side, as ranks add them up, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.statistics.measured import BINS_PER_SIGN, StatisticsKind, TensorStatistics
from megatron_flex.statistics.moments import (
    COUNT,
    FIRST_POWER,
    HISTOGRAM,
    INFINITIES,
    NANS,
    MOMENTS_WIDTH,
    ZEROS,
    MomentSums,
)

HEAD_RANKS, HEAD_ITERATION, HEAD_MICROBATCHES, HEAD_WIDTH = range(4)  # how many add up, the sum of their iterations, ...
MOST_SEPARATE_RANKS = 64  # up to so many ranks of a stage have a place each for their greatest magnitudes


class MomentEntry(NamedTuple):
    """A tensor that is measured.

    Attributes:
        name: of its site or parameter, with `.grad` behind it for a gradient.
        kind: what it is.
        stage: the pipeline stage that has it.
    """

    name: str
    kind: StatisticsKind
    stage: int


@dataclass(frozen=True, slots=True)
class MomentTable:
    """Where in a vector of fp64 which number is; the same on all ranks.

    Attributes:
        entries: all that is measured, over all stages.
        ranks: how many hold a stage; each has a place for its greatest magnitudes, which no sum tells, or,
            where they are many, none has, and the maxima need a collective of their own.
        histogram: whether there are bins.
    """

    entries: tuple[MomentEntry, ...]
    ranks: int
    histogram: bool

    @property
    def apart(self) -> bool:
        """Whether ranks have places of their own for their greatest magnitudes."""
        return self.ranks <= MOST_SEPARATE_RANKS

    @property
    def width(self) -> int:
        """How many numbers a tensor has."""
        return (MOMENTS_WIDTH if self.histogram else HISTOGRAM) + 1 + (self.ranks if self.apart else 0)

    @property
    def sends(self) -> list[int]:
        """The bytes of each all-reduce of a step."""
        sizes = [HEAD_WIDTH + len(self.entries) * self.width] + ([] if self.apart else [len(self.entries)])
        return [torch.float64.itemsize * n for n in sizes]

    def pack(self, sums: dict[int, MomentSums], unknown: set[int], head: Sequence[float], rank: int) -> Tensor:
        """What this rank adds: `[HEAD + entries * width]`, on the device of the sums.

        Args:
            sums: by the place of the entry.
            unknown: entries that cannot be measured, as this rank found.
            head: of the vector.
            rank: this rank's place among those of its stage.
        """
        device = next((s.row.device for s in sums.values()), torch.device("cpu"))
        sums_width = self.width - 1 - (self.ranks if self.apart else 0)
        out = torch.zeros(HEAD_WIDTH + len(self.entries) * self.width, dtype=torch.float64)
        out[:HEAD_WIDTH] = torch.tensor(head, dtype=torch.float64)
        rows = out[HEAD_WIDTH:].view(len(self.entries), self.width)
        for place in unknown:
            rows[place, sums_width] = 1
        if sums:
            # Neither copy makes the host wait for the device.
            at = torch.tensor(list(sums)).to(device, non_blocking=True)
            out = out.to(device, non_blocking=True)
            rows = out[HEAD_WIDTH:].view(len(self.entries), self.width)
            rows[at, :sums_width] = torch.stack([s.row[:sums_width] for s in sums.values()])
            if self.apart:
                rows[at, sums_width + 1 + rank] = torch.stack([s.absmax for s in sums.values()])
        return out

    def maxima(self, sums: dict[int, MomentSums], like: Tensor) -> Tensor | None:
        """`[entries]`: this rank's greatest magnitudes, where they go by themselves."""
        if self.apart:
            return None
        out = like.new_zeros(len(self.entries))
        for place, found in sums.items():
            out[place] = found.absmax
        return out

    def measured(self, iteration: int, vector: Tensor, maxima: Tensor | None) -> list[TensorStatistics]:
        """What follows from the sum of all ranks' vectors; of tensors that no values passed of, nothing."""
        sums_width = self.width - 1 - (self.ranks if self.apart else 0)
        rows = vector[HEAD_WIDTH:].view(len(self.entries), self.width)
        magnitudes = rows[:, sums_width + 1 :].amax(1) if maxima is None else maxima
        microbatches = round(float(vector[HEAD_MICROBATCHES]))
        out = []
        lists = zip(self.entries, rows[:, : sums_width + 1].tolist(), magnitudes.tolist(), strict=True)
        for order, (entry, row, absmax) in enumerate(lists):
            if row[sums_width] or not row[COUNT]:
                continue
            bins = tuple(self._bins(row, sums_width)) if self.histogram else ()
            numbers = _derive_statistics(row, absmax)
            count, nans, infinities = (round(row[i]) for i in (COUNT, NANS, INFINITIES))
            out.append(
                TensorStatistics(
                    iteration=iteration,
                    site=entry.name,
                    kind=entry.kind,
                    order=order,
                    stage=entry.stage,
                    count=count,
                    nans=nans,
                    infinities=infinities,
                    zeros=row[ZEROS] / count,
                    histogram=bins,
                    microbatches=microbatches,
                    **numbers,
                )
            )
        return out

    @staticmethod
    def _bins(row: list[float], sums_width: int) -> Iterator[int]:
        for bin_, number in enumerate(row[HISTOGRAM:sums_width]):
            if bin_ == BINS_PER_SIGN:
                yield round(row[ZEROS])
            yield round(number)


def _derive_statistics(row: list[float], absmax: float) -> dict[str, float | None]:
    """Moments and what follows from them; None of no finite values, or beyond fp64."""
    out: dict[str, float | None] = dict.fromkeys(("mean", "std", "rms", "absmax", "kurtosis", "norm"))
    count = row[COUNT] - row[NANS] - row[INFINITIES]
    if not count:
        return out
    first, second, third, fourth = (s / count for s in row[FIRST_POWER:HISTOGRAM])
    variance = max(0.0, second - first * first)
    if variance < second * 1e-14:  # what rounding leaves of equal values
        variance = 0.0
    out["mean"], out["absmax"], out["rms"] = first, absmax, math.sqrt(second)
    out["norm"], out["std"] = math.sqrt(row[FIRST_POWER + 1]), math.sqrt(variance)
    if variance:
        about = fourth - 4 * first * third + 6 * first * first * second - 3 * first**4
        out["kurtosis"] = about / variance / variance
    return {name: v if v is not None and math.isfinite(v) else None for name, v in out.items()}
