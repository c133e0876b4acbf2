"""The relay that sends the values of editing functions to other pipeline stages: what it sends, and when."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_context import EVERYWHERE
from tests.support import gpt, ranks, sharing
from tests.support.gpt import Case
from tests.support.pool import run
from tests.support.rank import changes

pytest.importorskip("megatron.core")


# -- messages --------------------------------------------------------------------------------------------


def left_behind() -> list[Any]:
    """A message that nobody took, and a later one with the same tag."""
    from megatron_flex.collectives import PipelineRelay, StageMessage, pack_values, unpack_values
    from megatron_flex.mesh import Axis, Mesh

    rank = torch.distributed.get_rank()
    relay = PipelineRelay(Mesh((Axis("pp", 2, rank, torch.distributed.group.WORLD, (0, 1)),)), "test")
    relay.open()
    old, new = (StageMessage(step, 3, 1, False) for step in (0, 1024))
    assert old.tag == new.tag
    found: list[Any] = []
    if rank == 0:
        for message in (old, new):
            half = torch.arange(5).bfloat16()
            items = {"step": message.step, "x": [half, {"y": half[1]}, half.bool(), torch.empty(0, 3)]}
            items["f"] = lambda: 0
            relay.send(
                pack_values(items, lambda key, error: found.append((key, type(error).__name__))), 1, message
            )
        relay.settle(new.step)
    else:
        found.append(unpack_values(relay.receive(0, new)))
    relay.close()
    return found


def test_a_message_left_behind_is_not_taken_for_another() -> None:
    refused, (items,) = run(2, left_behind, timeout=60)
    assert [key for key, _ in refused] == ["f", "f"]
    assert items["step"] == 1024
    first, inner, bits, nothing = items["x"]
    assert first.dtype == torch.bfloat16
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert (inner["y"].item(), inner["y"].shape) == (1, ())
    assert bits.tolist() == [False, True, True, True, True]
    assert nothing.shape == (0, 3)


FAILED, COMPLETED = 20, 8


def left_in_memory() -> int:
    """How many packages that nobody took are in memory, after steps that fail and then some that do not."""
    from megatron_flex.collectives import PipelineRelay, StageMessage
    from megatron_flex.mesh import Axis, Mesh

    rank = torch.distributed.get_rank()
    relay = PipelineRelay(Mesh((Axis("pp", 2, rank, torch.distributed.group.WORLD, (0, 1)),)), "failing")
    relay.open()
    packages: list[weakref.ref[Tensor]] = []
    for step in range(FAILED + COMPLETED):
        message = StageMessage(step, 0, 1, False)
        if rank == 0:
            package = torch.full((9,), step, dtype=torch.uint8)
            packages.append(weakref.ref(package))
            relay.send(package, 1, message)
            del package
            if step >= FAILED:
                relay.settle(step)
        elif step >= FAILED:
            assert relay.receive(0, message).tolist() == [step] * 9
    left = sum(package() is not None for package in packages)
    relay.close()
    return left


def test_packages_of_failed_steps_are_released_by_later_steps() -> None:
    assert run(2, left_in_memory, timeout=60) == [0, 0]


# -- what travels, and when ----------------------------------------------------------------------------


def ignores(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 1.5


def traffic(case: Case) -> dict[str, Any]:
    """How often packages leave, and how large; and which groups there are."""
    import megatron_flex as mf
    from megatron_flex.collectives import PipelineRelay

    chunks = ranks.start(case)
    sent: list[tuple[int, bool, int]] = []
    original = PipelineRelay.send

    def send(self: Any, package: Tensor, stage: int, message: Any) -> None:
        sent.append((message.virtual_stage, message.backward, package.numel()))
        original(self, package, stage, message)

    changes.setattr(PipelineRelay, "send", send)
    out: dict[str, Any] = {}
    for name, hooks in (
        ("not used", [mf.HookFunction("decoder.layers.*", editing_function=ignores)]),
        ("one stage", [mf.HookFunction("decoder.layers.0", editing_function=sharing.save)]),
        ("patch", sharing.hooks("patch", EVERYWHERE)),
        ("chain", sharing.hooks("chain", EVERYWHERE)),
    ):
        for way in ("training", "evaluation"):
            sent.clear()
            with mf.attach(chunks, hooks) as flex:
                gpt.step(case, chunks, 0, forward_only=way == "evaluation")
                open_group = flex.session.context_relay._relay._group is not None
                left = (
                    len(flex.session.editing.scopes.micros),
                    len(flex.session.context_relay._relay._sent),
                )
            out[f"{name}, {way}"] = list(sent), open_group, left
    return out


@pytest.mark.versions
def test_only_what_is_used_travels_and_once() -> None:
    answers = run(4, traffic, Case("tp2 pp2", tp=2, pp=2))
    stream = gpt.SEQUENCE * gpt.BATCH * gpt.HIDDEN * 4
    for rank, answer in enumerate(answers):
        for name in ("not used", "one stage"):
            for way in ("training", "evaluation"):
                assert answer[f"{name}, {way}"] == ([], False, (0, 0)), (rank, name)
        for name in ("patch", "chain"):
            for way in ("training", "evaluation"):
                sent, is_open, left = answer[f"{name}, {way}"]
                assert left == (0, 0), "nothing is left of a step"
                assert is_open == (rank % 2 == 0), "the leaders of stages alone have a group"
                forward, back = ([s for s in sent if s[1] is way_back] for way_back in (False, True))
                assert len(forward) == (2 if rank == 0 else 0), "one package for each microbatch"
                assert len(back) == (2 if rank == 2 and way == "training" else 0)
                count = 1 if name == "patch" else 2
                assert all(count * stream <= size < count * stream + 2000 for _, _, size in forward)
                if name == "patch":
                    assert all(size < 1000 for _, _, size in back), "it is detached: no gradient goes back"


# -- what is left behind a step -------------------------------------------------------------------------


def breaks_down(case: Case) -> Any:
    """A step that the model itself breaks off on all ranks, after a package has left, and one behind it."""
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    import megatron_flex as mf

    chunks = ranks.start(case)
    sender: Any = getattr(p2p_communication, "P2PCommunicator", schedules)  # functions before 0.14
    with mf.attach(chunks, sharing.hooks("skip", EVERYWHERE)) as flex:
        before = gpt.step(case, chunks, 0)
        original = sender.send_forward

        def fail(*_: Any) -> None:
            raise RuntimeError("the model itself")

        def send(*arguments: Any, **keywords: Any) -> None:
            original(*arguments, **keywords)
            fail()

        handle = chunks[-1].decoder.layers[-1].register_forward_pre_hook(fail)
        if torch.distributed.get_rank() == 0:
            handle.remove()
            sender.send_forward = send
        said = ""
        try:
            gpt.step(case, chunks, 0)
        except RuntimeError as error:
            said = str(error)
        sender.send_forward = original
        handle.remove()
        left = len(flex.session.editing.scopes.micros)
        return said, left, gpt.step(case, chunks, 0) == before


@pytest.mark.versions
def test_a_step_that_the_model_breaks_off_does_not_spoil_the_next() -> None:
    for said, left, same in run(2, breaks_down, Case("pp2", pp=2, microbatches=1), timeout=60):
        assert said == "the model itself"
        assert left == 0
        assert same
