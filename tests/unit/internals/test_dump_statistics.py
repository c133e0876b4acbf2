"""Statistics in blocks: equal to those of all values at once."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_flex.dump.tools.value_summary import QUANTILES, choose_round_edges, summarize_values
from megatron_flex.errors import FlexError
from tests.support.messages import raises

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_they_are_those_of_all_values(dtype, size):
    values = (torch.randn(2003, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)
    found = summarize_values(lambda: values.split(size))
    exact, order = values.double(), values.float().sort().values
    assert found.mean == pytest.approx(float(exact.mean()))
    assert found.std == pytest.approx(float(exact.std(correction=0)))
    assert found.rms == pytest.approx(float(exact.square().mean().sqrt()))
    assert (found.min, found.max) == (float(exact.min()), float(exact.max()))
    assert found.quantiles == {q: float(order[math.floor(q * 2002)]) for q in QUANTILES}
    edges = torch.tensor(found.edges, dtype=torch.float64)
    assert found.counts == torch.histogram(exact, edges).hist.int().tolist()
    assert (found.below, found.above) == (int((exact < edges[0]).sum()), int((exact > edges[-1]).sum()))


@settings(max_examples=100, deadline=None)
@given(st.lists(FINITE, min_size=1, max_size=50), st.integers(1, 7))
def test_quantiles_are_values_in_order_whatever_they_are(numbers, size):
    values = torch.tensor(numbers, dtype=torch.float32)
    found = summarize_values(lambda: values.split(size), (0.0, 0.3, 0.5, 1.0))
    order = values.sort().values
    assert [found.quantiles[q] for q in (0.0, 0.3, 0.5, 1.0)] == [
        float(order[math.floor(q * (len(values) - 1))]) for q in (0.0, 0.3, 0.5, 1.0)
    ]
    assert sum(found.counts) + found.below + found.above == len(values)


LIMITS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(LIMITS, min_size=1, max_size=30), st.integers(1, 7))
@example([1e300, -1e300, 1e300], 2)
@example([5e-324, 0.0], 1)
@example([1.7976931348623157e308, -1.7976931348623157e308], 1)
def test_values_of_fp64_have_exact_quantiles_and_no_moment_overflows(numbers, size):
    values = torch.tensor(numbers, dtype=torch.float64)
    found = summarize_values(lambda: values.split(size), (0.0, 0.3, 0.5, 1.0))
    order = values.sort().values
    assert list(found.quantiles.values()) == [
        float(order[math.floor(q * (len(order) - 1))]) for q in found.quantiles
    ]
    assert (found.min, found.max) == (order[0], order[-1])
    assert sum(found.counts) + found.below + found.above == len(values)
    largest = max(map(abs, numbers))
    scaled = [n / largest if largest > 1e-300 else n * 1e300 for n in numbers]
    unit = largest if largest > 1e-300 else 1e-300
    assert found.rms == pytest.approx(
        math.sqrt(math.fsum(n * n for n in scaled) / len(numbers)) * unit, rel=1e-6
    )
    assert found.min <= found.mean <= found.max
    assert 0 <= found.std <= found.absmax


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.int32, torch.uint8, torch.bool])
def test_integers_have_exact_quantiles(dtype):
    ends = [0, 1] if dtype is torch.bool else [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    numbers = [*ends, *(n for n in (7, 200, 16777217, (1 << 53) + 1) if n <= ends[1]), 1]
    values = torch.tensor(numbers, dtype=dtype)
    found = summarize_values(lambda: values.split(2), (0.0, 0.5, 1.0))
    order = sorted(numbers)
    assert list(found.quantiles.values()) == [order[0], order[(len(order) - 1) // 2], order[-1]]
    assert (found.min, found.max) == (order[0], order[-1])
    assert sum(found.counts) + found.below + found.above == len(numbers)


def test_complex_values_are_refused():
    with raises(FlexError, torch.complex64):
        summarize_values(lambda: [torch.ones(2, dtype=torch.complex64)])


def test_of_nothing_there_are_none():
    assert summarize_values(lambda: []).mean is None
    assert summarize_values(lambda: [torch.full((3,), float("nan"))]).nan == 3


@pytest.mark.parametrize(("first", "last"), [(-3.2, 3.1), (0.0, 1e-9), (5.0, 5.0), (-1e30, 1.0), (0.1, 0.2)])
def test_edges_are_round_and_cover_the_range(first, last):
    edges = choose_round_edges(first, last, 16)
    assert edges[0] <= first <= last <= edges[-1]
    assert edges == sorted(set(edges))
    assert len(edges) <= 20
    if first < 0 < last:
        assert 0.0 in edges
