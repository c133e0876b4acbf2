"""The process in which scripts/bench hook-cost counts: steps of each way, passes and steps apart.

It counts our Python calls, and with a library for valgrind the CPU instructions. `python hook_cost_step.py`
prints the calls as JSON; `python hook_cost_step.py LIBRARY` runs under valgrind, whose files have the
instructions.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from types import FrameType
from typing import Any, Protocol

os.environ["FLEX_SHARED_BYTES"] = "0"  # the other rank is not there to share memory with

import torch
import torch.distributed as dist
from hook_cost_ways import IDLE, SHARD, WAYS, Model, Way, find_model, nothing
from torch.testing._internal.distributed.fake_pg import FakeStore

import megatron_flex as mf

WARMUP = 8  # steps in which plans and memory are made
STEPS = 3  # steps that are counted
OURS = os.path.dirname(mf.__file__) + os.sep
KINDS = ("calls", "functions")
BY_HAND = " by hand"
NONE, IDLE_WAY = "none", "idle"  # each with the number of layers


class Counter(Protocol):
    """Counts while its context is entered."""

    def counting(self, way: str, part: str) -> AbstractContextManager[None]:
        """The context; `part`: `begin`, `pass` or `end` of a step."""


class CallCounter:
    """Counts calls on this thread: those of this package's Python functions, and those of all functions."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[dict[str, int]]] = {}
        self._ours = self._all = 0

    @contextmanager
    def counting(self, way: str, part: str) -> Iterator[None]:
        """Count the calls inside."""
        self._ours = self._all = 0
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            self.found.setdefault((way, part), []).append({"calls": self._ours, "functions": self._all})

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._all += 1
            self._ours += frame.f_code.co_filename.startswith(OURS)
        elif event == "c_call":
            self._all += 1

    def medians(self) -> dict[str, dict[str, dict[str, int]]]:
        """By way, part and kind."""
        out: dict[str, dict[str, dict[str, int]]] = {}
        for (way, part), steps in self.found.items():
            found = {kind: int(median(step[kind] for step in steps)) for kind in KINDS}
            out.setdefault(way, {})[part] = found
        return out


class InstructionCounter:
    """Has callgrind write a file for each part of each step."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.start()

    @contextmanager
    def counting(self, way: str, part: str) -> Iterator[None]:
        """Count the instructions inside."""
        end, words = self._library.end, f"{way}|{part}".encode()
        self._library.begin()
        yield
        end(words)


def count(counter: Counter) -> None:
    """Run the counted steps of all ways."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    handle = mf.register_adapter(find_model, "counted")
    try:
        models = {layers: Model(layers) for layers in sorted({pair.layers for pair in WAYS.values()})}
        gc.collect()
        gc.disable()  # a collection would fall into one step or another
        for layers, model in models.items():
            _count_way(f"{NONE} of {layers}", nothing, model, counter)
            _count_way(f"{IDLE_WAY} of {layers}", IDLE, model, counter)
        for name, pair in WAYS.items():
            if pair.hand is not nothing:
                _count_way(name, pair.ours, models[pair.layers], counter)
                _count_way(name + BY_HAND, pair.hand, models[pair.layers], counter)
    finally:
        gc.enable()
        handle.remove()
        dist.destroy_process_group()


def _count_way(name: str, way: Way, model: Model, counter: Counter) -> None:
    inputs = torch.linspace(-1, 1, torch.Size(SHARD).numel()).view(SHARD).requires_grad_()
    gradient = torch.ones(SHARD)
    with way(model) as prepared:
        for number in range(WARMUP + STEPS):
            inputs.grad = None
            if number < WARMUP:
                with prepared.step():
                    model(inputs).backward(gradient)
                prepared.forget()
                continue
            step = prepared.step()
            with counter.counting(name, "begin"):
                step.__enter__()
            with counter.counting(name, "pass"):
                model(inputs).backward(gradient)
            with counter.counting(name, "end"):
                step.__exit__(None, None, None)
            prepared.forget()


def main(words: list[str]) -> None:
    """Count instructions if a library is named, and calls otherwise."""
    if words:
        count(InstructionCounter(words[0]))
        return
    calls = CallCounter()
    count(calls)
    print(json.dumps(calls.medians()))


if __name__ == "__main__":
    main(sys.argv[1:])
