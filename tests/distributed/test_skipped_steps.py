"""Ranks that leave out a step, make one more, or come with something else: an error on all ranks, at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import FlexError, HookError
from megatron_flex.config import flex_config
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run_alone as run  # what a rank that fails has posted stays with its groups

SOON = 20.0  # seconds; a collective that waits for a rank in vain takes a minute
SITE = "decoder.layers.1"
STEPS = {"leaves one out": (3, 2), "makes one more": (2, 3), "leaves all out": (2, 0)}


def centred(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs - inputs.mean()


def probed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + modules.probe(inputs)


def hook(kind: str, name: str) -> mf.HookFunction:
    if kind == "read":
        return mf.HookFunction(name)
    return mf.HookFunction(name, editing_function=probed if kind == "trained" else centred, save=False)


def steps_of(where: str, kind: str, counts: tuple[int, int]) -> str:
    """What the steps of one rank, and restore() behind them, end with."""
    rank = dist.get_rank()
    if where == "plain, no shared memory":
        flex_config.shared_bytes = 0
    if where.startswith("plain"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        flex = mf.FlexModel(model, tensor_parallel_size=2)
    else:
        case = Case(where, **{where[:2]: 2}, layers=2)
        chunks = ranks.start(case)
        flex = mf.FlexModel(chunks)
    if kind == "trained":
        width = 4 if where.startswith("plain") else gpt.HIDDEN
        flex.register_trainable_module("probe", nn.Linear(width, width))
    flex.register_forward_hook(hook(kind, "0" if where.startswith("plain") else SITE))
    started = time.monotonic()
    try:
        for _ in range(counts[rank]):
            if where == "tp2":  # a rank that is within Megatron's own collectives waits there, hooks or not
                time.sleep(1.0 * (counts[rank] == max(counts)))
            if where.startswith("plain"):
                model(torch.ones(2, 4)).sum().backward()
            else:
                gpt.step(case, chunks, rank if where == "dp2" else 0)
        flex.restore()
    except FlexError as error:
        flex.session.close(failed=True)
        assert time.monotonic() - started < SOON
        return str(error)
    return ""


@pytest.mark.parametrize("many", STEPS)
@pytest.mark.parametrize("kind", ["read", "edit", "trained"])
@pytest.mark.parametrize("where", ["dp2", "plain", "plain, no shared memory"])
def test_unequal_numbers_of_steps(where: str, kind: str, many: str) -> None:
    if many == "leaves all out":  # ranks compare hooks before the first step, and wait for the rest
        said = run(2, first_steps, where, kind)
        remedies = ("flex.step()", "FLEX_AGREE_SECONDS")  # of the rank that waits, and of one that comes late
        assert all(not text or any(remedy in text for remedy in remedies) for text in said)
        return
    texts, (first, last) = run(2, steps_of, where, kind, STEPS[many]), (0, 1)
    if STEPS[many][0] > STEPS[many][1]:
        first, last = last, first
    waited = f"rank {last}: the end of a step" in texts[last]  # in a collective that no other rank joins
    assert ("restart the job" in texts[last]) == waited
    for text in texts:
        assert_names(text, f"rank {first}", "restore()", "step 1")
        assert f"rank {last}: " in text


def first_steps(where: str, kind: str) -> str:
    flex_config.agree_seconds = 2.0
    return steps_of(where, kind, STEPS["leaves all out"])


def test_a_step_too_few_of_tensor_parallel_ranks() -> None:
    """A rank that has come to restore() is seen when the next step begins, before Megatron waits for it."""
    case = Case("tp2", tp=2, layers=2)
    for text in run(2, uneven_tp, case):
        assert_names(text, "rank 1", "restore()", "step 0", "rank 0")


def uneven_tp(case: Case) -> str:
    chunks = ranks.start(case)
    flex = mf.attach(chunks, [hook("edit", SITE)])
    gpt.step(case, chunks, 0)
    try:
        if dist.get_rank() == 0:
            time.sleep(2.0)
            gpt.step(case, chunks, 0)
        flex.restore()
    except HookError as error:
        flex.session.close(failed=True)
        return str(error)
    return ""


def lagging(dp: int) -> list[int]:
    """Ranks that nothing keeps together: the second one begins its steps when the first is done."""
    model, seen = nn.Linear(4, 4), []
    with mf.FlexModel(model, tensor_parallel_size=2 // dp) as flex:
        flex.register_forward_hook(mf.HookFunction("root", save=False, editing_function=lambda m, x, c, t: x))
        model(torch.ones(2, 4))
        flex.select("none")
        for number in range(4 if dp == 1 else 2 + 2 * dist.get_rank()):
            time.sleep(0.4 * dist.get_rank())
            model(torch.ones(2, 4))
            seen.append(number)
    return seen


@pytest.mark.parametrize("dp", [1, 2])
def test_a_rank_that_is_steps_behind(dp: int) -> None:
    """restore() waits for ranks that have steps to make yet, and they see no error in that it waits."""
    assert [len(seen) for seen in run(2, lagging, dp)] == ([4, 4] if dp == 1 else [2, 4])


# -- other shapes ----------------------------------------------------------------------------------------


def shapes(edits: bool) -> str:
    model = nn.Linear(4, 4)
    edit = centred if edits else None
    flex = mf.attach(model, [mf.HookFunction("root", edit, expected_shape=(None, 8))], tensor_parallel_size=2)
    started = time.monotonic()
    with pytest.raises(FlexError) as caught:
        model(torch.ones(2 + dist.get_rank(), 4))
    flex.session.close(failed=True)
    assert time.monotonic() - started < SOON
    return str(caught.value)


@pytest.mark.parametrize("edits", [False, True])
def test_parts_of_different_shapes(edits: bool) -> None:
    for text in run(2, shapes, edits):
        assert_names(text, "expected_shape")
