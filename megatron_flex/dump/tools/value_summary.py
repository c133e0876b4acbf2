"""Statistics of more values than fit in memory: block by block, in two passes, with exact quantiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_flex.text_table import format_table

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # times a power of ten: widths of bins that a person can add up
BUCKETS = 1 << 16


@dataclass(slots=True)
class ValueSummary:
    """Of all values; where there are NaNs or infinities, the moments and quantiles are of the finite ones.

    Attributes:
        count: of values.
        nan: of these NaN.
        infinite: of these infinite.
        zeros: of these exactly zero. mean, std, rms: in fp64; `std` is over all values, not an estimate for a
        sample of them. absmax, least, most: of the finite values; None if there is none.
        quantiles: for q the value at floor(q (n - 1)) in ascending order, in fp32.
        edges: of the histogram's bins, one more than there are bins.
        counts: of each bin, from its left edge on, without its right one; the last has that too. below,
        above: how many values are outside.
    """

    count: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    mean: float | None = None
    std: float | None = None
    rms: float | None = None
    absmax: float | None = None
    least: float | None = None
    most: float | None = None
    quantiles: dict[float, float] = field(default_factory=dict)
    edges: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    below: int = 0
    above: int = 0

    def __str__(self) -> str:
        """A line for each statistic and quantile."""
        names = ("count", "nan", "infinite", "zeros", "mean", "std", "rms", "absmax", "least", "most")
        rows = [(name, "-" if (value := getattr(self, name)) is None else f"{value:.6g}") for name in names]
        rows += [(f"p{100 * q:g}", f"{value:.6g}") for q, value in self.quantiles.items()]
        return "\n".join(format_table(rows))

    def to_json(self) -> dict[str, Any]:
        """In plain values."""
        return {**asdict(self), "quantiles": {str(q): v for q, v in self.quantiles.items()}}


def summarize_values(
    blocks: Callable[[], Iterable[Tensor]], quantiles: Sequence[float] = QUANTILES, bins: int = 16
) -> ValueSummary:
    """Statistics of all values of the blocks.

    Args:
        blocks: gives them, the same ones each time; it is called twice.
        quantiles: which, between 0 and 1.
        bins: of the histogram, about; they go from the least of `quantiles` to the largest.
    """
    out, tops = _run_first_pass(blocks())
    finite = int(tops.sum())
    if not finite:
        return out
    ranks = {q: math.floor(q * (finite - 1)) for q in quantiles}
    ends = torch.cumsum(tops, 0)
    at = {q: int(torch.searchsorted(ends, torch.tensor(k), right=True)) for q, k in ranks.items()}
    rough = sorted(_key_to_value(bucket << 16) for bucket in at.values()) or [
        out.least or 0.0,
        out.most or 0.0,
    ]
    out.edges = choose_round_edges(rough[0], rough[-1], bins)
    lows, tally = _run_second_pass(blocks(), sorted(set(at.values())), out.edges)
    out.below, out.above, out.counts = tally[0], tally[-1], tally[1:-1]
    for q, k in ranks.items():
        before = int(ends[at[q] - 1]) if at[q] else 0
        low = int(torch.searchsorted(torch.cumsum(lows[at[q]], 0), torch.tensor(k - before), right=True))
        out.quantiles[q] = _key_to_value(at[q] << 16 | low)
    return out


def _run_first_pass(blocks: Iterable[Tensor]) -> tuple[ValueSummary, Tensor]:
    """The first pass: all but quantiles, and how many values begin with each 16 bits."""
    out, tops = ValueSummary(), torch.zeros(BUCKETS, dtype=torch.int64)
    finite, mean, spread, squares = 0, 0.0, 0.0, 0.0
    for block in blocks:
        values, nan, infinite = _split_finite(block)
        out.count, out.nan, out.infinite = out.count + block.numel(), out.nan + nan, out.infinite + infinite
        if not (n := values.numel()):
            continue
        tops += torch.bincount(_values_to_keys(values) >> 16, minlength=BUCKETS)
        out.zeros += int((values == 0).sum())
        least, most = (float(v) for v in values.aminmax())
        out.least = least if out.least is None else min(out.least, least)
        out.most = most if out.most is None else max(out.most, most)
        here = float(values.mean())
        spread += float((values - here).square().sum()) + (here - mean) ** 2 * finite * n / (finite + n)
        mean += (here - mean) * n / (finite + n)
        squares += float(values.square().sum())
        finite += n
    if finite and out.least is not None and out.most is not None:
        out.mean, out.std, out.rms = mean, math.sqrt(spread / finite), math.sqrt(squares / finite)
        out.absmax = max(abs(out.least), abs(out.most))
    return out, tops


def _run_second_pass(
    blocks: Iterable[Tensor], buckets: Sequence[int], edges: Sequence[float]
) -> tuple[dict[int, Tensor], list[int]]:
    """The second pass: the last 16 bits of the quantiles, and the histogram with its ends."""
    lows = {bucket: torch.zeros(BUCKETS, dtype=torch.int64) for bucket in buckets}
    inner = torch.tensor(edges, dtype=torch.float64)
    tally = torch.zeros(len(edges) + 1, dtype=torch.int64)
    for block in blocks:
        values, _, _ = _split_finite(block)
        keys = _values_to_keys(values)
        tops = keys >> 16
        for bucket in buckets:
            lows[bucket] += torch.bincount(keys[tops == bucket] & (BUCKETS - 1), minlength=BUCKETS)
        where = torch.bucketize(values, inner, right=True)
        where[values == inner[-1]] = len(edges) - 1
        tally += torch.bincount(where, minlength=len(tally))
    return lows, [int(n) for n in tally]


def _split_finite(block: Tensor) -> tuple[Tensor, int, int]:
    """The finite values in fp64, flat, and how many are NaN or infinite."""
    values = block.detach().reshape(-1).to(torch.float64)
    good = values.isfinite()
    if bool(good.all()):
        return values, 0, 0
    nan = int(values.isnan().sum())
    return values[good], nan, int((~good).sum()) - nan


def _values_to_keys(values: Tensor) -> Tensor:
    """Whole numbers from 0 to 2^32 - 1 in the order of the values in fp32."""
    most = torch.finfo(torch.float32).max
    bits = values.clamp(-most, most).to(torch.float32).view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + (1 << 31)


def _key_to_value(key: int) -> float:
    """The value in fp32 that has a key."""
    bits = key - (1 << 31)
    bits = bits ^ 0x7FFFFFFF if bits < 0 else bits
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def choose_round_edges(first: float, last: float, bins: int) -> list[float]:
    """Edges of about so many equal bins from `first` to `last`, at round numbers; at zero if it is inside."""
    if not last > first or not math.isfinite(last - first):
        width = abs(first) / 100 or 1.0
        return [first - width / 2, first + width / 2]
    exact = (last - first) / bins
    power = 10.0 ** math.floor(math.log10(exact))
    step = power * next(s for s in ROUND_STEPS if s * power >= exact * (1 - 1e-9))
    low, high = math.floor(first / step), math.ceil(last / step)
    return [float(f"{i * step:.12g}") for i in range(low, high + 1)]
