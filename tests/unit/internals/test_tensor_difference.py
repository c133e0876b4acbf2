"""The difference of two tensors against the same figures in double precision, over blocks and strides."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_flex.alignment.site_rows import hold_to, sum_site
from megatron_flex.compare import Row, tensor_pairs
from megatron_flex.compare.block_sums import TILE_ENTRIES
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.tensor_pairs import sum_tensors
from megatron_flex.dump import VALUE


def measure(here: Tensor, there: Tensor) -> Row:
    return hold_to(1.0, ComparedTensor("decoder:output", VALUE), sum_site(here, there))


def worst(row: Row) -> tuple[tuple[int, ...], float, float]:
    assert row.worst is not None
    return row.worst.index, row.worst.a, row.worst.b


def in_double(here: Tensor, there: Tensor) -> tuple[float, float]:
    """The relative norm and the peak of the difference."""
    a, b = here.double(), there.double()
    return (
        float((a - b).norm() / max(a.norm(), b.norm())),
        float((a - b).abs().max() / max(a.abs().max(), b.abs().max())),
    )


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_blocks_give_the_figures_of_the_full_tensor(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    there = (
        scale * torch.randn(3, 2 * TILE_ENTRIES // 300 + 7, 101, generator=generator, dtype=torch.float64)
    ).to(dtype)
    here = (
        there.double() * (1 + 1e-2 * torch.randn(there.shape, generator=generator, dtype=torch.float64))
    ).to(dtype)
    place = (2, TILE_ENTRIES // 300 + 3, 5)
    here[place] = 9 * scale
    for a, b in ((here, there), (here.transpose(0, 1).contiguous().transpose(0, 1), there)):
        found = measure(a, b)
        relative, peak = in_double(a, b)
        assert found.relative == pytest.approx(relative, rel=1e-4)
        assert found.error == pytest.approx(max(relative, peak), rel=1e-6)
        assert worst(found) == (place, float(here[place]), float(there[place]))
    assert sum_tensors(here, there, most=1 << 20).worst == place


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("both", [False, True])
def test_an_entry_that_is_no_number_is_found(bad: float, both: bool) -> None:
    there = torch.randn(3, TILE_ENTRIES // 3)
    here = there.clone()
    here[2, 17] = bad
    if both:
        there[2, 17] = bad
    found = measure(here, there)
    assert (found.error, worst(found)[0]) == (math.inf, (2, 17))
    assert found.diverges
    assert not found.equal


def test_small_cases() -> None:
    assert measure(torch.zeros(4), torch.zeros(4)).error == 0
    assert measure(torch.zeros(0, 3), torch.zeros(0, 3)).error == 0
    assert measure(torch.zeros(4), torch.zeros(5)).error == math.inf
    assert measure(torch.zeros(0, 3), torch.zeros(0, 4)).error == math.inf
    assert measure(torch.tensor(1.0), torch.tensor(2.0)).error == 0.5
    found = measure(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 5, 4]))
    assert (found.error, *worst(found)) == (0.25, (2,), 3, 5)


def test_equal_tensors_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.randn(300, 500)
    monkeypatch.setattr(tensor_pairs, "split_into_blocks", None)
    found = measure(full, full.clone())
    assert (found.error, found.equal, found.count, found.not_finite, found.worst) == (
        0,
        True,
        150000,
        0,
        None,
    )
    monkeypatch.undo()
    for wrong in (math.inf, math.nan):
        full[7, 3] = wrong
        found = measure(full, full.clone())
        assert (found.error, worst(found)[0]) == (math.inf, (7, 3)), wrong
    full[7, 3] = 3e38
    full[7, 4] = 3e38  # the sum is infinite, and no entry is
    assert measure(full, full.clone()).error == 0
