"""Statistics against statistics and against a dump, and what exit status each has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import compare
from megatron_flex.compare.comparison import INDISTINGUISHABLE
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.statistics.moments import MomentSums, make_statistics
from megatron_flex.statistics.statistics_files import create_file
from megatron_flex.statistics.statistics_records import MeasuredSite, StatisticsHeader
from tests.support import dumps
from tests.support.dumps import SEQUENCE, Given
from tests.support.messages import assert_names, raises

NAMES = [f"decoder.layers.{n}:output" for n in range(3)]
SHAPE = 4, 16, 8  # samples, tokens, features


def tensors() -> dict[str, Tensor]:
    """One for each site, with an iteration in front."""
    return {n: dumps.random(1, *SHAPE, seed=s) for s, n in enumerate(NAMES)}


def measured(folder: Path, values: dict[str, Tensor], dtype: str = "float32", **more: Any) -> Path:
    """Statistics of one iteration, by the real writer."""
    header = StatisticsHeader(
        created="2026-01-01T00:00:00+00:00",
        versions={},
        framework="synthetic",
        axes={"tp": 2},
        sites=[MeasuredSite(n, {}, SHAPE) for n in values],
        settings={"model": {"dtype": dtype, "hidden_size": 8, "num_layers": 3}},
    )
    file = create_file(folder, header)
    rows = []
    for name, value in values.items():
        sums = MomentSums()
        sums.add(value)
        row = make_statistics(name, "gradient" if name.endswith(".grad") else "value", 0, sums, 1)
        assert row is not None
        rows.append(row)
    file.write(rows)
    file.close()
    return folder


def near(values: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    return {
        n: v * (1 + size * dumps.random(*v.shape, seed=50 + s)) for s, (n, v) in enumerate(values.items())
    }


@pytest.mark.parametrize(("dtype", "size"), [("float32", 1e-7), ("bfloat16", 2.0**-8)])
def test_round_off_is_within_the_bounds(tmp_path: Path, dtype: str, size: float) -> None:
    one = measured(tmp_path / "a", tensors(), dtype)
    two = measured(tmp_path / "b", near(tensors(), size), dtype)
    result = compare(one, two)
    assert result.verdict == INDISTINGUISHABLE, str(result)
    assert (result.exit_status, len(result.rows)) == (0, 3)
    same = compare(one, one)
    assert (same.verdict, same.exit_status) == ("equal", 0)


def test_a_factor_and_an_offset_are_found(tmp_path: Path) -> None:
    one = measured(tmp_path / "a", tensors())
    scaled, moved, broken = tensors(), tensors(), tensors()
    scaled[NAMES[1]] = scaled[NAMES[1]] * 1.01
    moved[NAMES[2]] = moved[NAMES[2]] + 0.05
    broken[NAMES[0]][0, 0, 0, 0] = torch.nan
    found = {}
    for name, values in (("scaled", scaled), ("moved", moved), ("broken", broken)):
        result = compare(one, measured(tmp_path / name, values))
        assert (result.verdict, result.exit_status) == ("diverges", 1)
        assert result.first is not None
        found[name] = result.first.name, result.first.test
        told = json.loads(json.dumps(result.to_json(), allow_nan=False))
        assert (told["verdict"], told["first"]["name"]) == ("diverges", result.first.name)
        assert result.first.evidence in str(result)
    assert [found[name][0] for name in ("scaled", "moved", "broken")] == [NAMES[1], NAMES[2], NAMES[0]]
    assert (found["moved"][1], found["broken"][1]) == ("mean", "NaN")


def test_a_dump_against_statistics(tmp_path: Path) -> None:
    values = tensors()
    dumps.write(tmp_path / "dump", {n: Given(v, SEQUENCE) for n, v in values.items()}, mesh={"tp": 2})
    right = compare(tmp_path / "dump", measured(tmp_path / "right", values))
    assert right.exit_status == 0
    assert max(r.relative for r in right.rows) < 1e-12, "the same values, summed in another order"
    values[NAMES[1]] = values[NAMES[1]] * 1.01
    wrong = compare(measured(tmp_path / "wrong", values), tmp_path / "dump")
    assert wrong.first is not None
    assert (wrong.first.name, wrong.exit_status) == (NAMES[1], 1)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    values = tensors()
    one = measured(tmp_path / "a", values)
    less = measured(tmp_path / "less", {NAMES[0]: values[NAMES[0]]})
    result = compare(one, less)
    assert (result.exit_status, result.incomplete) == (2, True)
    assert compare(one, less, allow_missing=True).exit_status == 0
    short = measured(tmp_path / "short", {n: v[:, :2] for n, v in values.items()})
    with raises(DumpError, one, short, 512, 256):
        compare(one, short)
    with raises(FlexError, "tolerance", "tolerance_from"):
        compare(one, less, tolerance=0.1)


def test_gradients_that_overflow_in_both_runs_are_no_evidence(tmp_path: Path) -> None:
    """Which entries overflow depends on the order of summation; in one run alone they are a divergence."""
    name = f"{NAMES[0]}.grad"
    value = tensors()[NAMES[0]]
    few, many = value.clone(), value.clone()
    few[0, 0, 0, 0], many[0, 0, 0] = torch.inf, torch.nan
    sides = [
        measured(tmp_path / f, {NAMES[1]: value, name: g}, "float16") for f, g in (("a", few), ("b", many))
    ]
    result = compare(*sides)
    assert result.exit_status == 0, str(result)
    assert [row.is_evidence for row in result.rows] == [True, False]
    assert_names(result.summary()[0], name, "1 of 2", "--initial-loss-scale 65536")
    right = measured(tmp_path / "c", {NAMES[1]: value, name: value}, "float16")
    assert compare(right, sides[1]).exit_status == 1
