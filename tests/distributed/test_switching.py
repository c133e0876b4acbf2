"""Hooks switched in mid-training: by a file that one rank sees, or a signal to one; on all in one step."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron_flex.errors import FlexError
from tests.support import gpt, ranks
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.versions

PP2 = Case("pp2", pp=2, layers=2)
TP2 = Case("tp2", tp=2, layers=2)
FC1 = "decoder.layers.*.mlp.linear_fc1"


def doubled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def negated(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return -inputs


class Loop:
    """A training loop of a few steps, in which things happen on single ranks between steps."""

    def __init__(self, case: Case, path: Path | None, folder: Path) -> None:
        import megatron_flex as mf
        from megatron_flex.launch.hook_control import Control

        self.case, self.path = case, path
        self.chunks = ranks.start(case)
        self.flex = mf.attach(
            self.chunks,
            [
                mf.HookFunction(FC1, editing_function=doubled, save=False, groups=("edit", "steer")),
                mf.HookFunction(FC1, editing_function=negated, save=False, groups=("edit",), enabled=False),
            ],
            dumps=mf.Dump(folder / "dump", "decoder.layers.*:mid", groups=("dump",)),
        )
        self.said = io.StringIO()
        with contextlib.redirect_stderr(self.said):
            self.control = Control(self.flex, path, seconds=0.02)
        self.seen: list[tuple[list[bool], list[float]]] = []

    def step(self, *words: str) -> None:
        """One step; what was on in it, and its losses."""
        number = len(self.seen)
        with contextlib.redirect_stderr(self.said):
            self.control.step_begins(number)
        losses = gpt.step(self.case, self.chunks, 0)
        on = [any(e.hook is h for e in self.flex.session.registry.active) for h in self.hooks]
        self.seen.append((on, losses))

    @property
    def hooks(self) -> list[Any]:
        return [e.hook for e in self.flex.session.registry.entries]

    def write(self, content: bytes | None) -> None:
        """Change the file, on the first rank, and wait until it has been looked at; others go on."""
        if dist.get_rank() == 0:
            assert self.path is not None
            if content is None:
                self.path.unlink()
            else:
                written = self.path.with_suffix(".new")  # looks are too quick here for a file that grows
                written.write_bytes(content)
                written.replace(self.path)
            self.until(lambda: self.control.pending)

    @staticmethod
    def until(true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def end(self) -> dict[str, Any]:
        self.control.close()
        self.flex.restore()
        plain = gpt.step(self.case, self.chunks, 0)
        return {"seen": self.seen, "plain": plain, "said": self.said.getvalue().splitlines()}


ON, WAITS, DUMPED = [True, False, True], [False, True, False], [False, False, True]
CHANGES: list[tuple[bytes | None, list[bool], list[str]]] = [
    (b"-steer\n", DUMPED, ["edit 0 of 2, steer 0 of 1, all 1 of 3"]),
    (b"none\n+ste", DUMPED, ["'ste'", "steer"]),
    (b"none\n+steer", [True, False, False], ["edit 1 of 2, steer 1 of 1, dump 0 of 1, all 1 of 3"]),
    (b"\xff\x80\x00", [True, False, False], ["-dump"]),
    (b"# only\nnone +edit -steer\n", WAITS, ["on: steer 0 of 1, all 1 of 3"]),
    (None, WAITS, ["control-0"]),
    (b"all", [True, True, True], ["on: edit 2 of 2, steer 1 of 1, dump 1 of 1, all 3 of 3"]),
    (b"", ON, ["on: edit 1 of 2, all 2 of 3"]),
]


def by_file(case: Case, folder: Path) -> dict[str, Any]:
    loop = Loop(case, folder / f"control-{dist.get_rank()}", folder)  # the others have none: they ask nobody
    loop.step()
    for content, _, _ in CHANGES:
        loop.write(content)
        loop.step()
    return loop.end()


def test_a_file_that_changes_while_a_model_trains(tmp_path: Path) -> None:
    import megatron_flex as mf

    answers = run(2, by_file, PP2, tmp_path)
    wanted = [ON, *(on for _, on, _ in CHANGES)]
    for answer in answers:
        assert [on for on, _ in answer["seen"]] == wanted, "on all ranks from the same step on"
        assert (answer["said"] == []) == (answer is not answers[0])
    said = answers[0]["said"]
    assert said[0]
    for number, (line, (_, _, words)) in enumerate(zip(said[1:], CHANGES, strict=True), 1):
        assert line.startswith(f"megatron-flex: iteration {number}"), line
        for word in words:
            assert word in line, line
    losses = answers[1]["seen"]
    assert losses[1][1] == answers[1]["plain"], "no edit is on"
    assert losses[0][1] == losses[-1][1] != losses[1][1]
    dumped = mf.open_dump(tmp_path / "dump")
    assert [n for n, on in enumerate(wanted) if on[2]] == list(dumped.iterations)


def by_signal(case: Case, folder: Path) -> dict[str, Any]:
    rank, theirs = dist.get_rank(), []
    signal.signal(signal.SIGUSR1, lambda *_: theirs.append(rank))
    path = folder / "control"
    if rank == 0:
        path.write_text("-dump\n")
    loop = Loop(case, path if rank == 0 else folder / "elsewhere", folder)
    for on_ranks, number in (
        ((), None),
        ((1,), signal.SIGUSR1),
        ((), None),
        ((0, 1), signal.SIGUSR1),
        ((1,), signal.SIGUSR2),
    ):
        if rank in on_ranks:
            os.kill(os.getpid(), number)
        loop.step()
    out = loop.end()
    os.kill(os.getpid(), signal.SIGUSR1)  # the handler that was there before, and it alone
    return {**out, "theirs": len(theirs)}


def test_a_signal_to_one_rank(tmp_path: Path) -> None:
    first, second = run(2, by_signal, TP2, tmp_path, alone=True)
    on, out = [True, False, False], [False, False, False]
    for answer in (first, second):
        assert [states for states, _ in answer["seen"]] == [on, out, out, out, on]
        assert [losses == answer["plain"] for _, losses in answer["seen"]] == [False, True, True, True, False]
    assert (first["theirs"], second["theirs"]) == (2, 3)
    assert second["said"] == []
    begin, away, away_again, back = first["said"]
    assert "dump 0 of 1, all 1 of 3" in begin
    assert_names(away, "iteration 1", "SIGUSR1", "edit 0 of 2, steer 0 of 1, all 0 of 3")
    assert_names(away_again, "iteration 3", "SIGUSR1", "all 0 of 3")
    assert_names(back, "iteration 4", "SIGUSR2", "edit 1 of 2, steer 1 of 1, all 1 of 3")


def of_the_page(case: Case, chunks: list[Any], folder: Path) -> tuple[list[list[float]], str]:
    """The loop on the page, with an edit that waits to be switched on and a file that does."""
    from megatron_flex.launch.launch_settings import EditSettings, Settings

    text = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[-1], names)
    path, losses = folder / "page", []
    if dist.get_rank() == 0:
        path.write_text("+edit\n")
    edits = (EditSettings(edit="scale=0.5", site="decoder.layers.1:mid", enabled=False),)

    def schedule(batch: int) -> None:
        if batch == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        losses.append(gpt.step(case, chunks, 0))

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        settings = Settings(edits=edits, control=path, on_error="skip")
        names["train"](chunks, range(3), schedule, SimpleNamespace(step=lambda: None), settings)
    return [*losses, gpt.step(case, chunks, 0)], said.getvalue()


def at_the_start(case: Case, folder: Path) -> tuple[Any, ...]:
    """What cannot be is said by all ranks before any step; and what listening costs in each."""
    import megatron_flex as mf
    from megatron_flex.launch.hook_control import Control

    chunks = ranks.start(case)
    flex = mf.attach(chunks, [mf.HookFunction(FC1, groups="probe")])
    path = folder / f"control-{dist.get_rank()}"
    if dist.get_rank() == 0:
        path.write_text("+prob")
    said = ""
    try:
        Control(flex, path)
    except mf.FlexError as error:
        said = str(error)
    control = Control(flex)
    with ranks.counting() as counts:
        control.step_begins(0)
    control.close()
    flex.session.close()
    return said, sum(counts.values()), counts["all_reduce"], *of_the_page(case, chunks, folder)


def test_a_file_that_cannot_be_at_the_start_and_the_price_of_listening(tmp_path: Path) -> None:
    answers = run(2, at_the_start, TP2, tmp_path)
    for said, all_calls, reduces, losses, _ in answers:
        assert_names(said, "prob", "probe")
        assert (all_calls, reduces) == (1, 1)
        assert [found == losses[-1] for found in losses] == [False, False, True, True], "on, on, out"
    told = answers[0][-1].splitlines()
    assert_names(told[0], "edit 1 of 1", "all 1 of 1")
    assert_names(told[1], "iteration 2", "SIGUSR1", "edit 0 of 1")
    assert answers[1][-1] == ""


# -- errors before there is a model ----------------------------------------------------------------------


def failing_on(rank: int) -> tuple[str, str]:
    from megatron_flex.collectives import run_or_raise_on_all
    from megatron_flex.launch.rank_errors import job_mesh

    def act() -> int:
        if dist.get_rank() == rank:
            raise FlexError("no such file")
        return rank

    try:
        return "", str(run_or_raise_on_all(job_mesh(), act))
    except FlexError as error:
        return type(error).__name__, str(error)


def test_what_fails_on_one_rank_is_raised_on_all() -> None:
    elsewhere, here = run(2, failing_on, 1)
    assert here == ("FlexError", "no such file")
    assert elsewhere[0] == "FlexError"
    assert_names(elsewhere[1], "no such file", "rank 1")
    assert run(2, failing_on, 2) == [("", "2"), ("", "2")]
