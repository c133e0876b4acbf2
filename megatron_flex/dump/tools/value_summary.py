"""Statistics of more values than fit in memory: block by block, in several passes, with exact quantiles."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_flex.document import Bars, Document, Note, Part, Renderable, Row, Table
from megatron_flex.errors import FlexError
from megatron_flex.wording import format_number

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)  # times a power of ten: widths of bins that a person can add up
DIGIT_BITS, BUCKETS = 16, 1 << 16
SIGN_BIT = -(1 << 63)  # of 64 bits
SAFE_TO_SQUARE = (1e-140, 1e140)  # sums of squares of such values are in the range of fp64
NARROW_DTYPES = {  # whose values fp32 holds exactly
    *(torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
}


@dataclass(slots=True)
class ValueSummary(Renderable):
    """Of all values; where there are NaNs or infinities, the moments and quantiles are of the finite ones.

    Attributes:
        count: of values.
        nan: of these NaN.
        infinite: of these infinite.
        zeros: of these exactly zero. mean, std, rms: in fp64; `std` is over all values, not an estimate for a
        sample of them. absmax, min, max: of the finite values; None if there are none.
        quantiles: for q the value at floor(q (n - 1)) in ascending order. Values of int64 are integers.
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
    min: float | None = None
    max: float | None = None
    quantiles: dict[float, float] = field(default_factory=dict)
    edges: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    below: int = 0
    above: int = 0

    def to_document(self) -> Document:
        """Return a line for each statistic and quantile, and the histogram."""
        return describe_values("ValueSummary", [], {"values": self})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "quantiles": {str(q): v for q, v in self.quantiles.items()}}


def describe_values(title: str, notes: Sequence[Note], columns: Mapping[str, ValueSummary]) -> Document:
    """A table with a column for each summary, and a histogram of each."""
    summaries = list(columns.values())
    moments = ("mean", "std", "rms", "absmax", "min", "max")
    odd = [name for name in ("nan", "infinite") if any(getattr(s, name) for s in summaries)]
    quantiles = next((s.quantiles for s in summaries if s.quantiles), {})
    rows = [
        *(Row((name, *(format_number(getattr(s, name)) for s in summaries))) for name in moments),
        Row(("zeros", *(_format_share(s.zeros, s.count) for s in summaries))),
        *(Row((name, *(_format_share(getattr(s, name), s.count) for s in summaries)), "bad") for name in odd),
        *(Row((f"p{q * 100:g}", *(format_number(s.quantiles.get(q)) for s in summaries))) for q in quantiles),
        Row(("values", *(f"{s.count:,}" for s in summaries))),
    ]
    parts: list[Part] = [*notes, Table(("", *(f">{name}" for name in columns)), rows)]
    for name, s in columns.items():
        if s.counts:
            bars = [(f"< {s.edges[0]:g}", s.below)] if s.below else []
            bars += [(f"{edge:g}", count) for edge, count in zip(s.edges[:-1], s.counts, strict=True)]
            bars += [(f"> {s.edges[-1]:g}", s.above)] if s.above else []
            parts.append(Bars(name, bars))
    return Document(title, parts)


def list_values(summaries: Mapping[str, ValueSummary]) -> Document:
    """A table with a row for each tensor, without histograms."""
    odd = [name for name in ("nan", "infinite") if any(getattr(s, name) for s in summaries.values())]
    names = ("mean", "std", "rms", "absmax", *odd)
    rows = [
        Row(
            (tensor, *(format_number(getattr(s, name)) for name in names), f"{s.count:,}"),
            "bad" if s.nan or s.infinite else "",
        )
        for tensor, s in summaries.items()
    ]
    return Document("", [Table(("site", *(f">{name}" for name in (*names, "values"))), rows)])


def _format_share(count: int, of: int) -> str:
    return f"{count:,} ({count / of:.2%})" if of and count else str(count)


def count_passes(dtype: torch.dtype) -> int:
    """How often `summarize_values` reads the blocks: a pass determines 16 bits of each quantile."""
    return 2 if dtype in NARROW_DTYPES else 5


def summarize_values(
    blocks: Callable[[], Iterable[Tensor]], quantiles: Sequence[float] = QUANTILES, bins: int = 16
) -> ValueSummary:
    """Statistics of all values of the blocks.

    Args:
        blocks: gives them, the same ones each time; it is called `count_passes` times.
        quantiles: which, between 0 and 1.
        bins: of the histogram, about; they go from the least of `quantiles` to the largest.

    Raises:
        FlexError: the values are complex.
    """
    out, order, counts = _run_first_pass(blocks())
    finite = int(counts.sum())
    if not finite or order is None or out.min is None or out.max is None:
        return out
    prefixes = {q: _KeyPrefix(0, 0, math.floor(q * (finite - 1))).extend(counts) for q in quantiles}
    moments = _Moments(max(abs(out.min), abs(out.max)))
    histogram: _Histogram | None = None
    for level in range(1, order.digits):
        if order.digits == 2:  # the first 16 bits of fp32 are near enough for the ends of the histogram
            ends = [order.value(p.bits << DIGIT_BITS) for p in prefixes.values()]
            histogram = _Histogram(ends or [out.min, out.max], bins)
        following = {p.bits: torch.zeros(BUCKETS, dtype=torch.int64) for p in prefixes.values()}
        for block in blocks():
            values = _select_finite(block)
            order.count_digits(values, level, following)
            if level == 1:
                moments.add(values)
            if histogram is not None:
                histogram.add(values)
        prefixes = {q: p.extend(following[p.bits]) for q, p in prefixes.items()}
    out.quantiles = {q: order.value(p.bits) for q, p in prefixes.items()}
    if histogram is None:
        histogram = _Histogram(list(out.quantiles.values()) or [out.min, out.max], bins)
        for block in blocks():
            histogram.add(_select_finite(block))
    out.edges, (out.below, *out.counts, out.above) = histogram.edges, histogram.counts.tolist()
    out.mean, out.std, out.rms = moments.results(out.min, out.max)
    return out


def _run_first_pass(blocks: Iterable[Tensor]) -> tuple[ValueSummary, _KeyOrder | None, Tensor]:
    """The first pass: counts and extremes, and how many values have which first 16 bits."""
    out, counts = ValueSummary(), torch.zeros(BUCKETS, dtype=torch.int64)
    order: _KeyOrder | None = None
    for block in blocks:
        order = order or _KeyOrder(block.dtype)
        every, values = _widen(block), _select_finite(block)
        out.count += block.numel()
        if values.numel() < every.numel():
            nan = int(every.isnan().sum())
            out.nan, out.infinite = out.nan + nan, out.infinite + every.numel() - values.numel() - nan
        if not values.numel():
            continue
        order.count_digits(values, 0, {0: counts})
        out.zeros += int((values == 0).sum())
        least, most = order.extremes(values)
        out.min = least if out.min is None else min(out.min, least)
        out.max = most if out.max is None else max(out.max, most)
    if out.min is not None and out.max is not None:
        out.absmax = max(abs(out.min), abs(out.max))
    return out, order, counts


def _widen(block: Tensor) -> Tensor:
    """The values, flat, in a dtype that holds them all and that functions of torch know."""
    values = block.detach().reshape(-1)
    if values.dtype in NARROW_DTYPES:
        return values.to(torch.float32)
    return values if values.dtype in (torch.int64, torch.uint64) else values.to(torch.float64)


def _select_finite(block: Tensor) -> Tensor:
    """The finite values, widened."""
    values = _widen(block)
    if not values.is_floating_point():
        return values
    good = values.isfinite()
    return values if bool(good.all()) else values[good]


class _KeyOrder:
    """Integers in the order of the values of a dtype: of 32 bits where fp32 holds all values, else of 64."""

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype.is_complex:
            raise FlexError(f"{dtype} has no order, so there are no statistics of it; export the tensor")
        self.narrow, self.unsigned = dtype in NARROW_DTYPES, dtype == torch.uint64
        self.integers = self.unsigned or dtype == torch.int64
        self.digits = 2 if self.narrow else 4

    def extremes(self, values: Tensor) -> tuple[float, float]:
        """The least and the greatest value; integers of int64."""
        least, most = (int(k) for k in self._keys(values).aminmax())
        offset = 1 << (DIGIT_BITS * self.digits - 1)
        return self.value(least + offset), self.value(most + offset)

    def count_digits(self, values: Tensor, level: int, counts: dict[int, Tensor]) -> None:
        """Add up which 16 bits follow the prefixes, each of `level` times 16 bits."""
        keys = self._keys(values)
        shift = DIGIT_BITS * (self.digits - 1 - level)
        digits = (keys >> shift) & (BUCKETS - 1)
        if level == 0:  # the first bit is the sign: negative values come first
            counts[0] += torch.bincount(digits ^ (BUCKETS // 2), minlength=BUCKETS)
            return
        tops = keys >> (shift + DIGIT_BITS)
        for prefix, count in counts.items():
            signed = prefix - (1 << (DIGIT_BITS * level - 1))
            count += torch.bincount(digits[tops == signed], minlength=BUCKETS)

    def _keys(self, values: Tensor) -> Tensor:
        if self.integers:
            bits = values.view(torch.int64)
            return bits ^ SIGN_BIT if self.unsigned else bits
        if self.narrow:
            bits = values.view(torch.int32).to(torch.int64)
            return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        bits = values.view(torch.int64)
        return torch.where(bits < 0, bits ^ ~SIGN_BIT, bits)

    def value(self, bits: int) -> float:
        """The value of a whole key, counted from the least one on."""
        key = bits - (1 << (DIGIT_BITS * self.digits - 1))
        if self.integers:
            return bits if self.unsigned else key
        stored, kind, positive = (
            (torch.int32, torch.float32, 0x7FFFFFFF)
            if self.narrow
            else (torch.int64, torch.float64, ~SIGN_BIT)
        )
        return float(torch.tensor(key ^ positive if key < 0 else key, dtype=stored).view(kind))


@dataclass(frozen=True, slots=True)
class _KeyPrefix:
    """The first bits of the key of an entry.

    Attributes:
        bits: these bits.
        before: how many entries have lesser first bits.
        rank: the place of the entry in ascending order, from 0.
    """

    bits: int
    before: int
    rank: int

    def extend(self, counts: Tensor) -> _KeyPrefix:
        """16 more bits, by how many of the entries with these bits go on with which."""
        ends = torch.cumsum(counts, 0)
        digit = int(torch.searchsorted(ends, torch.tensor(self.rank - self.before), right=True))
        lesser = int(ends[digit - 1]) if digit else 0
        return _KeyPrefix(self.bits << DIGIT_BITS | digit, self.before + lesser, self.rank)


class _Moments:
    """Mean, deviation and root mean square in fp64, in units in which no square overflows or vanishes."""

    def __init__(self, absmax: float) -> None:
        outside = absmax > 0 and not SAFE_TO_SQUARE[0] < absmax < SAFE_TO_SQUARE[1]
        self.unit = math.ldexp(1.0, math.frexp(absmax)[1] - 1) if outside else 1.0
        self.count, self.mean, self.spread, self.squares = 0, 0.0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        count = values.numel()
        if not count:
            return
        scaled = values.to(torch.float64) / self.unit
        mean = float(scaled.mean())
        total = self.count + count
        self.spread += (
            float((scaled - mean).square().sum()) + (mean - self.mean) ** 2 * self.count * count / total
        )
        self.mean += (mean - self.mean) * count / total
        self.squares += float(scaled.square().sum())
        self.count = total

    def results(self, least: float, most: float) -> tuple[float, float, float]:
        """Mean, standard deviation and root mean square, within the bounds that round-off may leave."""
        absmax = float(max(abs(least), abs(most)))
        std, rms = (min(math.sqrt(v / self.count) * self.unit, absmax) for v in (self.spread, self.squares))
        return min(max(self.mean * self.unit, float(least)), float(most)), std, rms


class _Histogram:
    """Counts of values in bins of equal width, and below and above them."""

    def __init__(self, ends: Sequence[float], bins: int) -> None:
        self.edges = choose_round_edges(float(min(ends)), float(max(ends)), bins)
        self._inner = torch.tensor(self.edges, dtype=torch.float64)
        self.counts = torch.zeros(len(self.edges) + 1, dtype=torch.int64)

    def add(self, values: Tensor) -> None:
        values = values.to(torch.float64)
        where = torch.bucketize(values, self._inner, right=True)
        where[values == self._inner[-1]] = len(self.edges) - 1
        self.counts += torch.bincount(where, minlength=len(self.counts))


def choose_round_edges(first: float, last: float, bins: int) -> list[float]:
    """Edges of about so many equal bins from `first` to `last`, at round numbers; at zero if it is inside."""
    exact = last / bins - first / bins  # the difference itself may overflow
    if exact > sys.float_info.min:
        power = 10.0 ** math.floor(math.log10(exact))
        step = power * next(s for s in ROUND_STEPS if s * power >= exact * (1 - 1e-9))
        low, high = math.floor(first / step), math.ceil(last / step)
        most = sys.float_info.max
        edges = [min(max(float(f"{i * step:.12g}"), -most), most) for i in range(low, high + 1)]
        if all(a < b for a, b in pairwise(edges)):
            return edges
    width = abs(first) / 100 or 1.0
    return [max(first - width / 2, -sys.float_info.max), min(first + width / 2, sys.float_info.max)]
