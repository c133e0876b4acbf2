"""One rank fails before a collective that its peers are in already: nothing hangs, and all ranks raise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

PAIR = Case("tp2", tp=2, layers=1)
SITE = "decoder.layers.0.mlp.linear_fc1"
RANK = 1  # that fails
SECONDS = 40  # that ranks have, fewer than a process group waits


def doubled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def more_dims(local: Tensor) -> Tensor:
    return local.unsqueeze(0)


def longer(local: Tensor) -> Tensor:
    return torch.cat([local, local], -1)


def fewer(local: Tensor) -> Tensor:
    return local[..., :-1]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"dims": more_dims, "longer": longer, "odd": fewer}


def odd_shards(change: Callable[[Tensor], Tensor], step: int, name: str) -> None:
    """From a step on what passes a place of this rank has another shape than its rule says."""
    from megatron_flex.runtime.hook_dispatcher import SiteDispatch

    upstream = SiteDispatch.__call__

    def fire(self: Any, local: Tensor, layout: Any = None, route: Any = None) -> Tensor:
        if self._site.name != name or self._dispatcher.clock.step < step:
            return upstream(self, local, layout, route)
        odd = change(local)
        out = upstream(self, odd, layout, route)
        # What the framework goes on with: it depends on what came back, as it would if its own was odd.
        return local + (out - odd).sum() * 0.0

    changes.setattr(SiteDispatch, "__call__", fire)


def steps(case: Case, hooks: list[dict[str, Any]], count: int, prepare: Callable[[], None]) -> dict[str, Any]:
    """Make steps; what the last one raised, how long it took, and whether the next one is good."""
    import megatron_flex as mf
    from megatron_flex.config import flex_config

    flex_config.dry_run = False
    chunks = ranks.start(case)
    gpt.step(case, chunks, 0)
    flex = mf.FlexModel(chunks)
    for hook in hooks:
        flex.session.add(mf.HookFunction(**hook))
    if dist.get_rank() == RANK:
        prepare()
    texts = []
    start = time.monotonic()
    for _ in range(count):
        try:
            gpt.step(case, chunks, 0)
            texts.append("")
        except mf.HookError as error:
            texts.append(str(error))
    seconds = time.monotonic() - start
    changes.undo()
    gpt.step(case, chunks, 0)
    flex.session.close()
    return {"texts": texts, "seconds": seconds}


def check(answers: list[dict[str, Any]], good: int, *words: str) -> None:
    """All ranks raised the same, in the last of their steps alone."""
    texts = answers[0]["texts"]
    assert all(a["texts"] == texts for a in answers), answers
    assert texts[:good] == [""] * good
    assert all(w in texts[good] for w in words), texts
    assert all(a["seconds"] < SECONDS / 2 for a in answers)


def shards(case: Case, change: str, hook: dict[str, Any], step: int) -> dict[str, Any]:
    name = f"{SITE}:output"
    return steps(case, [hook], step + 1, lambda: odd_shards(CHANGES[change], step, name))


@pytest.mark.parametrize("change", ["dims", "longer"])
@pytest.mark.parametrize("more", [{}, {"run": "once"}, {"on_error": "skip"}, {"hook_type": "tensor"}])
def test_a_shard_that_does_not_fit_at_first(change: str, more: dict[str, Any]) -> None:
    hook = {"module_name": SITE, "editing_function": doubled, **more}
    check(run(2, shards, PAIR, change, hook, 0, timeout=SECONDS), 0, SITE, "shape")


@pytest.mark.parametrize("more", [{}, {"run": "once"}, {"on_error": "skip"}])
def test_a_shard_that_does_not_fit_later(more: dict[str, Any]) -> None:
    hook = {"module_name": SITE, "editing_function": doubled, **more}
    check(run(2, shards, PAIR, "dims", hook, 2, timeout=SECONDS), 2, SITE, "shape", f"(on rank {RANK})")


def test_a_shard_that_does_not_fit_in_a_replay() -> None:
    case = replace(PAIR, name="tp2 recomputed", recompute=("full",))
    hook = {"module_name": SITE, "editing_function": doubled}
    check(run(2, shards, case, "dims", hook, 1, timeout=SECONDS), 1, SITE, "shape", f"(on rank {RANK})")


def read(case: Case, step: int) -> dict[str, Any]:
    from megatron_flex.config import flex_config

    for name, value in (("shared_bytes", 0), ("pending_bytes", 1)):  # sent at the end of each microbatch
        changes.setattr(flex_config, name, value)

    def prepare() -> None:
        odd_shards(more_dims, step, f"{SITE}:output")

    return steps(case, [{"module_name": SITE}], step + 1, prepare)


def test_a_shard_that_does_not_fit_and_is_sent_within_the_step() -> None:
    case = replace(PAIR, name="tp2, three microbatches", microbatches=3)
    check(run(2, read, case, 2, timeout=SECONDS), 2, SITE, "4 dims", f"(on rank {RANK})")


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
    flex.session.add(mf.HookFunction(SITE))
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
