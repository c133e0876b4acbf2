"""The trace of firings, the plan of a hook against what was sent, and a debugger in an edit."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import socket
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names, raises
from tests.support.pool import run_alone as run
from tests.support.rank import changes

pytest.importorskip("megatron.core")

TP2 = Case("tp2 sp", tp=2, sp=True, layers=2)
LAYER = "decoder.layers.1"
PLACES = (
    f"{LAYER}:mid",
    f"{LAYER}.self_attention:k",
    f"{LAYER}.self_attention.linear_proj:partial",
    f"{LAYER}.self_attention.core_attention:scores",
    f"{LAYER}.mlp.linear_fc1:output",
    f"{LAYER}.mlp.linear_fc1:gemm_input",
    "output_layer:output",
    "loss:output",
)


def half(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 0.5


def counted(case: Case) -> tuple[int, int, int]:
    """Collectives of edits, by the trace and by torch.distributed itself; and what is left when it is off."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    rank = ranks.mine(chunks)
    with ranks.counting() as plain:
        gpt.step(case, chunks, rank)
    places = ["embedding:output", f"{LAYER}.mlp.experts:dispatched"] if case.experts else PLACES
    hooks = [mf.HookFunction(p, editing_function=half, save=False) for p in places]
    told: list[str] = []
    with mf.attach(chunks, hooks) as flex:
        gpt.step(case, chunks, rank)
        flex.debug()
        flex.session.tracer.write = told.append
        with ranks.counting() as counts:
            gpt.step(case, chunks, rank)
        asked = sum(a.size > 1 for a in flex.session.mesh)  # at the end of a step, whether a hook failed
        flex.debug(False)
        printed = len(told)
        gpt.step(case, chunks, rank)
        left = len(told) - printed
    moving = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast")
    by_torch = sum(counts[n] - plain[n] for n in moving) - asked
    by_trace = sum(len(re.findall(r"(?:all_gather|all_reduce|all_to_all|broadcast) along", t)) for t in told)
    return by_trace, by_torch, left


@pytest.mark.versions
@pytest.mark.parametrize(
    "case", [TP2, Case("moe", tp=2, sp=True, dp=2, ep=2, experts=4, layers=2)], ids=lambda c: c.name
)
def test_the_trace_has_every_collective(case: Case) -> None:
    for by_trace, by_torch, left in run(case.world, counted, case):
        assert by_trace == by_torch
        assert by_trace > 0
        assert left == 0


def spoken(case: Case, capture: str) -> list[str]:
    import megatron_flex as mf

    chunks = ranks.start(case)
    with open(f"{capture}-{torch.distributed.get_rank()}", "w+") as file:
        sys.stderr, kept = file, sys.stderr
        hooks = [
            mf.HookFunction(f"{LAYER}:mid", editing_function=mf.edits.scale(0.5), run="once"),
            mf.HookFunction(f"{LAYER}.mlp.linear_fc2"),
        ]
        with mf.attach(chunks, hooks) as flex:
            gpt.step(case, chunks, 0)
            flex.debug()
            gpt.step(case, chunks, 0)
        gpt.step(case, chunks, 0)
        sys.stderr = kept
        file.seek(0)
        return [line for line in file.read().splitlines() if line.startswith("[flex")]


@pytest.mark.versions
def test_a_line_for_each_firing_on_each_rank(tmp_path: Any) -> None:
    for rank, lines in enumerate(run(2, spoken, TP2, f"{tmp_path}/said")):
        assert all(line.startswith(f"[flex rank {rank}] {LAYER}") for line in lines)
        forward = [line for line in lines if ":mid" in line and "backward" not in line]
        back = [line for line in lines if ":mid" in line and "backward" in line]
        read = [line for line in lines if "linear_fc2" in line]
        assert len(forward) == len(back) == len(read) == TP2.microbatches
        start = f"[flex rank {rank}] {LAYER}:mid iteration 1 microbatch 0"
        assert re.sub(r"[\d.]+ ms", "T", forward[0]) == (
            f"{start}: (8, 2, 32) -> (16, 2, 32) in [s/tp, b, h]"
            " | all_gather along tp, 4096 bytes, T | broadcast along tp, 4096 bytes, T | edit T (scale(0.5))"
            " | -> (8, 2, 32)"
        )
        assert re.sub(r"[\d.]+ ms", "T", back[0]) == (
            f"{start}, backward | all_gather along tp, 4096 bytes, T | broadcast along tp, 4096 bytes, T"
        )
        assert_names(read[0], "iteration 1 microbatch 0", "(8, 2, 32) in [s/tp, b, h]")


def unregistered(case: Case) -> str:
    import megatron_flex as mf

    chunks = ranks.start(case)
    with mf.attach(chunks) as flex:
        try:
            flex.explain(mf.HookFunction(LAYER))
        except mf.HookError as error:
            return str(error)
    return ""


def test_what_cannot_be_explained() -> None:
    (text,) = run(1, unregistered, Case("one", layers=2))
    assert_names(text, "HookFunction", LAYER)


# -- the debugger --------------------------------------------------------------------------------------


STOPPED: list[bool] = []


def stops(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    import megatron_flex as mf

    factor = 2.0
    if not STOPPED:
        STOPPED.append(True)
        mf.breakpoint()
    return inputs * factor


def talk(read: Any, write: Any, commands: list[str], heard: list[str]) -> None:
    """Be the person: wait for the prompt, and say something."""
    for command in commands:
        text = ""
        while "(Pdb) " not in text:
            piece = read()
            if not piece:
                return
            text += piece
        heard.append(text)
        write(f"{command}\n")


def refused(address: tuple[str, int], words: bytes) -> list[str]:
    """What a debugger says to somebody who does not know the word: nothing."""
    with socket.create_connection(address) as line:
        line.sendall(words)
        with contextlib.suppress(ConnectionResetError):
            if said := line.recv(100):
                return [said.decode()]
    return []


class Told(io.StringIO):
    """A standard error that keeps what the package writes."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def write(self, text: str) -> int:
        if text.startswith("[flex rank "):
            self.lines.append(text)
        return len(text)


def debugged(
    case: Case, way: str, run_on: str, commands: list[str]
) -> tuple[list[float], list[str], list[str], str]:
    """A step with a debugger in it: losses, what the person saw, what was told, and the step's error."""
    import megatron_flex as mf
    from megatron_flex.config import flex_config
    from megatron_flex.runtime.debug import edit_debugger

    chunks = ranks.start(case)
    told: list[str] = []
    heard: list[str] = []
    sys.stderr = Told(told)
    person = None
    if torch.distributed.get_rank() == 0 and way == "terminal":
        master, slave = pty.openpty()
        os.setsid()
        os.close(os.open(os.ttyname(slave), os.O_RDWR))  # the first terminal that a session opens is its own

        def read() -> str:
            return os.read(master, 4096).decode()

        person = threading.Thread(
            target=talk, args=(read, lambda t: os.write(master, t.encode()), commands, heard), daemon=True
        )
    if torch.distributed.get_rank() == 0 and way == "port":
        flex_config.debug_port = 0
        changes.setattr(edit_debugger, "TYPING", 2.0)

        def connect() -> None:
            while len(told) < 2:
                time.sleep(0.05)
            found = re.search(r"nc 127\.0\.0\.1 (\d+), and type (\w+)$", told[-1])
            assert found is not None
            address, word = ("127.0.0.1", int(found[1])), found[2].encode()
            silent = socket.create_connection(address)
            for wrong in (b"p 1\n", b"0" * len(word) + b"\n", word[:-1] + b"\n", word + b"x\n"):
                heard.extend(refused(address, wrong))
            with silent, socket.create_connection(address) as line:
                line.sendall(word[:5])
                time.sleep(0.1)
                line.sendall(word[5:] + b"\n")
                talk(lambda: line.recv(4096).decode(), lambda t: line.sendall(t.encode()), commands, heard)
                while line.recv(4096):
                    pass

        person = threading.Thread(target=connect, daemon=True)
    if person is not None:
        person.start()
    losses, error = [], ""
    flex = mf.attach(chunks, [mf.HookFunction(f"{LAYER}:mid", editing_function=stops, run=run_on)])
    try:
        losses = gpt.step(case, chunks, 0)
    except mf.HookError as raised:
        error = str(raised)
    flex.session.close()
    if person is not None:
        person.join(10)
    return losses, heard, told, error


COMMANDS = ["p inputs.shape", "factor = 3.0", "p factor", "c"]


@pytest.mark.parametrize("way", ["terminal", "port"])
def test_a_debugger_in_an_edit_of_the_leader(way: str) -> None:
    (losses, heard, told, _), (others, _, said, _) = run(2, debugged, TP2, way, "once", COMMANDS)
    assert "return inputs * factor" in heard[0]
    assert_names(heard[1], "torch.Size([16, 2, 32])")
    assert heard[3].replace("p factor", "").strip().startswith("3.0")
    assert_names(told[0], f"{LAYER}:mid", "iteration 0", "microbatch 0")
    assert said == []
    assert losses == others, "what is changed in the debugger counts for all ranks"
    if way == "port":
        assert_names(told[1], "nc 127.0.0.1")


def test_a_debugger_in_an_edit_of_all_ranks_stops_on_one() -> None:
    commands = ["p inputs.shape", "c"]
    (losses, heard, told, _), (others, _, said, _) = run(2, debugged, TP2, "port", "replicated", commands)
    assert_names(heard[1], "torch.Size([16, 2, 32])")
    assert_names(told[0], "run='once'")
    assert said == []
    assert losses == others


@pytest.mark.versions
def test_to_quit_is_an_error_on_all_ranks() -> None:
    first, second = run(2, debugged, TP2, "port", "once", ["q"])
    assert first[3] == second[3]
    assert "BdbQuit" in first[3]
    assert_names(first[3], "rank 0")


def test_without_a_terminal_or_a_port() -> None:
    import megatron_flex as mf

    first, second = run(2, nowhere, TP2)
    assert first == second
    assert_names(first, "FLEX_DEBUG_PORT=5678", "nc 127.0.0.1 5678")
    with raises(mf.HookError, "mf.breakpoint()", "breakpoint()"):
        mf.breakpoint()


def nowhere(case: Case) -> str:
    import megatron_flex as mf

    os.setsid()  # a session without a terminal
    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction(f"{LAYER}:mid", editing_function=stops, run="once")])
    return ranks.step_says(case, chunks, flex)
