"""Attached and idle: no module has anything of ours, and what Python calls is more by a few calls a step."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

import pytest

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.pool import run

pytest.importorskip("megatron.core")

HERE = "decoder.layers.0.mlp.linear_fc1"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STEP, MICROBATCH = 70, 90  # Python and C functions that are called more at most, for each


def called(case: Case, chunks: list[Any]) -> Counter[str]:
    """How often each function is called, of Python's and C's, in one settled step on this rank's thread."""
    gpt.step(case, chunks, 0)
    gc.collect()
    gc.disable()  # a collection calls what it finds
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            counts[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            counts[getattr(function, "__qualname__", repr(function))] += 1

    sys.setprofile(note)
    try:
        gpt.step(case, chunks, 0)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def counted(case: Case) -> dict[str, Counter[str]]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    found = {"none": called(case, chunks)}
    with mf.attach(chunks):
        found["idle"] = called(case, chunks)
    found["detached"] = called(case, chunks)
    with mf.attach(chunks, [mf.HookFunction(HERE)]) as flex:
        found["one hook"] = called(case, chunks)
        flex.output_dict.clear()
    found["detached again"] = called(case, chunks)
    return found


def more(case: Case) -> list[dict[str, Counter[str]]]:
    """By rank: what is called more, idle and with one hook; nothing is called less or left behind."""
    out = []
    for found in run(case.world, counted, case):
        none = found["none"]
        assert sum(none.values()) > 2000
        assert found["detached"] == none
        assert found["detached again"] == none
        for way in ("idle", "one hook"):
            assert not none - found[way]
        out.append({way: found[way] - none for way in ("idle", "one hook")})
    return out


def test_an_idle_step_calls_a_few_functions_more_whatever_the_model() -> None:
    small = more(Case("idle, 2 layers", tp=2, pp=2, layers=2))
    assert small == more(Case("idle, 4 layers", tp=2, pp=2, layers=4)), "more modules, not one call more"
    for found in small:
        assert sum(found["idle"].values()) <= STEP + 2 * MICROBATCH


def test_an_idle_step_of_more_microbatches() -> None:
    for found in more(Case("idle, 5 microbatches", tp=2, pp=2, layers=2, microbatches=5)):
        assert sum(found["idle"].values()) <= STEP + 5 * MICROBATCH


def changed(case: Case) -> dict[str, set[str]]:
    """The names of what differs from the bare model: modules' attributes, functions of the schedules."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    gpt.step(case, chunks, 0)
    bare = ranks.fingerprint(chunks)
    # what other tests would see, these must: every module is there, with its table of hooks
    assert all(f"0/{path}/{hooks}" in bare for path, _ in chunks[0].named_modules() for hooks in HOOKS)

    def differs() -> set[str]:
        now = ranks.fingerprint(chunks)
        return {name for name in bare.keys() | now.keys() if bare.get(name) != now.get(name)}

    out = {}
    with mf.attach(chunks):
        gpt.step(case, chunks, 0)
        out["idle"] = differs()
        own = [m for c in chunks for m in c.modules() if "forward" in vars(m)]
        out["forwards"] = {type(m).__name__ for m in own}
    out["detached"] = differs()
    with mf.attach(chunks, [mf.HookFunction(HERE)]):
        gpt.step(case, chunks, 0)
        out["one hook"] = differs()
    out["detached again"] = differs()
    with mf.attach(chunks, [mf.HookFunction(HERE, enabled=False)]):
        gpt.step(case, chunks, 0)
        out["disabled"] = differs()
    return out


@pytest.mark.parametrize(
    "case", [Case("tp2 pp2", tp=2, pp=2), Case("tp2 sp", tp=2, sp=True, layers=2)], ids=lambda c: c.name
)
def test_modules_are_as_they_were_but_where_a_hook_is(case: Case) -> None:
    """At the root and the schedules' functions stand the entries that tell steps and calls."""
    for rank, found in enumerate(run(case.world, changed, case)):
        assert found["detached"] == found["detached again"] == set()
        assert found["forwards"] == set()
        idle = found["idle"]
        assert {n for n in idle if not n.startswith(("0//", "schedules/"))} == set()
        assert {n for n in idle if n.startswith("0//_")} >= {"0//_forward_hooks", "0//_forward_pre_hooks"}
        beside = {n.rpartition("/")[0] for n in found["one hook"] - idle}
        assert beside == ({f"0/{HERE}"} if rank < 2 else set())
        assert found["disabled"] == idle
