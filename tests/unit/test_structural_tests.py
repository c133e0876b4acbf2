"""Tests pooled over entries: what they see that a bound on one entry does not, and round-off below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import block_sums, compare
from megatron_flex.compare.compared_dump import ComparedTensor, open_compared_dump
from megatron_flex.compare.comparison import INDISTINGUISHABLE
from megatron_flex.compare.difference_profile import DifferenceProfile, sum_by_dim
from megatron_flex.compare.error_patterns import CONSTANT_FACTOR
from megatron_flex.compare.noise_scale import NoiseScale, ParameterNoise
from megatron_flex.compare.structural_tests import (
    Block,
    Outcome,
    check_blocks,
    check_factor,
    check_grid,
    check_offset,
    check_partial_sums,
    check_rows,
    estimate_factor,
    list_entry_blocks,
)
from megatron_flex.compare.table_of_tests import OVERALL, TESTS, Bounds, Conditions, TensorTest, run_tests
from megatron_flex.compare.tensor_pairs import DifferenceSums
from megatron_flex.compare.tolerance import MAX_PEAK_TOLERANCE, Precision, derive_tolerance
from megatron_flex.layout import Cut, Dim, Layout
from tests.support import dumps
from tests.support.dumps import Given
from tests.support.messages import assert_names, raises
from tests.support.pages import ROOT

UNIT = 2.0**-8
SCALES = (1.0, 1e-30, 1e30)  # fp32 cannot hold the squares of the last two
DIMS = ("sample", "token", "h")
FIRST, SECOND = "decoder.layers.0:output", "decoder.layers.1:output"


def noisy(seed: int, size: float = UNIT, shape: tuple[int, ...] = (4, 16, 32)) -> tuple[Tensor, Tensor]:
    """A tensor, and the same with independent noise of a relative size."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return value, value + size * torch.randn(*shape, generator=generator, dtype=torch.float64)


def profile_of(a: Tensor, b: Tensor, dims: tuple[str, ...] = DIMS) -> DifferenceProfile:
    out = DifferenceProfile(dims, tuple(tuple(range(n)) for n in a.shape))
    DifferenceSums().add(a, b, profile=out, places=[torch.arange(n) for n in a.shape])
    return out


def block_outcome(profile: DifferenceProfile, blocks: Sequence[Block], unit: float, single: bool) -> Outcome:
    found = check_blocks(profile, blocks, unit, single)
    assert found is not None
    return found


def test_sums_by_dim_are_those_of_torch() -> None:
    value = torch.randn(3, 4, 5, dtype=torch.float64)
    found = sum_by_dim(value)
    for dim in range(3):
        torch.testing.assert_close(found[dim], value.sum([d for d in range(3) if d != dim]))


def test_blocks_add_up_to_the_full_profile() -> None:
    a, b = noisy(0)
    full, parts = profile_of(a, b), DifferenceProfile(DIMS, tuple(tuple(range(n)) for n in a.shape))
    for start in range(0, 16, 4):
        part = slice(start, start + 4)
        places = [torch.arange(4), torch.arange(start, start + 4), torch.arange(32)]
        DifferenceSums().add(a[:, part], b[:, part], profile=parts, places=places)
    for one, two in zip(full.by_dim, parts.by_dim, strict=True):
        for left, right in zip(one.sums, two.sums, strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_over_tiles_are_those_over_the_block(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Whatever the size of a tile."""
    a, b = (t.to(dtype) for t in noisy(0, 0.1))
    b[0] = b[0].bfloat16().to(dtype)  # on a grid, in one sample
    b[1, 3] = a[1, 3]
    b[2, 5, 7] = a[2, 5, 7] + 4
    found = {}
    for entries in (4096, 100, 32, 5):
        monkeypatch.setattr(block_sums, "TILE_ENTRIES", entries)
        sums = DifferenceSums()
        sums.add(a, b)
        found[entries] = sums, profile_of(a, b)
    one, whole = found.pop(4096)
    assert one.worst == (2, 5, 7)
    assert one.differing == int((a != b).sum()) < a.numel()
    left, right = a.double(), b.double()
    torch.testing.assert_close(
        torch.tensor([one.squares_a, one.squares_b, one.dots, one.squares, one.peak], dtype=torch.float64),
        torch.stack(
            [(x * y).sum() for x, y in ((left, left), (right, right), (left, right))]
            + [(left - right).square().sum(), torch.maximum(left.abs(), right.abs()).max()]
        ),
    )
    for sums, profile in found.values():
        assert (sums.worst, sums.values, sums.differing, sums.count) == (
            one.worst,
            one.values,
            one.differing,
            one.count,
        )
        assert (sums.greatest, sums.peak) == (one.greatest, one.peak)
        assert sums.dots == pytest.approx(one.dots)
        assert (profile.along, profile.along_squares, profile.row) == pytest.approx(
            (whole.along, whole.along_squares, whole.row)
        )
        for mine, its in zip(profile.by_dim, whole.by_dim, strict=True):
            torch.testing.assert_close(mine.sums, its.sums)
        for grid, other in zip(profile.grids, whole.grids, strict=True):
            assert (grid.total_a, grid.total_b) == (other.total_a, other.total_b)
            for mine, its in zip((*grid.a, *grid.b), (*other.a, *other.b), strict=True):
                torch.testing.assert_close(mine, its)


def sum_exactly(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The five sums of a block by row and by column, in fp64 by torch."""
    left, right = a.double(), b.double()
    gap = right - left
    products = torch.stack([left * left, right * right, gap * left, gap * gap, gap])
    columns = products.reshape(5, -1, a.shape[-1]).sum(1)
    return {"rows": products.sum(-1), "columns": columns}


@pytest.mark.parametrize(
    ("one", "two", "scale"),
    [
        *product([torch.float32], [torch.float32], SCALES),
        *product([torch.bfloat16], [torch.bfloat16], SCALES),
        *product([torch.float64], [torch.float32], SCALES),
        (torch.float16, torch.bfloat16, 1.0),  # fp16 has no numbers of the other scales
    ],
    ids=str,
)
def test_sums_in_fp32_are_those_in_fp64(
    monkeypatch: pytest.MonkeyPatch, one: torch.dtype, two: torch.dtype, scale: float
) -> None:
    """Up to round-off of fp32; what fp32 cannot multiply is summed in fp64."""
    monkeypatch.setattr(block_sums, "TILE_ENTRIES", 4096)
    a, b = (scale * t for t in noisy(3, 1e-3, (3, 40, 128)))
    a, b = a.to(one), b.to(two)
    b[1, 17, 5] = 9 * scale
    found, expected = block_sums.sum_block(a, b), sum_exactly(a, b)
    for name in ("rows", "columns"):
        got, want = getattr(found, name), expected[name]
        scales = sum_exactly(a.abs(), -b.abs())[name].abs()  # no product cancels another one
        assert float(((got - want).abs() / scales.clamp(min=1e-300)).max()) < 2e-6, name
    assert found.worst == (slice(1, 2), slice(17, 18))
    assert found.greatest == pytest.approx(float((b.double() - a.double()).abs().max()))
    assert found.peak == float(torch.maximum(a.double().abs(), b.double().abs()).max())
    assert found.differing == int((a.double() != b.double()).sum())


@pytest.mark.parametrize("shape", [(6144, 128), (8, 65536)], ids=str)
def test_long_sums_in_fp32(shape: tuple[int, int]) -> None:
    """One by one along a dim, up to the longest."""
    a, b = (t.float() for t in noisy(6, 1e-3, shape))
    found, expected = block_sums.sum_block(a, b), sum_exactly(a, b)
    for name in ("rows", "columns"):
        got, want = getattr(found, name), expected[name]
        for at in (0, 1, 3):  # squares, which nothing cancels
            torch.testing.assert_close(got[at], want[at], rtol=1e-5, atol=0)
            assert float(got[at].sum()) == pytest.approx(float(want[at].sum()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", ["none", "small", "thousandth", "zero", "negative"])
def test_squares_of_b_of_small_and_large_differences(dtype: torch.dtype, change: str) -> None:
    """They follow from the other sums where the difference is small; rows of zeros stay so."""
    a, noise = noisy(7, 1e-3, (3, 40, 128))
    changes = {"none": 1.0, "small": noise / a, "thousandth": 1e-3, "zero": 0.0, "negative": -1.0}
    b = (a * changes[change]).to(dtype)
    a = a.to(dtype)
    a[2, 5], b[2, 5] = 0.0, 0.0
    b[1, :4] *= 1e-6
    found, expected = block_sums.sum_block(a, b), sum_exactly(a, b)
    precision = 1e-12 if dtype is torch.float64 else 2e-6
    for name in ("rows", "columns"):
        got, want = getattr(found, name)[1], expected[name][1]
        scale = (expected[name][0] + want).clamp(min=1e-300)
        assert float(((got - want).abs() / scale).max()) < precision, name
        assert float(got.min()) >= 0.0
    assert float(found.rows[1, 2, 5]) == 0.0
    assert found.totals[1] == pytest.approx(float(expected["rows"][1].sum()), rel=precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [1, 3, 6])
def test_sums_do_not_depend_on_the_address(dtype: torch.dtype, offset: int) -> None:
    """Equal tensors have bitwise equal sums, wherever they are in a file."""
    a, b = (t.to(dtype) for t in noisy(8, 1e-3, (2, 37, 131)))
    moved = [
        torch.empty(t.numel() + 16, dtype=dtype)[n : n + t.numel()].view(t.shape).copy_(t)
        for n, t in ((offset, a), (2 * offset, b))
    ]
    one, two = block_sums.sum_block(a, b), block_sums.sum_block(*moved)
    assert torch.equal(one.rows, two.rows)
    assert torch.equal(one.columns, two.columns)


def test_statistics_in_fp64_have_its_precision() -> None:
    a, b = noisy(5, 1e-9, (4, 32, 128))
    sums = DifferenceSums()
    sums.add(a, b)
    assert sums.relative == pytest.approx(float((b - a).norm() / max(a.norm(), b.norm())), rel=1e-12)


def test_cosine_and_factor_are_as_precise_as_the_difference() -> None:
    """Sums of squares in fp32 are rounded; their differences must not be lost in that."""
    a, noise = noisy(4, 1e-5, (8, 64, 256))
    a, b = a.float(), noise.float()
    sums = DifferenceSums()
    sums.add(a, b)
    exact = float((a.double() * b.double()).sum() / (a.double().norm() * b.double().norm()))
    assert 1 - sums.cosine == pytest.approx(1 - exact, rel=1e-3, abs=0)
    assert 0 < 1 - exact < 1e-9


def test_grids_of_large_tiles_are_estimated_and_exact_where_the_runs_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(64, 1024, generator=generator)
    a = torch.cat([a, torch.randn(448, 1024, generator=generator)])
    b = a.clone()
    b[:64] = b[:64].bfloat16().float()  # one shard of eight
    bits = [(x.view(torch.int32) & 0xFFFF == 0).sum() for x in (a, b)]
    estimated = block_sums.sum_block(a, b).on_grids[0]
    assert abs(estimated[1] - int(bits[1])) < 0.05 * int(bits[1])
    profile = profile_of(a, b, ("token", "h"))
    grid = profile.grids[0]
    assert (grid.total_a, grid.total_b) == tuple(map(int, bits))
    assert torch.equal(grid.b[0][:64], torch.full((64,), 1024.0, dtype=torch.float64))
    alike = profile_of(a, a, ("token", "h")).grids
    for known, name in zip(alike, (16, 13, 4), strict=True):
        expected = a.numel() / 2**name
        assert known.total_a == known.total_b == pytest.approx(expected, abs=5 * math.sqrt(8 * expected))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_in_one_tile(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    monkeypatch.setattr(block_sums, "TILE_ENTRIES", 64)
    a, b = noisy(0)
    a[0, 1, 2] = b[0, 1, 2] = bad
    both = DifferenceSums()
    both.add(a, b)
    assert (both.broken, both.count) == (0, a.numel())
    assert both.relative == pytest.approx(UNIT, rel=0.1)
    b[3, 2, 1] = bad
    one = DifferenceSums()
    one.add(a, b)
    assert (one.broken, one.worst, one.greatest) == (1, (3, 2, 1), math.inf)
    assert math.isfinite(profile_of(a, b).relative)


@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (2, 1, 100_000)])
def test_shapes_of_all_kinds_are_summed(shape: tuple[int, ...]) -> None:
    a, b = torch.full(shape, 3.0), torch.full(shape, 4.0)
    sums = DifferenceSums()
    sums.add(a, b)
    assert (sums.count, sums.squares, sums.dots) == (a.numel(), a.numel(), 12 * a.numel())
    whole = DifferenceSums()
    whole.add(a.long(), b.long())
    assert (whole.differing, whole.discrete) == (a.numel(), True)


@pytest.mark.parametrize(
    "common", [None, 0, 1, 2], ids=["independent", "by sample", "by token", "by feature"]
)
def test_a_factor_is_not_seen_in_noise(common: int | None) -> None:
    """Nor in noise that is the same for all entries of a sample, token or feature, or scales them."""
    for seed in range(60):
        a, b = noisy(seed)
        if common is not None:
            shape = [n if d == common else 1 for d, n in enumerate(a.shape)]
            b = b + a * UNIT * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        found = check_factor(profile_of(a, b), UNIT)
        assert found is not None
        assert found.excess < 0.9, seed


@pytest.mark.parametrize("common", [0, 1, 2], ids=["by sample", "by token", "by feature"])
def test_the_standard_error_counts_noise_that_entries_share(common: int) -> None:
    """Over many draws a factor is as far from 0 as its standard error says, within a factor of two."""
    squares = []
    for seed in range(60):
        a, b = noisy(seed)
        shape = [n if d == common else 1 for d, n in enumerate(a.shape)]
        b = b + 30 * a * UNIT * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        factor, error = estimate_factor(profile_of(a, b))
        squares.append((factor / error) ** 2)
    assert sum(squares) / len(squares) < 4


def test_a_factor_is_seen_below_the_bound_of_an_entry() -> None:
    a, b = noisy(1, 0.05)
    profile = profile_of(a, b * 1.03)
    found = check_factor(profile, UNIT)
    assert found is not None
    assert found.excess > 1
    factor, error = estimate_factor(profile)
    assert abs(factor - 0.03) < 4 * error
    assert_names(found.evidence, f"{1 + factor:.6g}")
    assert profile.relative < 0.07, "the norm has risen by less than a fifth"


def test_few_entries_have_no_standard_error() -> None:
    a = torch.ones(4, dtype=torch.float64)
    assert check_factor(profile_of(a, 1.5 * a, ("h",)), UNIT) is None


def test_one_shard_is_seen() -> None:
    shard = Block(2, tuple(range(16, 32)), "what tp rank 1 of 2 holds in B", "tp")
    a, b = noisy(2)
    found = block_outcome(profile_of(a, b), [shard], UNIT, True)
    assert found.excess < 0.6
    b[..., 16:] += 6 * UNIT * noisy(3)[0][..., 16:]
    found = block_outcome(profile_of(a, b), [shard], UNIT, True)
    assert found.excess > 1
    assert found.axis == "tp"
    assert_names(found.evidence, "what tp rank 1 of 2 holds in B")  # the name of the block above


def test_positions_that_are_computed_alike_do_not_make_the_others_a_block() -> None:
    """With context parallelism over two ranks, rank 0 has the first quarter of the sequence and the last."""
    a, b = noisy(2)
    a, b = a.transpose(0, 1).contiguous(), b.transpose(0, 1).contiguous()
    length = len(a)
    b[: length // 4] = a[: length // 4]
    b[length // 4 :] += 16 * UNIT * noisy(3)[0].transpose(0, 1)[length // 4 :]
    middle = tuple(range(length // 4, 3 * length // 4))
    shard = Block(0, middle, "what cp rank 1 of 2 holds in B", "cp")
    found = block_outcome(profile_of(a, b, ("token", "sample", "h")), [shard], UNIT, False)
    assert found.excess < 0.5
    b[3 * length // 4 :] = a[3 * length // 4 :]  # now the difference is confined to the block
    found = block_outcome(profile_of(a, b, ("token", "sample", "h")), [shard], UNIT, False)
    assert found.excess > 1


def test_one_entry_does_not_make_a_shard() -> None:
    """An optimizer turns single weights, whose features then differ by much."""
    a, b = noisy(2)
    b[..., 20] += 1.0
    shard = Block(2, tuple(range(16, 32)), "what tp rank 1 of 2 holds in B", "tp")
    found = block_outcome(profile_of(a, b), [shard], UNIT, False)
    assert found.excess < 1


def test_one_sample_is_seen_where_weights_are_the_same() -> None:
    a, b = noisy(4)
    b[2] += 16 * UNIT * noisy(5)[0][2]
    profile = profile_of(a, b)
    blocks = list_entry_blocks(profile)
    found = block_outcome(profile, blocks, UNIT, True)
    assert "sample 2" in found.evidence
    assert check_blocks(profile, blocks, UNIT, False) is None


def test_an_offset_is_seen() -> None:
    a, b = noisy(6)
    found = check_offset(profile_of(a, b), 0.0, UNIT)
    assert found is not None
    assert found.excess < 0.3
    moved = profile_of(a, b + 4 * UNIT * torch.randn(32, generator=torch.Generator().manual_seed(1)))
    found = check_offset(moved, 0.0, UNIT)
    assert found is not None
    assert_names(found.evidence, f"{found.statistic:.0%}")
    found = check_offset(moved, 0.5, UNIT)
    assert found is not None
    assert not found.evidence, "a bias that an optimizer turned does that"


def test_a_factor_of_each_token_is_an_epsilon() -> None:
    """A norm with another epsilon scales every token by its own size; noise does not."""
    a, b = noisy(5)
    sizes = 0.05 / torch.linspace(1, 3, a.shape[1])[:, None]
    found, plain = check_rows(profile_of(a, b * (1 - sizes)), UNIT), check_rows(profile_of(a, b), UNIT)
    assert found is not None
    assert plain is not None
    assert found.excess > 1.9
    assert_names(found.evidence, f"{found.statistic:.0%}")
    assert plain.excess < 1
    coarse = check_rows(profile_of(a, b * (1 - sizes)), 0.05)
    assert coarse is not None
    assert coarse.statistic == 0, "of a size that one rounding of a norm's scale may have"


@pytest.mark.parametrize(
    ("dtype", "narrow", "name"),
    [
        (torch.float32, torch.bfloat16, "bf16"),
        (torch.float32, torch.float16, "fp16"),
        (torch.bfloat16, torch.float8_e4m3fn, "fp8 e4m3"),
    ],
)
def test_a_narrower_dtype_is_seen_in_one_shard(dtype: torch.dtype, narrow: torch.dtype, name: str) -> None:
    a = noisy(7)[0].to(dtype)
    b = a.clone()
    b[..., 16:] = b[..., 16:].to(narrow).to(dtype)
    shard = Block(2, tuple(range(16, 32)), "what tp rank 1 of 2 holds in B", "tp")
    found = check_grid(profile_of(a, b), [shard])
    assert found is not None
    assert found.axis == "tp"
    assert_names(found.evidence, "tp rank 1", name)
    assert check_grid(profile_of(b, b), [shard]) is None
    assert check_grid(profile_of(a, a), [shard]) is None


def test_a_few_tokens_that_round_off_moved_are_no_epsilon() -> None:
    """In fp8 one entry that is rounded to the next value moves a token along itself."""
    a, b = noisy(5)
    few, many = a.clone(), a * (1 + 0.05 * torch.randn(4, 16, 1, generator=torch.Generator().manual_seed(1)))
    few[0, :2] = few[0, :2] * 1.3
    for wrong, seen in ((few, False), (many, True)):
        found = check_rows(profile_of(a, wrong + b - a), UNIT)
        assert found is not None
        assert (found.excess > 1) == seen, found


def test_partial_sums_of_one_rank_in_a_narrower_dtype(tmp_path: Path) -> None:
    """The sum is within its bound, and has nothing of the narrower dtype's grid."""
    ranks = [noisy(seed)[0].float() for seed in (7, 8)]
    rounded = ranks[1].to(torch.bfloat16).float()
    a, b = ranks[0] + ranks[1], ranks[0] + rounded
    right, found = (
        check_partial_sums(profile_of(a, b), "B", [("tp", 0, ranks[0]), ("tp", 1, part)])
        for part in (ranks[1], rounded)
    )
    assert right is None
    assert found is not None
    assert found.axis == "tp"
    assert_names(found.evidence, "tp rank 1", "B", "bf16")
    empty = torch.zeros_like(rounded)
    assert check_partial_sums(profile_of(a, b), "B", [("tp", 1, empty)]) is None, "zeros are in every dtype"
    assert check_partial_sums(profile_of(rounded, b), "B", [("tp", 1, rounded)]) is None, "A has it too"
    dumps.write(tmp_path, {FIRST: Given(b[None], dumps.SUMMED)}, mesh={"tp": 2})
    with open_compared_dump(tmp_path, "B") as dump:
        parts = list(dump.read_partial_sums(ComparedTensor(FIRST, "value"), 0, 1 << 20))
        some = list(dump.read_partial_sums(ComparedTensor(FIRST, "value"), 0, 8 * 32 * 4 * 3))
    assert [(axis, coord) for axis, coord, _ in parts] == [("tp", 0), ("tp", 1)]
    assert torch.equal(parts[0][2].transpose(0, 1), b), "the writer gives the first rank all of it"
    assert not parts[1][2].any()
    assert some[0][2].shape == (3, 4, 32), "of a large part the first rows"


# -- the noise of a pair ---------------------------------------------------------------------------------


def test_bounds_follow_the_noise_so_far() -> None:
    noise, item = NoiseScale(UNIT), ComparedTensor(SECOND, "value")
    fresh = noise.bounds(item, 1)[0]
    assert fresh < 2 * UNIT
    noise.observe(10 * UNIT, 20 * UNIT)
    relative, peak = noise.bounds(item, 1)
    assert 10 * UNIT < relative < 40 * UNIT
    assert 20 * UNIT < peak < 100 * UNIT


def test_parameters_add_to_what_reads_them() -> None:
    noise = NoiseScale(2.0**-24)
    noise.parameter("decoder.layers.1.mlp.linear_fc1.weight", ParameterNoise(1e-3, 1e-2, 1e-2))
    assert noise.bounds(ComparedTensor(FIRST, "value"), 9)[0] < 1e-5
    assert noise.bounds(ComparedTensor(SECOND, "value"), 9)[0] > 2e-3
    assert noise.bounds(ComparedTensor("decoder:output", "value"), 9)[0] > 2e-3, "which comes after it"
    rows = NoiseScale(2.0**-24)
    rows.parameter("embedding.word_embeddings.weight", ParameterNoise(1e-5, 1e-2, 1e-2))
    assert rows.bounds(ComparedTensor("embedding:output", "value"), 1)[0] > 1e-2, "it may read the worst row"


def test_differing_parameters_scale_what_reads_them() -> None:
    noise = NoiseScale(2.0**-24)
    noise.observe(1e-5, 1e-5, 2e-6)
    assert noise.late_factor == 0, "with equal parameters a factor is a bug's"
    noise.parameter("decoder.layers.1.mlp.linear_fc1.weight", ParameterNoise(1e-7, 1e-7, 1e-7))
    assert 2e-6 < noise.late_factor < 2e-5
    a, b = noisy(1, 1e-6)
    profile = profile_of(a, b * (1 + 8e-6))
    strict, late = (check_factor(profile, 2.0**-24, least=least) for least in (0.0, noise.late_factor))
    assert strict is not None
    assert late is not None
    assert strict.excess > 1 > late.excess


def test_after_a_step_one_token_may_have_the_peak_later() -> None:
    noise, item = NoiseScale(2.0**-24), ComparedTensor(SECOND, "gradient")
    noise.observe(1e-5, 2e-5)
    before = noise.bounds(item, 9)
    noise.observe_row(1e-2)
    assert noise.bounds(item, 9) == before, "with equal parameters no token differs by far more than others"
    noise.parameter("decoder.layers.1.mlp.linear_fc1.weight", ParameterNoise(1e-7, 1e-7, 1e-7))
    relative, peak = noise.bounds(item, 9)
    assert peak > 1e-2
    assert relative < 1e-4, "the norm is of all tokens"


def test_in_fp8_the_peak_may_differ_more_and_the_norm_may_not() -> None:
    item = ComparedTensor(SECOND, "value")
    (norm, peak), (norm8, peak8) = (NoiseScale(UNIT, fp8).bounds(item, 9) for fp8 in (False, True))
    assert norm8 == norm
    assert peak8 > 1.3 * peak
    deep = partial(derive_tolerance, ComparedTensor(SECOND, "gradient"), 400)
    run, dtype = Precision(torch.bfloat16, fp8=True), torch.bfloat16
    assert deep((run, run), (dtype, dtype)) < deep((run, run), (dtype, dtype), MAX_PEAK_TOLERANCE) < 1


def test_the_token_that_differs_most() -> None:
    a, b = noisy(1, 1e-6)
    a = torch.cat([a, 1e-6 * a[:1]])
    b = torch.cat([b, torch.zeros_like(b[:1])])
    b[2] *= 1.25
    assert profile_of(a, b).row == pytest.approx(0.25, rel=1e-3), (
        "not the small token, which has lost all of it"
    )


def test_scores_explain_their_softmax_and_its_gradient() -> None:
    noise, core = NoiseScale(2.0**-24), "decoder.layers.1.self_attention.core_attention"
    for point, kind, gap in (
        ("scores", "value", 1e-3),
        ("scores", "gradient", 1.0),
        ("output", "value", 1.0),
    ):
        noise.scores.observe(ComparedTensor(f"{core}:{point}", kind), 1e-6, gap)
    explained = {("probs", "value"): 1e-3, ("scores", "gradient"): 2e-3}
    for point in ("scores", "probs", "output"):
        for kind in ("value", "gradient"):
            bound = noise.scores.bound(ComparedTensor(f"{core}:{point}", kind))
            assert bound == explained.get((point, kind), 0.0)
    assert not noise.scores.bound(ComparedTensor(f"{core.replace('1', '2')}:probs", "value")), "another layer"
    assert not noise.scores.bound(ComparedTensor(f"{core}:probs", "value", 1)), "another call"
    assert noise.late_factor == 0
    noise.explain_softmax(1e-3)
    assert noise.late_factor > 1e-3, "a part of the tokens may have lost or gained weight"


def test_the_page_has_the_table_of_tests() -> None:
    rows = [f"| `{t.name}` | {t.statistic} | {t.bound} | {t.proves} |" for t in TESTS]
    page = (ROOT / "docs" / "contributing" / "comparison.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.split(" | ")[0] in {row.split(" | ")[0] for row in rows}] == rows


def conditions_of(a: Tensor, b: Tensor, **known: Any) -> Conditions:
    """Of a tensor that differs by round-off."""
    sums, profile = DifferenceSums(), DifferenceProfile(DIMS, tuple(tuple(range(n)) for n in a.shape))
    sums.add(a, b, profile=profile, places=[torch.arange(n) for n in a.shape])
    bounds = known.pop("bounds", Bounds(0.5, 0.75))
    return Conditions(ComparedTensor(SECOND, "value"), bounds, sums, sums, profile, unit=UNIT, **known)


@pytest.mark.parametrize("test", TESTS, ids=lambda t: t.name)
def test_each_test_of_the_table_sees_its_fault(test: TensorTest) -> None:
    """And the loop has its outcome; the other tests of its kind are silent."""
    a, b = noisy(1, shape=(4, 64, 32))
    known: dict[str, Any] = {}
    if test.name == "norm":
        b += 0.6 * torch.randn(b.shape, generator=torch.Generator().manual_seed(3), dtype=b.dtype)
    elif test.name == "peak":
        b[0, 1, 2] += 9 * a.abs().max()
    elif test.name == "tolerance":
        known["bounds"] = Bounds(UNIT / 2, UNIT / 2, is_given=True)
    elif test.name == "copy":
        known["copies"] = {}
        source = run_tests(conditions_of(a, a, **known))
        assert list(source) == [Outcome("norm", 0.0, 0.5), Outcome("peak", 0.0, 0.75)]
    elif test.name == "narrower dtype":
        a, b = a.float(), b.bfloat16().float()
    elif test.name == "factor":
        b *= 1 + 8 * UNIT
    elif test.name == "offset":
        b += 20 * UNIT * torch.randn(32, generator=torch.Generator().manual_seed(3), dtype=b.dtype)
    elif test.name == "rows":
        b *= 1 + 20 * UNIT * torch.randn(4, 64, 1, generator=torch.Generator().manual_seed(3)).double()
    elif test.name == "block":
        b[..., 16:] += 20 * UNIT * torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(2))
        known["shards"] = [Block(2, tuple(range(16, 32)), "tp rank 1", "tp")]
    outcomes = list(run_tests(conditions_of(a, b, **known)))
    assert test.name in [o.test for o in outcomes if o.excess > 1]
    others = {o.test for o in outcomes if o.excess > 1 and o.test != test.name}
    assert not others & {*OVERALL, "copy", "narrower dtype"}, "only tests of patterns overlap"
    assert bool(next(o for o in outcomes if o.test == test.name).evidence) == (test.name not in OVERALL)


def test_a_reference_raises_the_bounds_of_patterns() -> None:
    """Of a factor, not of a copy, a dtype, or of the tensor as a whole."""
    a, b = noisy(1, shape=(4, 64, 32))
    conditions = conditions_of(a, b * (1 + 8 * UNIT))
    alone = {o.test: o for o in run_tests(conditions)}
    raised = {o.test: o for o in run_tests(conditions, profile_of(a, b * (1 + 4 * UNIT)))}
    assert alone["factor"].excess > 1 > raised["factor"].excess
    assert raised["norm"] == alone["norm"]
    assert [t.name for t in TESTS if t.is_measured] == ["factor", "offset", "rows", "block"]


# -- through dumps ---------------------------------------------------------------------------------------

SEQUENCE = Layout((Dim("s"), Dim("b"), Dim("h", (Cut("tp"),))))


def pair(folder: Path, change: Callable[[Tensor], Tensor], dtype: str = "bf16") -> tuple[Path, Path]:
    """Two dumps with the round-off of bf16 in the second site, and a change there in B."""
    value = dumps.random(1, 4, 16, 32)
    third = dumps.random(1, 4, 16, 32, seed=8)
    near = third * (1 + UNIT * dumps.random(*value.shape, seed=3))
    size = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype])
    for name, second, mesh in (("a", third, None), ("b", change(near), {"tp": 2})):
        sites = {FIRST: Given(value.to(size), SEQUENCE), SECOND: Given(second.to(size), SEQUENCE)}
        dumps.write(folder / name, sites, mesh=mesh)
    return folder / "a", folder / "b"


def test_a_small_factor_diverges_and_noise_does_not(tmp_path: Path) -> None:
    assert compare(*pair(tmp_path / "right", lambda t: t)).verdict == INDISTINGUISHABLE
    result = compare(*pair(tmp_path / "wrong", lambda t: t * 1.01))
    assert result.first is not None
    assert (result.first.name, result.first.test) == (SECOND, "factor")
    assert result.first.relative < result.first.floor, "no bound of the norm sees it"
    assert " 1.009" in result.first.evidence, "within three of its standard errors"
    assert result.first.evidence in str(result)
    assert any(CONSTANT_FACTOR in h or " 1.009" in h for h in result.hints)


def test_the_power_is_told_and_is_true(tmp_path: Path) -> None:
    """A factor above the stated floor diverges, one well below it does not."""
    right = compare(*pair(tmp_path / "right", lambda t: t))
    (power,) = right.power()
    assert power.tensors == 2
    assert str(power) in "\n".join(right.summary())
    row = right.rows[1]
    assert math.isfinite(row.factor_floor)
    above = compare(*pair(tmp_path / "above", lambda t: t * (1 + 1.5 * row.factor_floor)))
    assert above.verdict == "diverges"
    below = compare(*pair(tmp_path / "below", lambda t: t * (1 + 0.3 * row.factor_floor)))
    assert below.verdict == INDISTINGUISHABLE


def test_a_copy_that_is_none_in_the_other_run(tmp_path: Path) -> None:
    """What one stage sends the next one is the same tensor, bit for bit."""
    value, near = dumps.random(1, 4, 16, 32), dumps.random(1, 4, 16, 32)
    near[0, 1, 3, 5] += 1e-6
    received = "decoder.layers.1:input"
    noise = near * (1 + 1e-7 * dumps.random(*value.shape, seed=3))
    other = noise.clone()
    other[0, 1, 3, 5] *= 1 + 2.0**-20
    for name, sent, got in (("a", value, value), ("right", noise, noise), ("wrong", noise, other)):
        dumps.write(tmp_path / name, {FIRST: Given(sent, SEQUENCE), received: Given(got, SEQUENCE)})
    assert compare(tmp_path / "a", tmp_path / "right").verdict != "diverges"
    result = compare(tmp_path / "a", tmp_path / "wrong")
    assert result.first is not None
    assert (result.first.name, result.first.test) == (received, "copy")
    assert FIRST in result.first.evidence


def test_the_gradient_of_a_mean_loss_is_held_to_a_few_roundings(tmp_path: Path) -> None:
    one = torch.full((1, 4, 16), 1 / 64)
    loss = Layout((Dim("b"), Dim("s")))
    for name, factor in (("a", 1.0), ("near", 1 + 2.0**-23), ("far", 1 + 2.0**-20)):
        value = dumps.random(1, 4, 16)
        dumps.write(tmp_path / name, {"loss:output": Given(value, loss, one * factor)})
    assert compare(tmp_path / "a", tmp_path / "near").verdict == INDISTINGUISHABLE
    result = compare(tmp_path / "a", tmp_path / "far")
    assert result.first is not None
    assert result.first.kind == "gradient"


def test_iterations_that_are_asked_for(tmp_path: Path) -> None:
    from megatron_flex.errors import DumpError

    value = dumps.random(3, 4, 16, 32)
    other = value.clone()
    other[1] += 1
    dumps.write(tmp_path / "a", {FIRST: Given(value, SEQUENCE)})
    dumps.write(tmp_path / "b", {FIRST: Given(other, SEQUENCE)})
    assert compare(tmp_path / "a", tmp_path / "b").verdict == "diverges"
    assert compare(tmp_path / "a", tmp_path / "b", iterations=[0, 2]).verdict == "equal"
    with raises(DumpError, 7, tmp_path / "a", tmp_path / "b", "0, 1, 2"):
        compare(tmp_path / "a", tmp_path / "b", iterations=[7])
