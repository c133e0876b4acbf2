"""Hooks beside Megatron's tensor_observation: its observer receives what one process has, under edits too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import matrix
from tests.support import observed, sharing, truths
from tests.support.gpt import Case
from tests.support.observed import Asked
from tests.support.pool import run

pytest.importorskip("megatron.core.tensor_observation", reason="megatron-core has it from 0.20 on")

DENSE = Case("tp2 sp", tp=2, sp=True, layers=2, experts=4)
RECOMPUTED = Case("tp2 sp ep2, recomputed", tp=2, sp=True, ep=2, layers=2, experts=4, recompute=("full",))
CASES = [DENSE, RECOMPUTED]


def _ask(case: Case, asked: Asked) -> list[dict[str, Any]]:
    return run(case.world, observed.with_hooks, case, truths.once(sharing.weights, case.single()), asked)


@pytest.mark.versions
@pytest.mark.parametrize("edits", [False, True], ids=["read", "edited"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_observer_receives_what_one_process_has(case: Case, edits: bool) -> None:
    """Once for each forward pass; tensors behind an edit are edited, a layer's own output among them."""
    single = case.single()
    truth = truths.once(observed.by_hand, single, truths.once(sharing.weights, single), Asked(edits=edits))
    answers = _ask(case, Asked(reads=True, edits=edits))
    for answer in answers:
        assert [name for name, _ in answer["observed"]] == [name for name, _ in truth["observed"]]
        for (name, got), (_, want) in zip(answer["observed"], truth["observed"], strict=True):
            assert matrix.relative(got, want) < matrix.BOUND, name
    gradients = matrix.whole_gradients(answers, lambda a: a["gradients"])
    errors = {n: matrix.relative(gradients[n], want) for n, want in truth["gradients"].items()}
    assert max(errors.values()) < matrix.BOUND


@pytest.mark.versions
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reads_change_nothing_that_is_observed_and_capture_the_same(case: Case) -> None:
    with_reads, without = (_ask(case, Asked(reads=reads)) for reads in (True, False))
    for read, plain in zip(with_reads, without, strict=True):
        assert [name for name, _ in read["observed"]] == [name for name, _ in plain["observed"]]
        assert all(
            torch.equal(a, b) for (_, a), (_, b) in zip(read["observed"], plain["observed"], strict=True)
        )
        for name, (_, want) in plain["gradients"].items():
            assert torch.equal(read["gradients"][name][1], want), name
    captures = next(a["captures"] for a in with_reads if a["captures"])
    seen = {"residual_accumulator": ":input", "router_logits": ":logits", "output_logits": ":output"}
    numbers: dict[str, int] = {}
    for name, tensor in with_reads[0]["observed"]:
        path, _, kind = name.partition(" ")
        if kind in seen:
            microbatch = numbers.setdefault(name, 0)
            numbers[name] += 1
            assert torch.equal(captures[path + seen[kind]][microbatch], tensor), name
    assert set(numbers.values()) == {case.microbatches}
