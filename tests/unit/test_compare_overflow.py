"""What is finite in no run is not evidence, and an overflow of a loss scale is not a divergence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import Comparison, compare
from megatron_flex.compare.comparison import INCOMPARABLE, INDISTINGUISHABLE
from tests.support import dumps
from tests.support.dumps import Given
from tests.support.messages import assert_names

FIRST, SECOND = "decoder.layers.0:output", "decoder.layers.1:output"
SAMPLES, TOKENS, WIDTH = 4, 8, 16
ENTRIES = SAMPLES * TOKENS * WIDTH
IN_FP16, IN_BF16 = {"num_layers": 2, "fp16": True}, {"num_layers": 2, "bf16": True}
INF, NAN, END = math.inf, math.nan, 65504.0


def tensor(seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * dumps.random(1, SAMPLES, TOKENS, WIDTH, seed=seed)


def put(value: Tensor, *entries: float, scale: float = 1.0) -> Tensor:
    """The tensor with other first entries."""
    out = value.clone() * scale
    out.view(-1)[: len(entries)] = torch.tensor(entries)
    return out


def compared(
    tmp_path: Path,
    a: dict[str, Tensor],
    b: dict[str, Tensor],
    model: Any = IN_FP16,
    dtype: Any = torch.float16,
) -> Comparison:
    """Gradients of two layers, whose values are equal."""
    for folder, gradients in (("a", a), ("b", b)):
        sites = {n: Given(tensor().to(dtype), gradient=g.to(dtype)) for n, g in gradients.items()}
        dumps.write(tmp_path / folder, sites, model=model)
    return compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("other", [NAN, INF])
def test_gradients_that_are_finite_in_no_run_are_no_evidence(tmp_path: Path, other: float) -> None:
    broken, infinite = torch.full_like(tensor(), other), torch.full_like(tensor(), INF)
    found = compared(tmp_path, {FIRST: infinite, SECOND: infinite}, {FIRST: broken, SECOND: broken})
    assert found.verdict == INDISTINGUISHABLE
    first, *_ = found.summary()
    assert_names(first, "2 of 4", f"{SECOND}.grad", 0, "--initial-loss-scale 65536")
    assert [r.is_evidence for r in found.rows] == [True, True, False, False]
    assert {p.kind for p in found.power()} == {"value"}, "nothing is claimed about gradients"
    (line,) = (x for x in found.summary() if x.startswith(INDISTINGUISHABLE))
    assert_names(line, 2)
    assert_names(found.to_json()["remedy"], "--initial-loss-scale")
    assert [row.count == row.not_finite for row in found.rows] == [False, False, True, True]


def test_a_verdict_on_nothing_is_not_equal(tmp_path: Path) -> None:
    for folder in "ab":
        dumps.write(tmp_path / folder, {FIRST: Given(torch.full_like(tensor(), NAN))}, model=IN_BF16)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.verdict, found.exit_status) == (INCOMPARABLE, 2)
    assert found.power() == []


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        ((INF, 65400.0), (END, INF), 0),
        ((INF, -INF), (END, -65400.0), 0),
        ((INF, 1.0), (20000.0, 1.0), 1),
        ((INF, 1.0), (-END, 1.0), 1),
        ((NAN, 1.0), (END, 1.0), 1),
        ((INF, INF), (INF, 20000.0), 0),
        ((INF, 100.0), (INF, 200.0), 1),
    ],
    ids=[
        "end of the range",
        "both ends",
        "inside it",
        "other sign",
        "NaN",
        "a step that overflows",
        "finite ones",
    ],
)
def test_an_infinity_against_the_end_of_the_range_is_an_overflow(
    tmp_path: Path, a: tuple[float, ...], b: tuple[float, ...], status: int
) -> None:
    wide = tensor(scale=1000.0)
    found = compared(tmp_path, {FIRST: put(wide, *a)}, {FIRST: put(wide, *b)})
    assert found.exit_status == status, str(found)
    row = found.rows[-1]
    assert row.not_finite == sum(
        not (math.isfinite(x) and math.isfinite(y)) for x, y in zip(a, b, strict=True)
    )
    if not status:
        assert math.isfinite(row.relative)
        (line,) = (x for x in found.summary() if x.startswith(INDISTINGUISHABLE))
        assert_names(line, row.not_finite)
        assert_names(found.remedy, "--initial-loss-scale 65536")


def test_what_follows_an_overflow_of_both_runs_is_one(tmp_path: Path) -> None:
    """A NaN that one order of summation makes of infinities is not a fault; a finite difference is one."""
    over, wide = put(tensor(), INF), tensor(1)
    steps = {"nan": (put(wide, NAN), 0), "off": (put(wide, NAN, scale=1.5), 1)}
    for name, (other, status) in steps.items():
        found = compared(tmp_path / name, {FIRST: wide, SECOND: over}, {FIRST: other, SECOND: over})
        assert found.exit_status == status, str(found)


@pytest.mark.parametrize(("model", "dtype"), [(IN_BF16, torch.bfloat16), ({"num_layers": 2}, torch.float32)])
def test_without_a_loss_scale_a_nan_of_one_run_diverges(
    tmp_path: Path, model: Any, dtype: torch.dtype
) -> None:
    over = put(tensor(), INF)
    found = compared(
        tmp_path, {FIRST: tensor(), SECOND: over}, {FIRST: put(tensor(), NAN), SECOND: over}, model, dtype
    )
    assert found.first is not None
    assert found.first.name == f"{FIRST}.grad"
    assert found.first.max_abs == INF
