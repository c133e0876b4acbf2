"""A part of the package fails on one rank alone: nothing hangs, and all ranks raise."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.distributed.test_one_rank_fails import PAIR, RANK, SECONDS, SITE, check
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")


# -- statistics ----------------------------------------------------------------------------------------


def unmeasured(case: Case) -> dict[str, Any]:
    """Steps that are measured; in the second one the numbers of one rank cannot be had."""
    import megatron_flex as mf
    from megatron_flex.statistics import Statistics
    from megatron_flex.statistics.moments import MomentTable
    from tests.support.measuring import Kept

    chunks = ranks.start(case)
    kept, texts, calls = Kept(), [], []
    pack = MomentTable.pack

    def packs(self: Any, *args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("on purpose")
        return pack(self, *args)

    start = time.monotonic()
    with mf.FlexModel(chunks) as flex:
        flex.register_statistics(Statistics("nowhere", SITE), kept)
        gpt.step(case, chunks, 0)  # whose end compares flags
        if dist.get_rank() == RANK:
            changes.setattr(MomentTable, "pack", packs)
        for _ in range(4):
            try:
                gpt.step(case, chunks, 0)
                texts.append("")
            except mf.HookError as error:
                texts.append(str(error))
        changes.undo()
    return {"texts": texts, "seconds": time.monotonic() - start, "order": kept.order}


def test_statistics_that_one_rank_cannot_measure() -> None:
    answers = run(2, unmeasured, PAIR, timeout=SECONDS)
    check(answers, 2, "on purpose", "iteration 2", f"(on rank {RANK})")
    assert all(a["order"] == [0, 1, 3, 4] for a in answers)


# -- values of the context -----------------------------------------------------------------------------


def unsent(case: Case) -> dict[str, Any]:
    """Two steps of one call each; in the first one rank cannot send the values that edits share."""
    import megatron_flex as mf
    from megatron_flex.runtime.context.context_relay import ContextRelay

    def fails(self: Any) -> None:
        raise RuntimeError("on purpose")

    chunks = ranks.start(case)
    flex = mf.FlexModel(chunks)
    flex.session.hooks.add(mf.HookFunction(SITE))
    if dist.get_rank() == RANK:
        changes.setattr(ContextRelay, "forward_ends", fails)
    texts = []
    start = time.monotonic()
    for _ in range(2):
        try:
            with flex.step():
                ranks.call(chunks)
            texts.append("")
        except mf.HookError as error:
            texts.append(str(error))
        changes.undo()
    flex.session.close()
    return {"texts": texts, "seconds": time.monotonic() - start}


def test_values_that_one_rank_cannot_send_at_the_end_of_a_call() -> None:
    answers = run(2, unsent, PAIR, timeout=SECONDS)
    check(answers, 0, "on purpose", f"(on rank {RANK})")
    assert all(a["texts"][1] == "" for a in answers)
