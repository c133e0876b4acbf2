"""How far long work is: seen in a terminal, gone when it is over, and nowhere else."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_flex import cli, progress
from megatron_flex.config import flex_config
from megatron_flex.dump.writer import writer_threads
from megatron_flex.dump.writer.part_writer import PartDraft
from megatron_flex.progress import BYTES, ProgressBar, track
from tests.support import dumps, measured
from tests.support.dumps import COLUMN, Given, random
from tests.support.terminals import Terminal, screen, terminal

ROOT = Path(__file__).parents[3]
WAYS = ("rich", "plain")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is drawn, and nothing of the environment says otherwise."""
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(flex_config, "progress", -1)
    for name in ("RANK", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, way: str = "rich") -> Iterator[Terminal]:
    """Stderr is a terminal."""
    with terminal() as one, monkeypatch.context() as patch:
        if way == "plain":
            patch.setitem(sys.modules, "rich", None)  # as where it is not installed
            patch.setitem(sys.modules, "rich.console", None)
        patch.setattr(sys, "stderr", one.file)
        yield one


@contextmanager
def piped(monkeypatch: pytest.MonkeyPatch, into: Path) -> Iterator[None]:
    """Stderr is a file."""
    with into.open("w", encoding="utf-8") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        yield


def work(steps: int = 4, do: Callable[[], object] = lambda: None) -> ProgressBar:
    with progress.progress("comparing", steps, "sites") as bar:
        for number in range(steps):
            bar.advance(1, f"layer <{number}> [b]")
            do()
    return bar


@pytest.mark.parametrize("way", WAYS)
def test_a_bar_is_drawn_and_gone(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    with watched(monkeypatch, way) as seen:
        print("before", file=sys.stderr)
        bar = work()
        print("after", file=sys.stderr)
    assert bar.done == 4
    for number in range(4):
        assert f"{number + 1} of 4 sites layer <{number}> [b]" in seen.written
    assert "comparing" in seen.written
    assert seen.screen == ["before", "after"]
    assert seen.cursor_is_seen
    assert "█" in seen.written


def test_what_is_printed_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen:
        work(3, lambda: print("a warning", file=sys.stderr))
    assert seen.screen == ["a warning"] * 3


def test_a_line_that_is_not_complete_is_written_when_the_bar_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen:
        work(3, lambda: sys.stderr.write("a part, "))
        print("the end", file=sys.stderr)
    assert seen.screen == ["a part, a part, a part, the end"]


def test_stderr_has_what_it_has_without_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code writes bytes to `sys.stderr.buffer`, or sets how the stream encodes, at any time."""
    names = [
        "buffer",
        "encoding",
        "errors",
        "newlines",
        "name",
        "mode",
        "line_buffering",
        "write_through",
        "closed",
    ]
    with watched(monkeypatch) as seen:
        file = sys.stderr

        def use() -> None:
            assert sys.stderr is not file
            assert [getattr(sys.stderr, n) for n in names] == [getattr(file, n) for n in names]
            sys.stderr.reconfigure(errors="backslashreplace")
            assert file.errors == sys.stderr.errors == "backslashreplace"
            sys.stderr.buffer.write(b"")
            assert not hasattr(sys.stderr, "no_such_attribute")

        work(3, use)
        assert sys.stderr is file
    assert seen.cursor_is_seen


def test_a_bar_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch):
        before = set(threading.enumerate())  # one of another test may end meanwhile
        work(2, lambda: None)
        with progress.progress("comparing", 2) as bar:
            bar.advance()
            assert set(threading.enumerate()) <= before


def test_stdout_is_never_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with watched(monkeypatch):
        own = sys.stdout
        work(2, lambda: print("data", sys.stdout is own))
    assert capsys.readouterr().out == "data True\n" * 2


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_shown_of_what_is_soon_over(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(progress, "AFTER", 3600.0)
    with watched(monkeypatch, way) as seen:
        work()
    assert seen.written == ""


def test_nothing_at_all_is_written_where_no_person_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with piped(monkeypatch, tmp_path / "err"):
        work()
    assert (tmp_path / "err").read_text() == ""


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_config, "progress", 0)
    with watched(monkeypatch) as seen:
        work()
    assert seen.written == ""


def test_on_without_a_terminal_gives_a_few_plain_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flex_config, "progress", 1)
    with piped(monkeypatch, tmp_path / "err"):
        with progress.progress("verifying", 1 << 20, BYTES) as bar:
            for _ in range(1 << 10):
                bar.advance(1 << 10)
        for _ in track(iter(range(100)), "reading", unit="lines"):
            pass
        monkeypatch.setattr(progress, "AFTER", 3600.0)
        work()
    told = (tmp_path / "err").read_text().splitlines()
    assert told[0] == "verifying: 1.00 KiB of 1.00 MiB"
    assert any("1.00 MiB of 1.00 MiB" in line for line in told)
    assert told[-1] == "reading: 100 lines"
    assert len(told) < 25
    assert all(line.isprintable() for line in told)


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with watched(monkeypatch) as seen:
            work()
        shown["launched", rank] = seen.written != ""
        monkeypatch.delenv("RANK")
        with monkeypatch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, "get_rank", lambda rank=rank: int(rank))
            with watched(monkeypatch) as seen:
                work()
        shown["initialized", rank] = seen.written != ""
    assert shown == {
        ("launched", "0"): True,
        ("initialized", "0"): True,
        ("launched", "1"): False,
        ("initialized", "1"): False,
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch, way: str, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("the work failed")

    with watched(monkeypatch, way) as seen:
        own = sys.stderr
        with pytest.raises(error, match=r"^the work failed$"):
            work(4, fail)
        assert sys.stderr is own
        work(2)
    assert "1 of 4 sites" in seen.written
    assert "2 of 2 sites" in seen.written, "the next bar is drawn again"
    assert seen.screen == []
    assert seen.cursor_is_seen


def test_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen, progress.progress("outer", 2) as outer:
        for _ in range(2):
            work()
            outer.advance()
    assert "2 of 2" in seen.written
    assert "comparing" not in seen.written


def test_threads_may_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen:
        with progress.progress("writing", 800) as bar:
            threads = [threading.Thread(target=lambda: [bar.advance() for _ in range(100)]) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        bar.advance()  # somebody who is late
    assert bar.done == 801
    assert seen.screen == []


def test_a_terminal_that_is_gone_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError("input/output error")

        flush = write

    for way in WAYS:
        with watched(monkeypatch, way):
            gone = Gone()
            monkeypatch.setattr(sys, "stderr", gone)
            assert work().done == 4
            assert sys.stderr is gone
    monkeypatch.setattr(sys, "stderr", None)
    assert work().done == 4


def test_what_is_not_finished_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as seen:
        several = track(range(10), "reading")
        assert [next(several), next(several)] == [0, 1]
        several.close()  # type: ignore[attr-defined]
        work()
    assert "1 of 10" in seen.written
    assert "4 of 4 sites" in seen.written
    assert seen.screen == []


LONG = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background shells let it be ignored
from megatron_flex import progress
progress.AFTER = progress.EVERY = 0
with progress.progress("comparing", 3, "sites") as bar:
    bar.advance()
    print("ready", flush=True)
    time.sleep(600)
"""


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    with terminal() as seen:
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FLEX_PROGRESS", "RANK")}
        environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [sys.executable, "-c", LONG], stdout=subprocess.PIPE, stderr=seen.file, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGINT)
            try:
                try:
                    status = process.wait(20)
                except subprocess.TimeoutExpired:  # Python drops an interrupt that arrives in a finalizer
                    process.send_signal(signal.SIGINT)
                    status = process.wait(40)
                assert status in (-signal.SIGINT, 130)
            finally:
                process.kill()
    assert "1 of 3 sites" in seen.written
    assert not any("sites" in line for line in seen.screen)
    assert seen.screen[-1] == "KeyboardInterrupt"
    assert seen.cursor_is_seen


def test_the_screen_of_a_terminal() -> None:
    assert screen("one\r\ntwo\x1b[1mbold\x1b[0m\r\x1b[2Kthree\r\n") == ["one", "three"]
    assert screen("abc\rx\r\n\x1b[1A\x1b[2K") == []
    with pytest.raises(AssertionError):
        screen("\x1b[5X")


# -- who shows how far it is -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        sites = {f"decoder.layers.{n}:output": Given(random(2, 2, 4, 8, seed=n), COLUMN) for n in range(3)}
        dumps.write(tmp_path / name, sites, mesh={"tp": 2}, replicas=True)
    measured.write(tmp_path / "statistics", range(20))
    return tmp_path


COMMANDS = {
    "dump ls": ["dump", "ls", "a"],
    "dump show": ["dump", "show", "a", "decoder.layers.0:output"],
    "dump verify": ["dump", "verify", "a"],
    "dump export": ["dump", "export", "a", "out", "--force"],
    "compare": ["compare", "a", "b"],
    "stats ls": ["stats", "ls", "statistics"],
}


@pytest.mark.parametrize("what", COMMANDS)
def test_commands_show_how_far_they_are_beside_their_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, what: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["megatron-flex", *COMMANDS[what], "--json"])
    told = []
    for drawn in (True, False):
        monkeypatch.setattr(flex_config, "progress", -1 if drawn else 0)
        with watched(monkeypatch) as seen, pytest.raises(SystemExit):
            cli.main()
        assert ("%" in seen.written) is drawn
        assert seen.screen == []
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]


def test_making_a_page_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["megatron-flex", "view", "a", "--out", "page.html"])
    with watched(monkeypatch) as seen, pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "%" in seen.written
    assert seen.screen == []


def test_a_dump_shows_what_is_still_to_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[tuple[float, float | None]] = []
    asked = threading.Event()
    write = writer_threads.write_part

    class Asked(ProgressBar):
        def to(self, done: float, total: float | None = None, more: str | None = None) -> None:
            told.append((done, self.total))
            asked.set()

    @contextmanager
    def watching(what: str, total: float | None = None, unit: str = "") -> Iterator[ProgressBar]:
        yield Asked(what, total, unit)

    def slow(*args: Any) -> PartDraft:
        assert asked.wait(60)
        return write(*args)

    monkeypatch.setattr(writer_threads, "write_part", slow)
    monkeypatch.setattr(writer_threads, "progress", watching)
    dumps.write(tmp_path / "dump", {"decoder.layers.0:output": Given(random(1, 2, 4, 8))})
    assert told[0][0] == 0
    assert told[0][1]
    assert told[-1][0] <= told[0][1]


def test_a_spinner_is_on_a_terminal_only_and_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    from megatron_flex.cli.spinner import spinner

    monkeypatch.setenv("TERM", "xterm-256color")
    with terminal() as shown:
        monkeypatch.setattr(sys, "stderr", shown.file)
        with pytest.raises(KeyError), spinner("loading"):
            raise KeyError
    assert "loading" in shown.written
    assert shown.cursor_is_seen
    silent = io.StringIO()
    monkeypatch.setattr(sys, "stderr", silent)
    with spinner("loading"):
        pass
    assert silent.getvalue() == ""
