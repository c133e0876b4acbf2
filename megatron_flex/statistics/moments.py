"""Sums over the values of a tensor, from which its statistics follow, and which add up over parts of it.

On a CPU values in up to 32 bits go through blocks that stay in its cache, in fp32, about each block's mean;
what was summed becomes sums of powers in fp64. Everything else is summed in fp64, without waiting for it.
Sums of powers of the values themselves lose the fourth power of |mean| / std: the kurtosis has six digits up
to a ratio of 300, the standard deviation up to 10000.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.statistics.measured import HIGHEST_EXPONENT, LOWEST_EXPONENT, BINS_PER_SIGN

COUNT, NANS, INFINITIES, ZEROS, FIRST_POWER, SECOND_POWER, THIRD_POWER, FOURTH_POWER, HISTOGRAM = range(9)
MOMENTS_WIDTH = HISTOGRAM + 2 * BINS_PER_SIGN  # numbers of a tensor that add up: those above, and the bins of nonzero values
CPU_BLOCK = 1 << 17  # values: few calls, and what is made of them stays in the cache
DEVICE_BLOCK = 1 << 24  # values of a block on another device
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
        row: `[WIDTH]` in fp64, on the device of what was added.
        absmax: the greatest finite magnitude, likewise; 0 of none.
    """

    def __init__(self, device: torch.device | str = "cpu", histogram: bool = True) -> None:
        self.row = torch.zeros(MOMENTS_WIDTH, dtype=torch.float64, device=device)
        self.absmax = torch.zeros((), dtype=torch.float64, device=device)
        self._histogram = histogram

    def add(self, values: Tensor, factor: float = 1.0) -> None:
        """Add values of whatever shape and dtype but complex ones; nothing waits for another device.

        Args:
            values: the part.
            factor: what they are divided by first.
        """
        flat = _flatten_values(values.detach())
        # Some twenty calls for each block: whoever looks at every call of torch (`cpu.enable()` does) would
        # take a quarter of the time.
        with torch._C.DisableTorchFunction():
            quick = flat.device.type == "cpu" and flat.dtype in FP32_DTYPES
            if len(flat) and not (quick and self._quickly(flat, factor)):
                for block in flat.split(CPU_BLOCK if flat.device.type == "cpu" else DEVICE_BLOCK):
                    self._surely(block, factor)

    def _quickly(self, flat: Tensor, factor: float) -> bool:
        """Add values in fp32; whether it could be: some may be no numbers, or denormal."""
        scratch = _get_scratch()
        counts = torch.zeros(LANES * CODES, dtype=torch.int64) if self._histogram else None
        found = []
        for block in flat.split(CPU_BLOCK):
            values = block
            if block.dtype != torch.float32:
                values = scratch.values[: len(block)].copy_(block)
            if factor != 1.0:
                values = torch.div(values, factor, out=scratch.values[: len(block)])
            one = _sum_block(values, scratch, counts is None)
            if one is None:
                return False
            found.append(one)
            if counts is not None:
                counts += _count_exponents(values, scratch)
        zeros, bins = sum(f.zeros for f in found), None
        if counts is not None:
            tops = counts.view(LANES, CODES).sum(0)
            tiny = int(tops[0] + tops[CODES // 2])
            zeros = sum(_count_zeros(b, scratch) for b in flat.split(CPU_BLOCK)) if tiny else 0
            if zeros != tiny:
                return False
            bins = torch.zeros(2 * BINS_PER_SIGN + 1, dtype=torch.int64).index_add_(0, _make_bin_table(), tops)
        powers = [math.fsum(p) for p in zip(*(_compute_raw_moments(f) for f in found), strict=True)]
        self.row[:HISTOGRAM] += torch.tensor(
            [float(len(flat)), 0.0, 0.0, float(zeros), *powers], dtype=torch.float64
        )
        if bins is not None:
            self.row[HISTOGRAM:] += bins[:-1]
        self.absmax.clamp_(min=max(f.absmax for f in found))
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
        self.row[:HISTOGRAM] += torch.stack([n.to(torch.float64) for n in (*numbers, *powers)])
        self.absmax = torch.maximum(self.absmax, values.abs().amax())
        if self._histogram:
            self.row[HISTOGRAM:] += _count_bins(values, finite)


def _flatten_values(values: Tensor) -> Tensor:
    """All values in one dim, in the order in which they lie in memory if that takes no copy."""
    if values.is_contiguous():
        return values.view(-1)
    order = sorted(range(values.ndim), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)


class ScratchMemory(threading.local):
    """Room for what is made of a block: to make it anew each time costs as much as to fill it."""

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
    scale = 1.0 if SAFE_MAGNITUDES[0] < absmax < SAFE_MAGNITUDES[1] else 2.0 ** min(127, math.frexp(absmax)[1])
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


def _compute_raw_moments(found: BlockMoments) -> Iterator[float]:
    """Sums of the first four powers of the values themselves."""
    about = float(found.size), *found.powers
    for power in (1, 2, 3, 4):
        terms = (math.comb(power, k) * found.center ** (power - k) * about[k] for k in range(power + 1))
        yield math.fsum(terms) * found.scale**power


def _count_exponents(values: Tensor, scratch: ScratchMemory) -> Tensor:
    """How many of some values in fp32 have each sign (negative ones first) and biased exponent, by lane."""
    count = len(values)
    codes = torch.bitwise_right_shift(values.view(torch.int32), 23, out=scratch.codes[:count])
    codes.add_(scratch.lanes[:count])
    return torch.bincount(codes, minlength=LANES * CODES)


@cache
def _make_bin_table() -> Tensor:
    """The bin of each sign and exponent; the one behind the last for zeros, NaNs and infinities."""
    out = []
    for code in range(CODES):
        exponent, none = code % (CODES // 2) - 127, code % (CODES // 2) in (0, 255)
        place = min(max(exponent, LOWEST_EXPONENT), HIGHEST_EXPONENT) - LOWEST_EXPONENT
        out.append(2 * BINS_PER_SIGN if none else BINS_PER_SIGN + place if code >= CODES // 2 else BINS_PER_SIGN - 1 - place)
    return torch.tensor(out)


def _count_bins(values: Tensor, finite: Tensor) -> Tensor:
    """`[2 * SIDE]`: how many of some values in fp64 are in each bin."""
    place = (torch.frexp(values).exponent - 1).clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    where = torch.where(values > 0, BINS_PER_SIGN + place, BINS_PER_SIGN - 1 - place)
    where = where.masked_fill(~finite | (values == 0), 2 * BINS_PER_SIGN)
    if where.device.type == "cpu":
        return torch.bincount(where, minlength=2 * BINS_PER_SIGN + 1)[:-1]
    edges = 2 * BINS_PER_SIGN + 1  # the GPU's bincount waits for the greatest value
    return torch.histc(where.float(), bins=edges, min=0, max=edges)[:-1]
