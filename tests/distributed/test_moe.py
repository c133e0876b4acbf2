"""Experts: what each one gets and gives, by token, is the single-process run's wherever the experts are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_matrix import VERSION, check
from tests.support import oracle
from tests.support.gpt import Case

pytest.importorskip("megatron.core")


def of(name: str, **kwargs: Any) -> Case:
    return Case(name, **{"layers": 2, "experts": 4, **kwargs})


EVERYWHERE = [of("moe tp2 sp ep2", tp=2, sp=True, ep=2)]
CASES = [
    of("moe tp1, experts without tokens", experts=16),
    of("moe dp2 ep2, experts across data parallel ranks", dp=2, ep=2),
    of("moe tp2 sp etp2, shared experts", tp=2, sp=True, etp=2, shared_experts=True),
    of("moe tp2 sp ep2, allgather", tp=2, sp=True, ep=2, dispatcher="allgather"),
    of("moe pp2 dp2 ep2", pp=2, dp=2, ep=2, microbatches=2),
    of("moe tp2 sp ep2, experts recomputed", tp=2, sp=True, ep=2, recompute=("moe",)),
    of("moe dp2 ep2, tokens dropped", dp=2, ep=2, extra={"moe_expert_capacity_factor": 0.75}),
]
GROUPED = [
    of("moe dp2 ep2, grouped experts (TE stand-ins)", dp=2, ep=2, grouped=True),
    of(
        "moe tp2 sp dp2 ep2 etp2, grouped experts (TE stand-ins)",
        tp=2,
        sp=True,
        ep=2,
        etp=2,
        grouped=True,
        dp=2,
    ),
]
FOUR = [
    of("moe tp2 sp dp2 ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, shared_experts=True),
    of("moe tp2 sp dp2 ep2 etp2, allgather", tp=2, sp=True, dp=2, ep=2, etp=2, dispatcher="allgather"),
    of("moe tp2 sp dp2 ep4", tp=2, sp=True, dp=2, ep=4, experts=8),
]


@pytest.mark.versions
@pytest.mark.parametrize("case", EVERYWHERE, ids=lambda c: c.name)
def test_experts_on_every_version(case: Case, cells: list[Any]) -> None:
    check(case, cells)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_experts(case: Case, cells: list[Any]) -> None:
    check(case, cells)


@pytest.mark.skipif(VERSION < (0, 19), reason="a spec puts TEGroupedMLP together in another way before")
@pytest.mark.parametrize("case", GROUPED, ids=lambda c: c.name)
def test_grouped_experts(case: Case, cells: list[Any]) -> None:
    check(case, cells, None, [s for s in oracle.edits_of(case) if ".layers.1.mlp.experts" in s])


@pytest.mark.parametrize("case", FOUR, ids=lambda c: c.name)
def test_experts_on_four_ranks(case: Case, cells: list[Any]) -> None:
    """All values and gradients; edits inside the last layer's experts and of the router."""
    sites = oracle.sites_of(case)
    edits = [s for s in oracle.edits_of(case) if ".layers.1.mlp" in s]
    keep = (":logits", ":probs", ":weights", ":dispatched", "experts:output", "experts.2.linear_fc1:output")
    check(case, cells, sites, [s for s in edits if s.endswith((*keep, "experts.1.linear_fc2:output"))])
