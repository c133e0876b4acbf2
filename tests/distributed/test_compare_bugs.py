"""Comparing dumps finds real distributed bugs, and right runs raise no alarm."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_flex.compare import Comparison, compare
from tests.support import gpt, ranks, wrapped
from tests.support.bugs import BUGS, FOURTEEN, Bug
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.training import Trainer

pytest.importorskip("megatron.core")

HALF = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
CASES = {b.case.name: b.case for b in BUGS}
RIGHT = [
    *CASES.values(),
    Case("tp4 sp, q/k norm", tp=4, sp=True, qk_norm=True, groups=4, layers=2),
    Case("tp2 sp pp2 vpp2", tp=2, sp=True, pp=2, vpp=2),
    Case("cp2 tp2 sp", cp=2, tp=2, sp=True, layers=2),
    Case("experts tp2 sp ep2", tp=2, sp=True, ep=2, experts=4, layers=2),
]
IN_HALF = [
    replace(CASES["tp2"], name="bf16 tp2", extra=HALF),
    Case("bf16 tp4 sp, eight layers", tp=4, sp=True, groups=4, layers=8, extra=HALF),
    Case("bf16 cp2", cp=2, layers=4, extra=HALF),
]
WORDS = "embedding.word_embeddings.weight"


def dumped(
    case: Case, path: str, state: dict[str, Tensor] | None, bug: str = "", steps: int = 1, **settings: Any
) -> dict[str, Tensor]:
    """Steps of this rank with a dump of everything; returns the weights that it began with."""
    from megatron.core.transformer.module import Float16Module

    import megatron_flex as mf

    chunks = ranks.start(case)
    if state is None:
        state = gpt.randomize(chunks[0])
    else:
        gpt.load(chunks, {"output_layer.weight": state[WORDS], **state})  # which tied embeddings have twice
    inner = [Float16Module(c.config, c) for c in chunks] if "bf16" in case.extra else chunks
    models = wrapped.ddp(inner, True)
    found = next((b for b in BUGS if b.name == bug), None)
    with contextlib.nullcontext() if found is None else found.patch(models, state):
        settings = {"gradients": True, "parameters": "**", "replicas": True, "order": "blocks", **settings}
        flex = mf.attach(models, dumps=mf.Dump(path, "**:*", **settings))
        for _ in range(steps):
            for model in models:
                model.zero_grad_buffer()
            gpt.step(case, models, ranks.mine(chunks))
        flex.session.close()  # a place that a bug leaves out is no error here
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


def twin(case: Case, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The dump of one process, and its weights; made once for all tests of a case."""
    path = folder / f"{case.name} alone"
    weights = folder / f"{case.name} weights"
    if not weights.exists():
        (state,) = run(1, dumped, case.single(), str(path), None, timeout=300)
        torch.save(state, weights)
    return path, torch.load(weights)


def compared(case: Case, folder: Path, bug: str = "") -> Comparison:
    """A sharded run, with a bug or without, against one process."""
    alone, state = twin(case, folder)
    path = folder / f"{case.name} {bug or 'right'}"
    if not path.exists():
        run(case.world, dumped, case, str(path), state, bug, timeout=300)
    return compare(alone, path)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_bug_is_found_and_localised(bug: Bug, folder: Path, findings: list[Any]) -> None:
    result = compared(bug.case, folder, bug.name)
    first = result.first
    there = first is not None and first.name.startswith(bug.first) and first.kind == bug.kind
    # A weight that is out of step is written by one of its ranks: the wrong one, or a right one.
    weight = first is not None and first.kind == "parameter" and first.name == bug.replica
    there = there or weight
    findings.append(
        {
            "bug": bug.name,
            "listed": bug in FOURTEEN,
            "found": result.verdict == "diverges",
            "localised": there,
            "first": "" if first is None else f"{first.name} ({first.kind})",
        }
    )
    assert result.verdict == "diverges", str(result)
    assert result.exit_status == 1
    assert there, str(result)
    assert weight or bug.hint in " ".join(result.hints), str(result)
    steps = {o.name for o in result.replicas}
    assert all(o.dump == "B" for o in result.replicas), "one process has no replicas"
    assert not bug.replica or bug.replica in steps, str(result)
    assert first is not None
    assert first.worst is not None
    assert first.worst.ranks_b, "whose it is, is known"


@pytest.mark.parametrize("case", [*RIGHT, *IN_HALF], ids=lambda c: c.name)
def test_right_run_raises_no_alarm(case: Case, folder: Path, findings: list[Any]) -> None:
    result = compared(case, folder)
    alarm = result.verdict == "diverges"
    findings.append({"case": case.name, "alarm": alarm, "tensors": len(result.rows)})
    assert not alarm, str(result)
    assert result.exit_status == 0
    assert result.rows
    kinds = {r.kind for r in result.rows}
    assert kinds == {"parameter", "value", "gradient", "parameter_gradient"}
    assert not [n for n in result.notes if "only in" in n], "both dumps have every place"


HALF_BUGS = [
    replace(b, case=half)
    for half in (IN_HALF[0], IN_HALF[2])
    for b in FOURTEEN
    if b.case.name == half.name.removeprefix("bf16 ")
]


@pytest.mark.parametrize("bug", HALF_BUGS, ids=lambda b: b.name)
def test_bug_is_found_in_bf16(bug: Bug, folder: Path) -> None:
    result = compared(bug.case, folder, bug.name)
    assert result.first is not None, str(result)
    assert result.first.name.startswith(bug.first), str(result)
    assert result.first.kind == bug.kind


def trained(case: Case, path: str, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Three steps of training, with Megatron's optimizer."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    if state is None:
        state = gpt.randomize(chunks[0])
    else:
        gpt.load(chunks, state)
    trainer = Trainer(case, chunks, ranks.mine(chunks))
    dump = mf.Dump(path, "**:*", gradients=True, parameters="**", order="blocks")
    with mf.attach(trainer.models, dumps=dump):
        for _ in range(3):
            trainer.step()
    return state


def test_training_apart_raises_no_alarm(tmp_path: Path) -> None:
    """Parameters drift apart by round-off from step to step."""
    case = Case("tp2 sp dp2", tp=2, sp=True, dp=2, layers=2)
    (state,) = run(1, trained, case.single(), str(tmp_path / "alone"), None)
    run(case.world, trained, case, str(tmp_path / "spread"), state)
    result = compare(tmp_path / "alone", tmp_path / "spread")
    assert result.verdict == "not distinguishable from round-off", str(result)
    assert {r.iteration for r in result.rows} == {0, 1, 2}
    moved = [r for r in result.rows if r.kind == "parameter"]
    assert all(r.equal for r in moved if r.iteration == 0)
    assert any(not r.equal for r in moved if r.iteration == 1)


def test_tolerance_from_a_run_that_is_disturbed(folder: Path) -> None:
    """One process with weights off by a digit gives the noise; a right run is within it, a bug is not."""
    bug = FOURTEEN[1]
    alone, state = twin(bug.case, folder)
    generator = torch.Generator().manual_seed(5)
    disturbed = {n: t * (1 + 1e-7 * torch.randn(t.shape, generator=generator)) for n, t in state.items()}
    path = folder / "disturbed"
    run(1, dumped, bug.case.single(), str(path), disturbed)
    compared(bug.case, folder)
    compared(bug.case, folder, bug.name)
    right = compare(alone, folder / f"{bug.case.name} right", tolerance_from=path)
    assert right.verdict == "not distinguishable from round-off", str(right)
    wrong = compare(alone, folder / f"{bug.case.name} {bug.name}", tolerance_from=path)
    assert wrong.first is not None
    assert wrong.first.name == bug.first
    assert {r.tolerance for r in right.rows} != {r.tolerance for r in compared(bug.case, folder).rows}
