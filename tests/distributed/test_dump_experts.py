"""Dumps of experts: by token as one process has them, wherever the experts were when they were written."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.matrix import judge
from tests.distributed.test_moe import of
from tests.support.dumped import compare
from tests.support.gpt import Case

pytest.importorskip("megatron.core")

CASES = [
    of("moe dp2 ep2, experts across data parallel ranks", dp=2, ep=2),
    of("moe tp2 sp etp2, shared experts", tp=2, sp=True, etp=2, shared_experts=True),
    of("moe tp2 sp ep2, allgather", tp=2, sp=True, ep=2, dispatcher="allgather"),
    of("moe tp2 sp ep2, all recomputed", tp=2, sp=True, ep=2, recompute=("full",)),
    of("moe pp2 dp2 ep2", pp=2, dp=2, ep=2, microbatches=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_experts(case: Case, cells: list[Any]) -> None:
    judge(compare(case), cells)
