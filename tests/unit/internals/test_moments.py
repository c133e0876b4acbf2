"""Sums of values: what follows from them, in any dtype, in any parts, over any layout."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_flex.errors import LayoutError
from megatron_flex.layout import Cut, Dim, Layout, extract, is_partial
from megatron_flex.runtime.statistics_sink import select_counted, select_counted_part
from megatron_flex.statistics import moments
from megatron_flex.statistics.moments import MomentEntry, MomentSums, MomentTable
from megatron_flex.statistics.statistics_records import (
    BINS_PER_SIGN,
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    TensorStatistics,
    compute_bin_edges,
)
from tests.support.dumps import mesh_of
from tests.support.messages import raises
from tests.unit.test_layout import SIZES, layouts, make

ENTRIES = (MomentEntry("x", "value", 0),)


def measured(parts: list[MomentSums], apart: bool = True) -> TensorStatistics | None:
    """The row that ranks come to that have a part each."""
    table = MomentTable(ENTRIES, len(parts) if apart else 1000, True)
    packed = [table.pack({0: p}, set(), [1.0, 3.0, 1.0, 0.0], n) for n, p in enumerate(parts)]
    maxima = [table.maxima({0: p}, v) for p, v in zip(parts, packed, strict=True)]
    greatest = None if maxima[0] is None else torch.stack([m for m in maxima if m is not None]).amax(0)
    rows = table.measured(3, torch.stack(packed).sum(0), greatest)
    return rows[0] if rows else None


def sums(*values: Tensor, factor: float = 1.0) -> MomentSums:
    out = MomentSums()
    for v in values:
        out.add(v, factor)
    return out


def close(row: TensorStatistics | None, values: Tensor, digits: float) -> None:
    """A row says of values what plain fp64 says, in each of its numbers."""
    v = values.double().reshape(-1)
    good = v[v.isfinite()]
    assert row is not None
    assert row.count == len(v)
    assert row.nans == int(v.isnan().sum())
    assert row.infinities == int(v.isinf().sum())
    assert row.zeros == int((v == 0).sum()) / len(v)
    bounds, zeros = list(compute_bin_edges()[BINS_PER_SIGN + 1 :]), int((good == 0).sum())
    sides = [[int(((v >= a) & (v < b) & (v > 0)).sum()) for a, b in pairwise(bounds)] for v in (-good, good)]
    assert list(row.histogram) == [*reversed(sides[0]), zeros, *sides[1]]
    if not len(good):
        assert row.mean is None
        return
    mean, square = good.mean(), good.square().mean()
    spread = (good - mean).square().mean()
    assert row.absmax == float(good.abs().max())
    assert row.rms == pytest.approx(float(square.sqrt()), rel=digits)
    assert row.norm == pytest.approx(float(good.norm()), rel=digits)
    assert row.mean == pytest.approx(float(mean), rel=digits, abs=digits * float(square.sqrt()))
    assert row.std == pytest.approx(float(spread.sqrt()), rel=digits, abs=1e-6 * float(square.sqrt()))
    if float(square) < MAX_RATIO**2 * float(spread):
        assert row.kurtosis == pytest.approx(float((good - mean).pow(4).mean() / spread**2), rel=10 * digits)


MAX_RATIO = 300  # of |mean| to std, up to which the kurtosis has six digits
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 3.0, 100.0])
def test_numbers_of_normal_values(dtype: torch.dtype, mean: float) -> None:
    values = (torch.randn(300_000, generator=torch.Generator().manual_seed(1)) + mean).to(dtype)
    close(measured([sums(values)]), values, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.floats(allow_nan=True, allow_infinity=True, width=32),
            st.sampled_from(
                [0.0, -0.0, 1.0, -2.0, 1e-45, 3e38, float(2**HIGHEST_EXPONENT), float(2**LOWEST_EXPONENT)]
            ),
        ),
        min_size=1,
        max_size=40,
    )
)
@example([2.457322373985075e16, 2.4685696048431104e16])  # at a ratio of 438, the kurtosis has four digits
def test_numbers_of_any_values(dtype: torch.dtype, given_: list[float]) -> None:
    values = torch.tensor(given_, dtype=torch.float64).to(dtype)
    close(measured([sums(values)]), values, 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.floats(-30, 30), st.booleans())
def test_parts_add_up(seed: int, parts: int, power: float, apart: bool) -> None:
    """However they are divided, and whether maxima have places or go by themselves."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(2000, generator=generator) + 0.3) * 2.0**power
    cuts = torch.randint(0, 2000, (parts,), generator=generator).sort().values
    pieces = values.tensor_split(cuts)
    close(measured([sums(p) for p in pieces], apart), values, 1e-6)
    close(measured([sums(*pieces)]), values, 1e-6)


@pytest.mark.parametrize("values", [torch.arange(-7, 90), torch.rand(400) > 0.3, torch.full((9,), 2.5)])
def test_numbers_bools_and_equal_values(values: Tensor) -> None:
    close(measured([sums(values)]), values, 1e-9)


def test_nothing_and_nothing_finite() -> None:
    assert measured([sums(torch.empty(0))]) is None
    row = measured([sums(torch.tensor([math.nan, math.inf, -math.inf]))])
    assert row is not None
    assert (row.count, row.nans, row.infinities) == (3, 1, 2)
    assert (row.mean, row.std, row.absmax, row.norm, row.kurtosis) == (None,) * 5
    equal = measured([sums(torch.full((100,), 1.7))])
    assert equal is not None
    assert (equal.std, equal.kurtosis) == (0.0, None)


@pytest.mark.parametrize("factor", [0.5, 3.0, 65536.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_is_divided_out(dtype: torch.dtype, factor: float) -> None:
    values = torch.randn(5000).relu().to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    close(measured([sums(values, factor=factor)]), values.to(wide) / factor, 1e-6)


def test_order_in_memory_does_not_matter() -> None:
    values = torch.randn(6, 50, 70)
    for view in (values.transpose(0, 2), values[:, ::2], values[..., 3:9], values.expand(2, 6, 50, 70)):
        close(measured([sums(view)]), view, 1e-6)


def test_the_quick_way_is_taken(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("summed in fp64")

    monkeypatch.setattr(MomentSums, "_surely", refuse)
    for values in (torch.randn(9), torch.randn(300_000).relu(), torch.randn(9).bfloat16(), torch.zeros(5)):
        sums(values, factor=4.0)
        sums(values * 1e-20)
    with raises(AssertionError, "fp64"):
        sums(torch.tensor([1.0, math.nan]))


def on_device(values: Tensor, factor: float = 1.0) -> MomentSums:
    """The sums that a device comes to, whose kernels are torch's on any device."""
    out = MomentSums()
    out._on_device(moments._flatten_values(values), factor)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("factor", [1.0, 1024.0, 3.0])
def test_a_device_comes_to_the_same_sums(dtype: torch.dtype, factor: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(moments, "DEVICE_BLOCK", 5000)
    torch.manual_seed(3)
    for values in (
        torch.randn(20_001),
        torch.randn(7000).relu() * 3e-3,
        20 + torch.randn(9000) / 4,
        torch.zeros(50),
        torch.tensor([1.0, math.nan, math.inf, -math.inf, -0.0, 6e4, -3e-5]),
        torch.tensor([2.0]).expand(70),
        torch.randn(90)[::3],
    ):
        given = values.to(dtype)
        exact = given / factor if dtype == torch.float32 else given.double() / factor
        close(measured([on_device(given, factor)]), exact, 1e-6)


def test_a_device_sums_great_and_small_values() -> None:
    for values in (torch.randn(4000) * 1e36, torch.randn(4000) * 1e-30):
        close(measured([on_device(values)]), values, 1e-6)


class Kernels(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.nbytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.is_view:
            return out
        nbytes = sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        self.count += 1
        self.nbytes += nbytes
        return out


@pytest.mark.parametrize(("dtype", "kernels", "nbytes"), [(torch.bfloat16, 10, 40), (torch.float32, 30, 95)])
def test_kernels_and_traffic_of_a_device(dtype: torch.dtype, kernels: int, nbytes: int) -> None:
    values = torch.randn(moments.DEVICE_BLOCK).to(dtype)
    sums_there = on_device(values)  # makes the tables
    with Kernels() as counted:
        sums_there._on_device(values, 1.0)
    assert counted.count <= kernels
    assert counted.nbytes <= nbytes * len(values)


def test_a_device_with_deterministic_algorithms(monkeypatch: Any) -> None:
    histc, seen = torch.histc, []

    def alerting(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return histc(*args, **kwargs)

    monkeypatch.setattr(torch, "histc", alerting)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        on_device(torch.randn(100))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False], "CUDA's histc refuses to run there"


def test_without_a_histogram() -> None:
    values = torch.randn(1000).relu()
    out = MomentSums(histogram=False)
    out.add(values)
    assert float(out.row[moments.ZEROS]) == int((values == 0).sum())
    assert not out.row[moments.HISTOGRAM :].any()


@settings(max_examples=150, deadline=None)
@example((Layout((Dim("s"), Dim("v", (Cut("c"),), keep=1), Dim("w", (Cut("b"),), keep=1))), (1, 1, 1)))
@given(layouts())
def test_each_entry_of_the_whole_is_counted_once(drawn: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = drawn
    whole, local = make(layout, shape)
    if is_partial(layout, SIZES):
        mesh = mesh_of(SIZES, dict.fromkeys(SIZES, 0))
        with raises(LayoutError, layout.describe(SIZES)):
            select_counted(extract(layout, whole, mesh.coords, SIZES, local), layout, mesh)
        return
    found, parts = [], []
    for at in product(*(range(n) for n in SIZES.values())):
        mesh = mesh_of(SIZES, dict(zip(SIZES, at, strict=True)))
        shard = extract(layout, whole, mesh.coords, SIZES, local)
        found.append(select_counted(shard, layout, mesh).reshape(-1))
        half = shard.numel() // 2
        for part in ((0, half), (half, shard.numel())):
            parts += [select_counted_part(shard, part, layout, mesh, mesh.axes)]
    for pieces in (found, parts):
        assert torch.equal(torch.cat(pieces).sort().values, whole.reshape(-1).sort().values)


def test_what_all_hold_is_divided() -> None:
    """No rank measures all of it."""
    layout = Layout((Dim("s"), Dim("h", (Cut("a"),))))
    for at in product(*(range(n) for n in SIZES.values())):
        mesh = mesh_of(SIZES, dict(zip(SIZES, at, strict=True)))
        assert select_counted(torch.zeros(24, 5), layout, mesh).numel() == 10


@settings(max_examples=30, deadline=None)
@given(st.floats(-60, 60))
def test_a_value_is_in_the_bin_of_its_power(power: float) -> None:
    assume(power != int(power))
    for sign in (1, -1):
        value = torch.tensor([sign * 2.0**power])  # which may be rounded to a power of two
        row = measured([sums(value)])
        assert row is not None
        at = row.histogram.index(1)
        low, high = compute_bin_edges()[at : at + 2]
        assert low <= float(value) <= high
