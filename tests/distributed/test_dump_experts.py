"""Dumps of experts: by token as one process has them, wherever the experts were when they were written."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.matrix import judge
from tests.distributed.test_matrix import VERSION
from tests.distributed.test_moe import GROUPED, of
from tests.support import oracle
from tests.support.dump_cells import compare
from tests.support.gpt import Case

pytest.importorskip("megatron.core")
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}

CASES = [
    of("moe tp1, experts without tokens", experts=16),
    of("moe dp2 ep2, experts across data parallel ranks", dp=2, ep=2),
    of("moe tp2 sp etp2, shared experts", tp=2, sp=True, etp=2, shared_experts=True),
    of("moe tp2 sp ep2, allgather", tp=2, sp=True, ep=2, dispatcher="allgather"),
    of("moe tp2 sp ep2, all recomputed", tp=2, sp=True, ep=2, recompute=("full",)),
    of("moe cp2 ep2", cp=2, ep=2),
    of("moe pp2 vpp2", pp=2, vpp=2, layers=4, microbatches=2),
    of("moe pp2 dp2 ep2", pp=2, dp=2, ep=2, microbatches=2),
    of("moe dp2 ep2, tokens dropped", dp=2, ep=2, extra={"moe_expert_capacity_factor": 0.75}),
    of("moe dp2 ep2, auxiliary loss", dp=2, ep=2, extra=AUXILIARY),
]
FOUR = [
    of("moe tp2 sp dp2 ep2", tp=2, sp=True, dp=2, ep=2),
    of("moe tp2 sp dp2 ep2 etp2", tp=2, sp=True, dp=2, ep=2, etp=2, shared_experts=True),
    of("moe tp2 sp dp2 ep2 etp2, allgather", tp=2, sp=True, dp=2, ep=2, etp=2, dispatcher="allgather"),
    of("moe tp2 sp cp2 ep4", tp=2, sp=True, cp=2, ep=4, experts=8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_experts(case: Case, cells: list[Any]) -> None:
    judge(compare(case), cells)


@pytest.mark.skipif(VERSION < (0, 19), reason="a spec puts TEGroupedMLP together in another way before")
@pytest.mark.parametrize("case", GROUPED, ids=lambda c: c.name)
def test_grouped_experts(case: Case, cells: list[Any]) -> None:
    judge(compare(case), cells)


@pytest.mark.parametrize("case", FOUR, ids=lambda c: c.name)
def test_experts_on_four_ranks(case: Case, cells: list[Any]) -> None:
    """What concerns experts, in one of the layers."""
    judge(compare(case, [s for s in oracle.sites_of(case) if "layers.1.mlp" in s]), cells)
