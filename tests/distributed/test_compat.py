"""The compatible interface on Megatron models: what hooks read and edit, compared with one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import matrix
from tests.distributed.matrix import Cell, greatest
from tests.support import compat, truths
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

CASES = {
    "tp2 sp": Case("tp2 sp", tp=2, sp=True, layers=2),
    "pp2": Case("pp2", pp=2, layers=2),
    "tp2 sp pp2": Case("tp2 sp pp2", tp=2, sp=True, pp=2, layers=2),
    "dp2 tp2": Case("dp2 tp2", dp=2, tp=2, layers=2),
}


@cache
def both(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One process and the ranks of a case."""
    case = CASES[name]
    truth = truths.once(compat.truth, replace(case.single(), microbatches=case.microbatches, joint=case.dp))
    return truth, run(case.world, compat.sharded, case, truth["state"], timeout=300)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("call", compat.KINDS)
def test_registered_hooks_read_the_whole(call: str, name: str, cells: list[Any]) -> None:
    truth, answers = both(name)
    case = CASES[name]
    module, site = compat.KINDS[call]
    backward = call in compat.BACKWARD
    wanted = [w * (case.dp if backward else 1) for w in truth["gradients" if backward else "values"][site]]
    got = answers[0]["read"][module]
    assert len(got) == 2 * len(wanted), "of two steps"
    assert all(not t.requires_grad and t.device.type == "cpu" for t in got)
    errors = (matrix.relative(g, w) for g, w in zip(got, wanted * 2, strict=True))
    judge([Cell(name, call, "gradient" if backward else "value", greatest(errors))], cells)
    for answer in answers[1:]:  # on every rank
        assert answer["read"].keys() == answers[0]["read"].keys()
        assert all(map(torch.equal, answer["read"][module], got))


@pytest.mark.parametrize("name", ["tp2 sp", "pp2", "tp2 sp pp2"])
def test_register_hook_reads_a_parameters_gradient(name: str, cells: list[Any]) -> None:
    truth, answers = both(name)
    got, wanted = answers[0]["read"][compat.WEIGHT], truth["parameters"][compat.WEIGHT]
    microbatches = CASES[name].microbatches
    assert len(got) == 2 * microbatches
    errors = (matrix.relative(sum(s), wanted) for s in (got[:microbatches], got[microbatches:]))
    judge([Cell(name, "register_hook", "gradient", greatest(errors))], cells)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("call", compat.KINDS)
def test_registered_hooks_edit_the_whole(call: str, name: str, cells: list[Any]) -> None:
    truth, answers = both(name)
    judge(effect(name, answers, call, *truth["edited"][compat.KINDS[call][1]]), cells)


@pytest.mark.parametrize("name", ["tp2 sp", "pp2", "tp2 sp pp2"])
def test_register_hook_edits_a_parameters_gradient(name: str, cells: list[Any]) -> None:
    truth, answers = both(name)
    judge(effect(name, answers, "register_hook", *truth["edited"][compat.WEIGHT]), cells)


def effect(
    name: str, answers: list[Any], call: str, losses: list[float], parameters: dict[str, Tensor]
) -> list[Cell]:
    ends = {a["dp"]: a["edited"][call][0] for a in answers if a["edited"][call][0]}
    mean = [sum(x) / len(ends) for x in zip(*ends.values(), strict=True)]
    loss = greatest(abs(g - w) / abs(w) for g, w in zip(mean, losses, strict=True))
    found = matrix.whole_gradients(answers, lambda a: a["edited"][call][1])
    assert set(found) == set(parameters)
    gradients = greatest(matrix.relative(found[n], parameters[n]) for n in parameters)
    return [
        Cell(name, call, "edited loss", loss),
        Cell(name, call, "edited parameter gradients", gradients),
    ]


def judge(found: list[Cell], cells: list[Any]) -> None:
    matrix.judge([replace(c, model="GPT, interface of FlexModel (2023)") for c in found], cells)
