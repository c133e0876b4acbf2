"""How far something long has come: a bar on stderr where a person looks, and nothing anywhere else.

It is drawn on the first rank only, once the work has gone on for AFTER seconds, and is gone when the work
ends, however it ends. Stdout is never written to. What cannot be drawn never stops the work.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO, TypeVar

from megatron_flex.config import flex_config

AFTER = 0.5  # seconds of work before a bar is drawn: what is over sooner shows none
EVERY = 0.1  # seconds between two drawings
LOG_LINES = 10  # lines that are written in all where there is no terminal to draw on
BYTES = "B"  # the unit of bytes
_bar_lock = threading.Lock()  # held while a bar is open: a terminal has room for one

T = TypeVar("T")


class ProgressBar:
    """What is told how far the work is; any thread may tell it.

    Attributes:
        what: is done.
        total: how much there is to do; None where nobody knows.
        unit: what is counted, `B` for bytes; empty for parts of the whole.
        done: how much is done.
        more: what is under way.
        shown: where it is shown; None where it is not.
    """

    def __init__(self, what: str, total: float | None = None, unit: str = "") -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.more = 0.0, ""
        self.shown: SafeDrawing | None = None
        self._lock = threading.Lock()

    def advance(self, count: float = 1, more: str | None = None) -> None:
        """So much more is done."""
        with self._lock:
            self.done += count
            self.more = self.more if more is None else more
        if self.shown is not None:
            self.shown.moved(self)

    def to(self, done: float, total: float | None = None, more: str | None = None) -> None:
        """So much is done, in all."""
        with self._lock:
            self.done = done
            self.total = self.total if total is None else total
            self.more = self.more if more is None else more
        if self.shown is not None:
            self.shown.moved(self)

    def describe(self) -> str:
        """How far it is, in words: `3 of 10 sites`, `1.50 GiB of 3.00 GiB`."""
        if self.unit == BYTES:
            of = "" if self.total is None else f" of {format_bytes(self.total)}"
            told = format_bytes(self.done) + of
        else:
            of = "" if self.total is None else f" of {self.total:,.0f}"
            told = f"{self.done:,.0f}{of} {self.unit}".rstrip()
        return f"{told} {self.more}".rstrip()


class BarDrawing(Protocol):
    """A bar as it is shown."""

    def draw(self, bar: ProgressBar) -> None:
        """Show how far it is."""
        ...

    def end(self, bar: ProgressBar) -> None:
        """Nothing more comes: leave the terminal as it was."""
        ...


@contextmanager
def progress(what: str, total: float | None = None, unit: str = "") -> Iterator[ProgressBar]:
    """Show how far a piece of work is. Communicates nothing; any rank may call it alone.

    Nothing is shown where stderr is no terminal, on other ranks than the first, with FLEX_PROGRESS=0, or
    while another bar of this process is open. With FLEX_PROGRESS=1 what is no terminal gets a few
    plain lines.

    Args:
        what: is done, such as `verifying`.
        total: how much there is to do; None where nobody knows.
        unit: what is counted; `B` for bytes.
    """
    bar = ProgressBar(what, total, unit)
    if not _bar_lock.acquire(blocking=False):
        yield bar
        return
    try:
        shown = _choose_drawing()
        bar.shown = None if shown is None else SafeDrawing(shown)
        yield bar
    finally:
        try:
            if bar.shown is not None:
                bar.shown.end(bar)
        finally:
            _bar_lock.release()


def track(items: Iterable[T], what: str, total: float | None = None, unit: str = "") -> Iterator[T]:
    """Give what is in `items`, and show how far that is; where they have a length it is the total."""
    known = len(items) if total is None and isinstance(items, Sized) else total
    with progress(what, known, unit) as bar:
        for item in items:
            yield item
            bar.advance()


class SafeDrawing:
    """Draws now and then, whoever tells; what goes wrong in it ends the drawing, and not the work."""

    def __init__(self, drawing: BarDrawing) -> None:
        self._drawing: BarDrawing | None = drawing
        self._next = time.monotonic() + AFTER
        self._lock = threading.Lock()

    def moved(self, bar: ProgressBar) -> None:
        """The bar has come further."""
        now = time.monotonic()
        if now < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = now + EVERY
            self._try(bar, lambda drawing: drawing.draw(bar))
        finally:
            self._lock.release()

    def end(self, bar: ProgressBar) -> None:
        """Nothing more comes."""
        with self._lock:
            self._try(bar, lambda drawing: drawing.end(bar))
            self._drawing = None

    def _try(self, bar: ProgressBar, do: Callable[[BarDrawing], None]) -> None:
        drawing = self._drawing
        if drawing is None:
            return
        try:
            do(drawing)
        except Exception:  # a terminal that is gone: the work goes on
            self._drawing = None
            with suppress(Exception):  # stderr as it was, if no more
                drawing.end(bar)


def _choose_drawing() -> BarDrawing | None:
    """How this process shows bars; None if it does not."""
    file: TextIO | None = sys.stderr  # None in a process without one
    if file is None or flex_config.progress == 0 or not _is_first():
        return None
    if not _is_terminal(file):
        return LogDrawing(file) if flex_config.progress > 0 else None
    try:
        return Rich(file)
    except ImportError:
        return Line(file)


def _is_terminal(file: TextIO) -> bool:
    try:
        return file.isatty()
    except (OSError, ValueError):  # closed
        return False


def _is_first() -> bool:
    """Whether this is the first rank, as torch says, or who launched it."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()) == 0
    return os.environ.get("RANK", "") in ("", "0")


class Rich:
    """A bar by rich, below what is printed to stderr meanwhile.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(
            *columns,
            console=Console(file=file),
            transient=True,
            auto_refresh=False,  # no thread: it is drawn by who tells
            redirect_stdout=False,  # which may be a file or a pipe
        )
        self._task: Any = None

    def draw(self, bar: ProgressBar) -> None:
        """Show how far it is."""
        if self._task is None:
            self._task = self._progress.add_task(bar.what, total=bar.total, told="")
            self._progress.start()
        self._progress.update(
            self._task, completed=bar.done, total=bar.total, told=bar.describe(), refresh=True
        )

    def end(self, bar: ProgressBar) -> None:
        """Take it away."""
        if self._task is not None:
            self._progress.stop()


class Line:
    """A line of text that is written over and over."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._wide = file, 0

    def draw(self, bar: ProgressBar) -> None:
        """Show how far it is."""
        wide = max(20, _terminal_columns(self._file) - 1)
        self._write(f"{bar.what}: {bar.describe()}"[:wide])

    def end(self, bar: ProgressBar) -> None:
        """Take it away."""
        if self._wide:
            self._write("")
            self._file.write("\r")
            self._file.flush()

    def _write(self, text: str) -> None:
        self._file.write("\r" + text.ljust(self._wide))
        self._file.flush()
        self._wide = len(text)


class LogDrawing:
    """A line now and then, for a log."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._next, self._last = file, 0.0, ""

    def draw(self, bar: ProgressBar) -> None:
        """Write a line if enough more is done."""
        if bar.done >= self._next:
            self._next = bar.done + bar.total / LOG_LINES if bar.total else max(1.0, 2 * bar.done)
            self._write(bar)

    def end(self, bar: ProgressBar) -> None:
        """Write the last one, where there are others."""
        if self._last:
            self._write(bar)

    def _write(self, bar: ProgressBar) -> None:
        text = f"{bar.what}: {bar.describe()}\n"
        if text != self._last:
            self._last = text
            self._file.write(text)
            self._file.flush()


def _terminal_columns(file: TextIO) -> int:
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def format_bytes(count: float) -> str:
    """A number of bytes, such as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} PiB"
