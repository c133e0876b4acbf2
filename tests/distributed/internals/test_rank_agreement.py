"""How ranks meet: what they compare, how often, and what one says that waits for another in vain."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_flex as mf
from megatron_flex import HookError
from megatron_flex.collectives import Agreement, gather_objects, max_over_ranks, rank_agreement
from megatron_flex.mesh import Axis, Mesh
from tests.distributed.test_errors import told
from tests.distributed.test_function_agreement import CASES, PLACE, closing
from tests.distributed.test_skipped_steps import hook
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run, run_alone
from tests.support.rank import changes

pytest.importorskip("megatron.core")


def alone() -> str:
    """A rank waits for one that never comes, and says which."""
    from megatron_flex.collectives import Agreement

    if torch.distributed.get_rank() == 1:
        time.sleep(4)
        return ""
    return told(lambda: Agreement("test", 1.0).compare("forward on x"))


@pytest.mark.versions
def test_a_rank_that_never_compares_is_named() -> None:
    text, _ = run(2, alone)
    assert_names(text, "rank 1", "1 s")


def overdue() -> str:
    """A rank that computes longer than others wait for it."""
    changes.setattr(rank_agreement, "MEETING", 2.0)
    model = nn.Linear(4, 4)
    flex = mf.FlexModel(model, tensor_parallel_size=2)
    flex.register_forward_hook(hook("edit", "root"))
    model(torch.ones(2, 4))
    if dist.get_rank() == 0:
        time.sleep(5.0)
        flex.session.close(failed=True)
        return ""
    with pytest.raises(HookError) as caught:
        flex.restore()
    return str(caught.value)


def test_a_rank_that_does_not_come() -> None:
    _, text = run_alone(2, overdue)
    assert_names(text, "rank 0", "2 s", "restore()", "step 0", "rank 1")


def exchanges(kind: str) -> str:
    rank = dist.get_rank()
    mesh = Mesh((Axis("tp", 2, rank, dist.group.WORLD, (0, 1)),))
    calls = {
        "numbers": lambda: max_over_ranks([1] * (2 + 40 * rank), mesh, "the end of a step"),
        "steps": lambda: max_over_ranks([1], mesh, f"the end of step {rank}"),
        "kinds": lambda: max_over_ranks([1], mesh, "x") if rank else gather_objects({"a": 1}, mesh, ["tp"]),
    }
    with pytest.raises(HookError) as caught:
        calls[kind]()
    assert max_over_ranks([rank, -rank, *range(40)], mesh) == [1, 0, *range(40)], "they meet again"
    return str(caught.value)


@pytest.mark.parametrize("kind", ["numbers", "steps", "kinds"])
def test_exchanges_that_do_not_fit(kind: str) -> None:
    # alone: what a rank that fails has posted stays with its groups
    for text in run_alone(2, exchanges, kind):
        assert_names(text, 0, 1)
        if kind == "steps":
            assert_names(text, "rank 0", "step 0", "rank 1", "step 1")


def hooks_differ() -> str:
    agreement = Agreement("test", 5.0)
    with pytest.raises(HookError) as caught:
        agreement.compare(f"forward on {dist.get_rank()}", "step 3")
    return str(caught.value)


def test_other_hooks() -> None:
    for text in run_alone(2, hooks_differ):
        assert_names(text, "0", "1")


def met(case: Case) -> Any:
    """How often ranks compare, and what they send meanwhile, over changes of hooks."""
    import megatron_flex as mf
    from megatron_flex.collectives import Agreement

    chunks = ranks.start(case)
    calls: list[int] = []
    compare = Agreement.compare_details

    def counted(self: Any, *args: Any) -> Any:
        calls.append(len("".join(a for a in args if isinstance(a, str))))
        return compare(self, *args)

    changes.setattr(Agreement, "compare_details", counted)
    flex = mf.attach(chunks, [mf.HookFunction(PLACE, editing_function=lambda m, x, c, t: x, save=False)])
    found = []
    for change in (True, False, True, False):
        if change:
            function = closing(torch.zeros(1000, 1000))
            flex.register_forward_hook(mf.HookFunction(PLACE, editing_function=function, save=False))
        calls.clear()
        with ranks.counting() as counts:
            gpt.step(case, chunks, 0)
        found.append((list(calls), sum(counts.values())))
    flex.session.close(failed=True)
    with ranks.counting() as counts:
        gpt.step(case, chunks, 0)
    return found, sum(counts.values())


def test_ranks_meet_once_where_hooks_change_and_never_in_a_pass() -> None:
    for found, _ in run(2, met, CASES[1]):
        assert [len(calls) for calls, _ in found] == [1, 0, 1, 0]
        assert all(n < 4000 for calls, _ in found for n in calls), "what is said does not grow with tensors"
        sent = [n for _, n in found]
        assert sent[0] == sent[1]
        assert sent[2] == sent[3]
