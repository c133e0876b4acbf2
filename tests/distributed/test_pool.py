"""Ranks persist, begin alike, and notice what a function leaves behind on them."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.messages import any_names, assert_names
from tests.support.pool import RankError, run
from tests.support.rank import SECONDS, changes

KEPT: list[Any] = []  # by which a function holds on to what it made


def identity() -> tuple[int, float, float]:
    """The process, and two draws from its random states."""
    return os.getpid(), torch.rand(1).item(), random.random()


def test_ranks_persist_and_begin_with_the_same_random_state() -> None:
    first, second = run(2, identity), run(2, identity)
    assert first == second
    assert len({process for process, _, _ in first}) == 2
    assert first[0][1:] == first[1][1:], "all ranks draw the same"


def test_ranks_alone_are_others() -> None:
    assert {p for p, _, _ in run(2, identity)}.isdisjoint(p for p, _, _ in run(2, identity, alone=True))


def reduced() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def failing(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


def test_a_pool_that_failed_is_not_used_again() -> None:
    before = run(2, identity)
    began = time.monotonic()
    with pytest.raises(RankError) as raised:
        run(2, failing, 1)
    assert_names(raised.value, "rank 1", "ValueError: on purpose")
    assert time.monotonic() - began < SECONDS, "its peers are not waited for until their collectives end"
    assert {p for p, _, _ in run(2, identity)}.isdisjoint(p for p, _, _ in before)
    assert run(2, reduced) == [2.0, 2.0]


def dying() -> None:
    os._exit(3)


def sleeping() -> None:
    time.sleep(60)


def test_a_rank_that_dies_or_sleeps_is_reported() -> None:
    with pytest.raises(RankError) as died:
        run(1, dying)
    assert_names(died.value, "rank 0", 3)
    with pytest.raises(RankError) as slept:
        run(1, sleeping, timeout=0.5)
    assert_names(slept.value, "rank 0", "0.5 s")


def state(process: int) -> str:
    """A process's state, as Linux writes it."""
    with open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_ranks_without_work_are_halted() -> None:
    ((process, *_),) = run(1, identity)
    deadline = time.monotonic() + 10
    while state(process) != "T":
        assert time.monotonic() < deadline, "a halted process is in state T"
        time.sleep(0.01)
    assert run(1, identity)[0][0] == process, "and goes on where it was"


def environment() -> str | None:
    before = os.environ.get("FLEX_OF_A_TEST")
    os.environ["FLEX_OF_A_TEST"] = "1"
    changes.setattr(dist, "barrier", None)
    return before


def test_what_a_function_may_change_is_put_back() -> None:
    assert run(1, environment) == [None]
    assert run(1, environment) == [None]


def patched() -> None:
    dist.all_reduce = reduced


def method() -> None:
    nn.Linear.forward = nn.Module.forward  # type: ignore[method-assign]
    nn.modules.module.Module.half = nn.Module.float  # type: ignore[method-assign]


def thread() -> None:
    threading.Thread(target=time.sleep, args=(30,), name="left", daemon=True).start()


def hooked() -> None:
    nn.modules.module.register_module_forward_hook(lambda *_: None)


def opened() -> None:
    KEPT.append(open(__file__))  # noqa: SIM115  # that is the fault


def shared() -> None:
    import multiprocessing.shared_memory as memory

    KEPT.append(memory.SharedMemory(create=True, size=4096))
    KEPT[-1].unlink()


def moded() -> None:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    KEPT.append(Mode().__enter__())


def constant() -> None:
    from megatron_flex.adapters import adapter_registry

    adapter_registry.BUILT_IN = ()


def registered() -> None:
    from megatron_flex.adapters import register_adapter

    register_adapter(lambda chunks, said, group: None, "left")


def stand_in() -> None:
    sys.modules["megatron.left"] = types.ModuleType("megatron.left")


def removed() -> None:
    del sys.modules["megatron_flex.errors"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (constant, ["megatron_flex.adapters.adapter_registry.BUILT_IN"]),
        (registered, ["adapters", "left"]),
        (stand_in, ["megatron.left"]),
        (removed, ["megatron_flex.errors"]),
        (patched, ["torch.distributed.all_reduce", "tests.distributed.test_pool.reduced"]),
        (method, ["torch.nn.modules.module.Module.half"]),
        (thread, ["thread", "left"]),
        (hooked, ["_global_forward_hooks", 0, 1]),
        (opened, [__file__, 1]),
        (shared, ["/dev/shm"]),
        (moded, ["functions", 0, 1]),
    ],
)
def test_what_is_left_behind_is_an_error(function: Any, names: list[object]) -> None:
    with pytest.raises(RankError) as raised:
        run(1, function)
    _, *lines = str(raised.value).partition(f"{function.__module__}.{function.__name__}")[2].splitlines()
    assert any_names(lines, *names), raised.value


def model(keep_taps: bool) -> bool:
    """Leave a model with hooks, open; `keep_taps`: with a session that does not remove what it installed."""
    import megatron_flex as mf
    from megatron_flex.cpu import enable
    from tests.support import gpt, ranks
    from tests.support.gpt import Case

    enable()
    case = Case("tp2", tp=2, layers=1)
    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction("decoder.layers.0.mlp.linear_fc1")])
    gpt.step(case, chunks, 0)
    if keep_taps:
        flex.session.close = lambda failed=False: None
    return flex.is_leader


def test_open_sessions_are_closed_and_must_remove_everything() -> None:
    pytest.importorskip("megatron.core")
    assert run(2, model, False) == [True, False]
    with pytest.raises(RankError) as raised:
        run(2, model, True)
    assert "megatron.core.pipeline_parallel.schedules" in str(raised.value)
