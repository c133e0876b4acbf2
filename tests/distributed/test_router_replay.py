"""Hooks beside Megatron's RouterReplay: routes that it records and replays are one process's, edited too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import matrix
from tests.support import moe, replayed, sharing, truths
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.replayed import ROUTERS, SITES, Asked

pytest.importorskip("megatron.core.transformer.moe.router_replay")

REPLAY = {"moe_enable_routing_replay": True}
EP = Case("tp2 sp ep2", tp=2, sp=True, ep=2, layers=2, experts=4, extra=REPLAY)
RECOMPUTED = Case(
    "all recomputed", tp=2, sp=True, ep=2, layers=2, experts=4, recompute=("full",), extra=REPLAY
)
EXPERTS = Case(
    "experts recomputed", tp=2, sp=True, ep=2, layers=2, experts=4, recompute=("moe",), extra=REPLAY
)


def _ask(case: Case, asked: Asked) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    single = case.single()
    state = truths.once(sharing.weights, single)
    truth = truths.once(replayed.by_hand, single, state, asked._replace(backward=False))
    return truth, run(case.world, replayed.with_hooks, case, state, asked)


def _experts_of(routing_map: Tensor) -> Tensor:
    """The experts of each token, in ascending order."""
    return routing_map.int().topk(moe.TOPK).indices.sort(-1).values


def _check(truth: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, list[Tensor]]:
    """Compare captures, losses and gradients with one process; return the captures of the receiving rank."""
    captures = next(a["captures"] for a in answers if a["captures"])
    for name in SITES:
        for got, want in zip(captures[name], truth["captures"][name], strict=True):
            assert matrix.relative(got.float(), want.float()) < matrix.BOUND, name
    for answer in answers:
        assert answer["losses"] == pytest.approx(truth["losses"], rel=1e-5)
    gradients = matrix.whole_gradients(answers, lambda a: a["gradients"])
    errors = {n: matrix.relative(gradients[n], want) for n, want in truth["gradients"].items()}
    assert max(errors.values()) < matrix.BOUND
    return captures  # type: ignore[no-any-return]  # answers of ranks are of any type


@pytest.mark.versions
@pytest.mark.parametrize("edited", [False, True], ids=["read", "edited"])
@pytest.mark.parametrize("case", [EP, RECOMPUTED], ids=lambda c: c.name)
def test_recorded_routes_are_those_of_the_logits_that_hooks_leave(case: Case, edited: bool) -> None:
    truth, answers = _ask(case, Asked("record", edited=edited))
    captures = _check(truth, answers)
    for answer in answers:
        for router, got, want in zip(ROUTERS, answer["routes"], truth["routes"], strict=True):
            assert torch.equal(got, want)
            assert torch.equal(got, _experts_of(captures[f"{router}:map"][-1]))


def test_recorded_routes_and_gradients_do_not_change_with_hooks() -> None:
    state = truths.once(sharing.weights, EP.single())
    read, plain = (
        run(EP.world, replayed.with_hooks, EP, state, Asked("record", hooks=hooks)) for hooks in (True, False)
    )
    for with_hooks, without in zip(read, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_hooks["routes"], without["routes"], strict=True))
        for name, (_, want) in without["gradients"].items():
            assert torch.equal(with_hooks["gradients"][name][1], want), name


@pytest.mark.versions
@pytest.mark.parametrize("edited", [False, True], ids=["read", "edited"])
@pytest.mark.parametrize(
    ("case", "backward"),
    [(EP, False), (RECOMPUTED, False), (RECOMPUTED, True), (EXPERTS, True)],
    ids=[
        "tp2 sp ep2",
        "all recomputed",
        "all recomputed, replayed backward",
        "experts recomputed, replayed backward",
    ],
)
def test_replayed_routes_stay_under_edits_and_recomputation(case: Case, backward: bool, edited: bool) -> None:
    captures = _check(*_ask(case, Asked("replay", edited=edited, backward=backward)))
    for microbatch, by_layer in enumerate(replayed.routes(case)):
        for router, experts in zip(ROUTERS, by_layer, strict=True):
            assert torch.equal(_experts_of(captures[f"{router}:map"][microbatch]), experts.sort(-1).values)
