"""Law 8: a dump has every value and gradient that one process has, from any layout, and changes nothing."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.matrix import BOUND, judge
from tests.support import dumped, families, gpt, oracle
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
VERSION = tuple(int(p) for p in importlib.metadata.version("megatron-core").split(".")[:2])

CASES = [
    Case("tp2 sp", tp=2, sp=True),
    Case("tp4, fewer groups than ranks", tp=4),
    Case("tp4 sp, q/k norm", tp=4, sp=True, qk_norm=True, groups=4, layers=2),
    Case("pp2", pp=2, microbatches=3),
    Case("pp2 vpp2", pp=2, vpp=2, microbatches=4),
    Case("cp2", cp=2, layers=2),
    Case("cp2 tp2 sp, all recomputed", cp=2, tp=2, sp=True, layers=2, recompute=("full",)),
    Case("dp2", dp=2, layers=2),
    Case("tp2 sp, norms and mlp recomputed", tp=2, sp=True, layers=2, recompute=("layernorm", "mlp")),
    Case("tp2 pp2, tied embeddings", tp=2, pp=2, tied=True, layers=2),
    Case(
        "tp2 sp, gelu, bias, layernorm, learned positions",
        tp=2,
        sp=True,
        gated=False,
        rms=False,
        rope=False,
        bias=True,
        layers=2,
    ),
    Case("tp2 sp pp2 dp2", tp=2, sp=True, pp=2, dp=2, layers=2),
]
HYBRID = Case("hybrid tp2 pp2", tp=2, pp=2, hybrid=True)
SIXTEEN = Case("tp2 sp cp2 pp2 dp2", tp=2, sp=True, cp=2, pp=2, dp=2, layers=2)


def check(case: Case, cells: list[Any], folder: Path) -> None:
    sites = oracle.sites_of(case)
    truth = dumped.truth_of(case)
    settings = {"gradients": True, "replicas": True}
    answers = run(case.world, dumped.dumping, case, truth["state"], str(folder / "d"), settings, timeout=300)
    assert not dumped.changed(answers, BOUND)
    found = dumped.against_truth(case, folder / "d", sites, truth)
    assert len(found) > len(sites)
    run(1, dumped.dumping, case.single(), truth["state"], str(folder / "tp1"), settings, timeout=300)
    twins = dumped.against_twin(case, folder / "d", folder / "tp1")
    assert len(twins) > len(sites)
    judge([*found, *twins], cells)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_dump_is_what_one_process_has(case: Case, cells: list[Any], tmp_path: Path) -> None:
    check(case, cells, tmp_path)


@pytest.mark.slow
def test_a_dump_of_sixteen_ranks(cells: list[Any], tmp_path: Path) -> None:
    check(SIXTEEN, cells, tmp_path)


@pytest.mark.skipif(VERSION < (0, 19), reason="HybridModel came with megatron-core 0.19")
def test_a_dump_of_a_hybrid_model(cells: list[Any], tmp_path: Path) -> None:
    check(HYBRID, cells, tmp_path)


PLAINLY: dict[str, Any] = {"gated": False, "rms": False, "rope": False, "bias": True, "layers": 2}
FAMILIES = [
    Case("value head tp2 sp", tp=2, sp=True, layers=2, family=families.VALUE),
    Case("t5 tp2 sp", tp=2, sp=True, groups=gpt.HEADS, family=families.T5, **PLAINLY),
    Case("llava tp2 pp2", tp=2, pp=2, layers=2, family=families.LLAVA),
    Case("mimo tp2 sp", tp=2, sp=True, layers=2, family=families.MIMO),
]


@pytest.mark.skipif(VERSION < (0, 19), reason=families.NEED)
@pytest.mark.parametrize("case", FAMILIES, ids=lambda c: c.name)
def test_a_dump_of_a_model_that_holds_others(case: Case, cells: list[Any], tmp_path: Path) -> None:
    check(case, cells, tmp_path)


BITWISE = [
    Case("tp2 sp", tp=2, sp=True, layers=2),
    Case("tp2 sp pp2 vpp2, all recomputed", tp=2, sp=True, pp=2, vpp=2, recompute=("full",)),
    Case("cp2 dp2, layernorm", cp=2, dp=2, rms=False, layers=2),
]


@pytest.mark.parametrize("case", BITWISE, ids=lambda c: c.name)
def test_dumping_changes_no_bit(case: Case, tmp_path: Path) -> None:
    """Values at all places; gradients too, but where a sum of three is then taken in another order."""
    for folder, settings in (
        ("values", {}),
        ("gradients", {"gradients": True, "sites": [dumped.bitwise], "every": 1}),
        ("selected", {"tokens": [0, -1], "dtype": "bf16", "samples": [0], "replicas": True}),
    ):
        answers = run(case.world, dumped.dumping, case, None, str(tmp_path / folder), settings, timeout=300)
        assert dumped.changed(answers) == []
        assert answers[0]["plain"][1]
