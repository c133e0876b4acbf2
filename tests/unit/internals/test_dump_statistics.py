"""Statistics in blocks: equal to those of all values at once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_flex.dump.tools.value_summary import QUANTILES, choose_round_edges, summarize_values

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
    assert (found.least, found.most) == (float(exact.min()), float(exact.max()))
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
