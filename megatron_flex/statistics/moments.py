"""Sums over the values of a tensor, which add up over shards and ranks, and the statistics from them.

On a CPU values in up to 32 bits go through blocks that stay in its cache, in fp32, about each block's mean;
the result becomes sums of powers in fp64. On a device `device_moments` adds them. Everything else is summed
in fp64, without waiting for it.
Sums of powers of the values themselves lose the fourth power of |mean| / std: the kurtosis has six digits up
to a ratio of 300, the standard deviation up to 10000. A table has the sums of all tensors of a step side by
side, as ranks add them up.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.statistics.device_moments import (
    COUNTED_DTYPES,
    DEVICE_BLOCK,
    DEVICE_DTYPES,
    add_fp32,
    add_patterns,
    find_bins,
)
from megatron_flex.statistics.statistics_records import (
    BINS_PER_SIGN,
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    StatisticsKind,
    TensorStatistics,
)

COUNT, NANS, INFINITIES, ZEROS, FIRST_POWER, SECOND_POWER, THIRD_POWER, FOURTH_POWER, HISTOGRAM = range(9)
MOMENTS_WIDTH = (
    HISTOGRAM + 2 * BINS_PER_SIGN
)  # numbers of a tensor that add up: those above, and the bins of nonzero values
CPU_BLOCK = 1 << 17  # values: few calls, and what is made of them stays in the cache
SAFE_MAGNITUDES = 1e-8, 1e8  # magnitudes whose fourth powers are far from the ends of fp32
CODES, LANES = 512, 4  # of sign and exponent; how many values' are counted apart
SHIFT_THRESHOLD = 0.05  # of a block's mean square, the part that is its mean's from which on it is shifted
FP32_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BlockMoments(NamedTuple):
    """What a block adds: sums of powers about a center, in units of a scale."""

    size: int
    zeros: int  # where they were counted
    center: float
    scale: float
    powers: tuple[float, float, float, float]
    absmax: float


class MomentSums:
    """Of one tensor, part by part.

    Attributes:
        absmax: the greatest finite magnitude, in fp64 on the device of the added tensors; 0 of none.
    """

    def __init__(self, device: torch.device | str = "cpu", histogram: bool = True) -> None:
        # The last entry counts the values without a bin.
        self._row = torch.zeros(MOMENTS_WIDTH + 1, dtype=torch.float64, device=device)
        self.absmax = torch.zeros((), dtype=torch.float64, device=device)
        self._histogram = histogram

    @property
    def row(self) -> Tensor:
        """`[MOMENTS_WIDTH]` in fp64, on the device of the added tensors."""
        return self._row[:-1]

    def add(self, values: Tensor, factor: float = 1.0) -> None:
        """Add values of whatever shape and dtype but complex ones; nothing waits for another device.

        Args:
            values: the part.
            factor: what they are divided by first.
        """
        flat = _flatten_values(values.detach())
        # Some twenty calls for each block: whoever looks at every call of torch would take a quarter of the
        # time.
        with torch._C.DisableTorchFunction():
            if flat.device.type != "cpu" and flat.dtype in DEVICE_DTYPES:
                self._on_device(flat, factor)
                return
            quick = flat.device.type == "cpu" and flat.dtype in FP32_DTYPES
            if len(flat) and not (quick and self._quickly(flat, factor)):
                for block in flat.split(CPU_BLOCK if flat.device.type == "cpu" else DEVICE_BLOCK):
                    self._surely(block, factor)

    def _on_device(self, flat: Tensor, factor: float) -> None:
        """Add values in up to 32 bits by few kernels."""
        add = add_patterns if flat.dtype in COUNTED_DTYPES else add_fp32
        for block in flat.split(DEVICE_BLOCK) if len(flat) else ():
            self.absmax = add(self._row, self.absmax, block, factor, HISTOGRAM if self._histogram else None)

    def _quickly(self, flat: Tensor, factor: float) -> bool:
        """Add values in fp32; whether it could be: some may be no numbers, or denormal."""
        scratch = _get_scratch()
        counts = torch.zeros(LANES * CODES, dtype=torch.int64) if self._histogram else None
        blocks = []
        for block in flat.split(CPU_BLOCK):
            values = block
            if block.dtype != torch.float32:
                values = scratch.values[: len(block)].copy_(block)
            if factor != 1.0:
                values = torch.div(values, factor, out=scratch.values[: len(block)])
            block_sums = _sum_block(values, scratch, counts is None)
            if block_sums is None:
                return False
            blocks.append(block_sums)
            if counts is not None:
                counts += _count_exponents(values, scratch)
        zeros, bins = sum(f.zeros for f in blocks), None
        if counts is not None:
            tops = counts.view(LANES, CODES).sum(0)
            # Zeros and denormal numbers have the same exponent; bins are right if all of them are zeros.
            tiny = int(tops[0] + tops[CODES // 2])
            zeros = sum(_count_zeros(b, scratch) for b in flat.split(CPU_BLOCK)) if tiny else 0
            if zeros != tiny:
                return False
            bins = torch.zeros(2 * BINS_PER_SIGN + 1, dtype=torch.int64).index_add_(
                0, _make_bin_table(), tops
            )
        powers = [math.fsum(p) for p in zip(*(_compute_raw_moments(f) for f in blocks), strict=True)]
        self._row[:HISTOGRAM] += torch.tensor(
            [float(len(flat)), 0.0, 0.0, float(zeros), *powers], dtype=torch.float64
        )
        if bins is not None:
            self._row[HISTOGRAM:] += bins
        self.absmax.clamp_(min=max(f.absmax for f in blocks))
        return True

    def _surely(self, block: Tensor, factor: float) -> None:
        """Add a block in fp64, whatever is in it."""
        values = block.to(torch.float64)
        finite = values.isfinite()
        nans = values.isnan().sum()
        values = torch.where(finite, values, 0.0) / factor
        square = values.square()
        zeros = (finite & (values == 0)).sum()
        count = torch.full_like(nans, len(block))
        numbers = [count, nans, count - finite.sum() - nans, zeros]
        powers = [values.sum(), square.sum(), (square * values).sum(), square.square().sum()]
        self._row[:HISTOGRAM] += torch.stack([n.to(torch.float64) for n in (*numbers, *powers)])
        self.absmax = torch.maximum(self.absmax, values.abs().amax())
        if self._histogram:
            self._row[HISTOGRAM:].index_add_(0, find_bins(values, finite), torch.ones_like(values))


def _flatten_values(values: Tensor) -> Tensor:
    """All values in one dim, in memory order if that takes no copy."""
    if values.is_contiguous():
        return values.view(-1)
    order = sorted(range(values.ndim), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)


class ScratchMemory(threading.local):
    """Buffers for the results of a block: allocating them each time costs as much as filling them."""

    def __init__(self) -> None:
        self.values, self.moved, self.square, self.more = (torch.empty(CPU_BLOCK) for _ in range(4))
        self.codes = torch.empty(CPU_BLOCK, dtype=torch.int32)
        # Neighbours are counted apart: to add to a count twice in a row waits for the first time.
        self.lanes = torch.arange(CPU_BLOCK, dtype=torch.int32) % LANES * CODES + CODES // 2


@cache
def _get_scratch() -> ScratchMemory:
    return ScratchMemory()


def _count_zeros(values: Tensor, scratch: ScratchMemory) -> int:
    """How many of a block are zero; count_nonzero takes ten times as long where half of them are."""
    more = scratch.more[: len(values)]
    return len(values) - int(torch.ne(values, 0.0, out=more).sum())


def _sum_block(values: Tensor, scratch: ScratchMemory, zeros: bool) -> BlockMoments | None:
    """Sums over some values in fp32; None if they are not all finite. With `zeros` those are counted."""
    low, high = (float(v) for v in values.aminmax())
    absmax, count = max(-low, high), len(values)
    if not math.isfinite(absmax):
        return None
    none = _count_zeros(values, scratch) if zeros else 0
    if absmax == 0:
        return BlockMoments(count, none, 0.0, 1.0, (0.0, 0.0, 0.0, 0.0), 0.0)
    moved, more = scratch.moved[:count], scratch.more[:count]
    scale = (
        1.0 if SAFE_MAGNITUDES[0] < absmax < SAFE_MAGNITUDES[1] else 2.0 ** min(127, math.frexp(absmax)[1])
    )
    if scale != 1.0:
        values = torch.div(values, scale, out=moved)
    # Not by products of vectors, which in 16 bits come out at round numbers and are rounded one way.
    square, center = torch.mul(values, values, out=scratch.square[:count]), 0.0
    first, second = float(values.sum()), float(square.sum())
    if first * first > SHIFT_THRESHOLD * second * count:
        center = struct.unpack("f", struct.pack("f", first / count))[0]  # as fp32 has it
        values = torch.sub(values, center, out=moved)
        torch.mul(values, values, out=square)
        first, second = float(values.sum()), float(square.sum())
    third = float(torch.mul(values, square, out=more).sum())
    powers = first, second, third, float(square.square_().sum())
    return BlockMoments(count, none, center, scale, powers, absmax)


def _compute_raw_moments(block: BlockMoments) -> Iterator[float]:
    """Sums of the first four powers of the values themselves."""
    about = float(block.size), *block.powers
    for power in (1, 2, 3, 4):
        terms = (math.comb(power, k) * block.center ** (power - k) * about[k] for k in range(power + 1))
        yield math.fsum(terms) * block.scale**power


def _count_exponents(values: Tensor, scratch: ScratchMemory) -> Tensor:
    """How many of some values in fp32 have each sign (negative ones first) and biased exponent, by lane."""
    count = len(values)
    codes = torch.bitwise_right_shift(values.view(torch.int32), 23, out=scratch.codes[:count])
    codes.add_(scratch.lanes[:count])
    return torch.bincount(codes, minlength=LANES * CODES)


@cache
def _make_bin_table() -> Tensor:
    """The bin of each sign and exponent; the one after the last for zeros, NaNs and infinities."""
    out = []
    for code in range(CODES):
        exponent, none = code % (CODES // 2) - 127, code % (CODES // 2) in (0, 255)
        place = min(max(exponent, LOWEST_EXPONENT), HIGHEST_EXPONENT) - LOWEST_EXPONENT
        out.append(
            2 * BINS_PER_SIGN
            if none
            else BINS_PER_SIGN + place
            if code >= CODES // 2
            else BINS_PER_SIGN - 1 - place
        )
    return torch.tensor(out)


# How many add up, the sum of their iterations, of their microbatches, and how many could not measure.
HEAD_RANKS, HEAD_ITERATION, HEAD_MICROBATCHES, FAILED, HEAD_WIDTH = range(5)
MAX_SEPARATE_RANKS = 64  # up to so many ranks of a stage have a place each for their greatest magnitudes


class MomentEntry(NamedTuple):
    """A tensor that is measured.

    Attributes:
        name: of its site or parameter, with `.grad` appended for a gradient.
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
        return self.ranks <= MAX_SEPARATE_RANKS

    @property
    def width(self) -> int:
        """How many numbers a tensor has."""
        return (MOMENTS_WIDTH if self.histogram else HISTOGRAM) + 1 + (self.ranks if self.apart else 0)

    @property
    def sends(self) -> list[int]:
        """The bytes of each all-reduce of a step."""
        sizes = [HEAD_WIDTH + len(self.entries) * self.width] + ([] if self.apart else [len(self.entries)])
        return [torch.float64.itemsize * n for n in sizes]

    def pack(
        self, sums: dict[int, MomentSums], unknown: set[int], head: Sequence[float], rank: int
    ) -> Tensor:
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
        for place, entry_sums in sums.items():
            out[place] = entry_sums.absmax
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


def make_statistics(
    name: str, kind: StatisticsKind, iteration: int, sums: MomentSums, microbatches: int
) -> TensorStatistics | None:
    """The statistics of one full tensor whose parts were added up here, without other ranks.

    Args:
        name: with `.grad` appended for a gradient.
        kind: what it is.
        iteration: its number.
        sums: over all parts.
        microbatches: the number of parts.

    Returns:
        The statistics; None if nothing was added.
    """
    table = MomentTable((MomentEntry(name, kind, 0),), 1, True)
    head = [0.0] * HEAD_WIDTH
    head[HEAD_MICROBATCHES] = float(microbatches)
    measured = table.measured(iteration, table.pack({0: sums}, set(), head, 0), None)
    return measured[0] if measured else None
