"""Sums over the values of a tensor on a device, by few kernels; the host waits for none of them.

There are 65,536 values in 16 bits. How often each of them occurs holds all statistics of a tensor in bf16 or
fp16, exactly: one kernel counts the patterns of 16 bits, and the rest is arithmetic of 65,536 numbers.

The upper half of a value in fp32 is a pattern of bf16, which has the sign and the exponent: the histogram of
powers of two, NaNs and infinities follow from it likewise. Two kinds of values are taken for others there:
below 2^-133 for zeros, and a NaN whose upper half is that of an infinity, which no arithmetic makes. Powers
are summed in fp32 about the mean, in units of the greatest magnitude.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.statistics.statistics_records import BINS_PER_SIGN, HIGHEST_EXPONENT, LOWEST_EXPONENT

PATTERNS = 1 << 16  # of 16 bits
COUNTED_DTYPES = (torch.bfloat16, torch.float16)
DEVICE_DTYPES = (*COUNTED_DTYPES, torch.float32)
DEVICE_BLOCK = 1 << 22  # values of a block: what is made of them has 12 bytes a value
MIN_SCALE = 2.0**-126  # of the powers' unit: the least normal number of fp32


class PatternTable(NamedTuple):
    """What each pattern of 16 bits adds to the sums of a tensor.

    Attributes:
        numbers: `[8, PATTERNS]` in fp64: one, and whether it is a NaN, an infinity or a zero, and its first
            four powers, none of a value that is not finite.
        magnitudes: `[PATTERNS]` in fp64; 0 of a value that is not finite.
        bins: `[PATTERNS]`: the bin of the histogram; the one after the last of zeros, NaNs and infinities.
    """

    numbers: Tensor
    magnitudes: Tensor
    bins: Tensor


@lru_cache(16)
def pattern_table(dtype: torch.dtype, factor: float, device: torch.device) -> PatternTable:
    """The table of the values of a dtype, divided by a factor."""
    values = torch.arange(-PATTERNS // 2, PATTERNS // 2, dtype=torch.int16).view(dtype).double() / factor
    finite = values.isfinite()
    clean = torch.where(finite, values, 0.0)
    kinds = [torch.ones_like(clean), values.isnan(), values.isinf(), clean == 0]
    powers = [clean**n for n in (1, 2, 3, 4)]
    numbers = torch.stack([t.double() for t in (*kinds, *powers)])
    numbers[3] *= finite
    return PatternTable(numbers.to(device), clean.abs().to(device), find_bins(clean, finite).to(device))


def find_bins(values: Tensor, finite: Tensor) -> Tensor:
    """The bin of each value, by sign and exponent; the one after the last for zeros, NaNs and infinities."""
    exponent = torch.frexp(values).exponent - 1
    place = exponent.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    bins = torch.where(values > 0, BINS_PER_SIGN + place, BINS_PER_SIGN - 1 - place)
    return bins.masked_fill(~finite | (values == 0), 2 * BINS_PER_SIGN).long()


def add_patterns(row: Tensor, absmax: Tensor, block: Tensor, factor: float, first_bin: int | None) -> Tensor:
    """Add a block of a dtype of 16 bits to a row of sums, and return the greatest magnitude.

    Args:
        row: the sums in fp64, overwritten: the eight of `PatternTable.numbers`, then one for each bin, and
            one for values without a bin.
        absmax: the greatest magnitude so far.
        block: the values; at most 2^24, up to which a count in fp32 is exact.
        factor: the divisor of the values.
        first_bin: the index of the first bin in the row; None without a histogram.
    """
    table = pattern_table(block.dtype, factor, block.device)
    counts = count_patterns(block.view(torch.int16)).double()
    row[:8].addmv_(table.numbers, counts)
    if first_bin is not None:
        row[first_bin:].index_add_(0, table.bins, counts)
    return torch.maximum(absmax, counts.sign_().mul_(table.magnitudes).amax())


def add_fp32(row: Tensor, absmax: Tensor, block: Tensor, factor: float, first_bin: int | None) -> Tensor:
    """The same of a block in fp32."""
    values = block if factor == 1.0 else block / factor
    table = pattern_table(torch.bfloat16, 1.0, block.device)
    counts = count_patterns(values.contiguous().view(torch.int16)[1::2]).double()
    row[:4].addmv_(table.numbers[:4], counts)
    if first_bin is not None:
        row[first_bin:].index_add_(0, table.bins, counts)
    clean = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    greatest = torch.linalg.vector_norm(clean, float("inf"))
    unit = greatest.clamp(min=MIN_SCALE)
    clean.div_(unit)
    center = clean.mean()
    clean.sub_(center)
    square = clean * clean
    first, second = clean.sum(), square.sum()
    third, fourth = clean.mul_(square).sum(), square.square_().sum()  # not `dot`, which adds in one row
    about = torch.stack([torch.full_like(unit, len(values)), first, second, third, fourth]).double()
    raw = _binomials(block.device, center.double()) @ about
    row[4:8].addcmul_(raw, unit.double() ** _first_four(block.device))
    return torch.maximum(absmax, greatest)


def count_patterns(patterns: Tensor) -> Tensor:
    """How often each pattern of 16 bits occurs: `[PATTERNS]` in fp32, from the least number on."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Whole numbers below 2^24 are added exactly in any order; torch only knows that the order varies.
    torch.use_deterministic_algorithms(False)
    try:
        return torch.histc(patterns.float(), bins=PATTERNS, min=-PATTERNS / 2, max=PATTERNS / 2)
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


def _binomials(device: torch.device, center: Tensor) -> Tensor:
    """`[4, 5]`: makes sums of the first four powers of values from sums of powers 0 to 4 about a center."""
    coefficients, exponents = _pascal(device)
    return coefficients * center**exponents


@lru_cache(8)
def _pascal(device: torch.device) -> tuple[Tensor, Tensor]:
    rows = [[math.comb(power, k) for k in range(5)] for power in range(1, 5)]
    exponents = [[max(power - k, 0) for k in range(5)] for power in range(1, 5)]
    coefficients, powers = (torch.tensor(r, dtype=torch.float64).to(device) for r in (rows, exponents))
    return coefficients, powers


@lru_cache(8)
def _first_four(device: torch.device) -> Tensor:
    return torch.arange(1, 5, dtype=torch.float64, device=device)
