"""A progress bar: tqdm's on stderr if stderr is a terminal, and no output otherwise.

The bar is drawn on the first rank only, once the work has taken AFTER seconds, and is removed when the work
ends or fails. Stdout is never written to. A failure to draw never stops the work.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TextIO, TypeVar

from megatron_flex.config import flex_config

AFTER = 0.5  # seconds of work before a bar is drawn: shorter work shows no bar
EVERY = 0.1  # seconds between two drawings
LOG_LINES = 10  # lines in total where stderr is not a terminal
BYTES = "B"  # the unit of bytes
ROWS = 20  # given to tqdm, which draws nothing on a terminal that reports 0 rows
BAR_FORMAT = "{desc} {bar:24} {percentage:3.0f}%{postfix} {remaining}"
BAR_FORMAT_WITHOUT_TOTAL = "{desc}{postfix} {elapsed}"
_stops: list[Callable[[], None]] = []  # functions that end other drawings on the terminal
_bar_lock = threading.Lock()  # held while a bar is open: a terminal shows one bar at a time

T = TypeVar("T")


class ProgressBar:
    """The progress of a piece of work; any thread may update it.

    Attributes:
        what: the work, such as `verifying`.
        total: the amount of work; None if unknown.
        unit: what is counted, `B` for bytes; empty for a fraction of the work.
        done: the amount that is done.
        more: the current part of the work.
    """

    def __init__(self, what: str, total: float | None = None, unit: str = "") -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.more = 0.0, ""
        self._drawing: Any = None  # a tqdm bar, or lines of a log; None where nothing is drawn
        self._lock = threading.Lock()

    def advance(self, count: float = 1, more: str | None = None) -> None:
        """Add `count` to the amount that is done."""
        with self._lock:
            self._set(self.done + count, self.total, more)

    def to(self, done: float, total: float | None = None, more: str | None = None) -> None:
        """Set the amount that is done."""
        with self._lock:
            self._set(done, self.total if total is None else total, more)

    def _set(self, done: float, total: float | None, more: str | None) -> None:
        self.done, self.total = done, total
        self.more = self.more if more is None else more
        if self._drawing is not None:
            try:
                self._drawing.follow(self)
            except Exception:  # a terminal that is gone must not stop the work
                self._end()

    def describe(self) -> str:
        """Return the progress as text: `3 of 10 sites`, `1.50 GiB of 3.00 GiB`."""
        if self.unit == BYTES:
            of = "" if self.total is None else f" of {format_bytes(self.total)}"
            amount = format_bytes(self.done) + of
        else:
            of = "" if self.total is None else f" of {self.total:,.0f}"
            amount = f"{self.done:,.0f}{of} {self.unit}".rstrip()
        return f"{amount} {self.more}".rstrip()

    def begin(self) -> None:
        """Draw the bar from now on, if this process draws bars."""
        file: TextIO | None = sys.stderr  # None in a process without one
        if file is None or flex_config.progress == 0 or not _is_first():
            return
        with suppress(Exception):  # as in `_set`
            if _is_terminal(file):
                self._drawing = _bar_class()(self, file)
            elif flex_config.progress > 0:
                self._drawing = LogLines(self, file)

    def end(self) -> None:
        """Remove the bar from the terminal."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            with suppress(Exception):  # as in `_set`
                drawing.close()


@contextmanager
def progress(what: str, total: float | None = None, unit: str = "") -> Iterator[ProgressBar]:
    """Show the progress of a piece of work. Communicates nothing; any rank may call it alone.

    Nothing is shown if stderr is not a terminal, on ranks other than the first, with FLEX_PROGRESS=0, or
    while another bar of this process is open. With FLEX_PROGRESS=1, a stderr that is not a terminal gets a
    few plain lines.

    Args:
        what: the work, such as `verifying`.
        total: the amount of work; None if unknown.
        unit: what is counted; `B` for bytes.
    """
    bar = ProgressBar(what, total, unit)
    if not _bar_lock.acquire(blocking=False):
        yield bar
        return
    try:
        bar.begin()
        yield bar
    finally:
        bar.end()
        _bar_lock.release()


@contextmanager
def stop_before_bars(stop: Callable[[], None]) -> Iterator[None]:
    """Call a function before a bar is drawn in the scope, such as one that ends a spinner.

    Args:
        stop: it may be called several times.
    """
    _stops.append(stop)
    try:
        yield
    finally:
        _stops.remove(stop)


def track(items: Iterable[T], what: str, total: float | None = None, unit: str = "") -> Iterator[T]:
    """Iterate over `items` and show the progress; if `items` has a length, the length is the total."""
    known = len(items) if total is None and isinstance(items, Sized) else total
    with progress(what, known, unit) as bar:
        for item in items:
            yield item
            bar.advance()


def _is_terminal(file: TextIO) -> bool:
    try:
        return file.isatty()
    except (OSError, ValueError):  # closed
        return False


def _count_columns(file: TextIO) -> int:
    """The columns of a terminal; 80 where it reports none."""
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _is_first() -> bool:
    """Whether this is the first rank, according to torch or to the launcher's environment."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()) == 0
    return os.environ.get("RANK", "") in ("", "0")


@cache
def _bar_class() -> Any:
    """The class of bars, made when the first is drawn: most processes need no tqdm."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        """A bar that follows a `ProgressBar`, below other output to stderr."""

        monitor_interval = 0  # seconds; 0 starts no thread

        def __init__(self, bar: ProgressBar, file: TextIO) -> None:
            self.file = file
            self.above: LinesAboveBar | None = None  # stderr, while the bar is on it
            super().__init__(
                desc=bar.what,
                file=file,
                delay=AFTER,
                mininterval=EVERY,
                miniters=0,
                ncols=_count_columns(file) - 1,
                nrows=ROWS,
                leave=False,
                bar_format=BAR_FORMAT_WITHOUT_TOTAL,
            )

        def follow(self, bar: ProgressBar) -> None:
            """Draw the amount that is done, if the last drawing is old enough."""
            self.n, self.total, self.ncols = bar.done, bar.total, _count_columns(self.file) - 1
            self.bar_format = BAR_FORMAT if bar.total else BAR_FORMAT_WITHOUT_TOTAL
            self.set_postfix_str(bar.describe(), refresh=False)
            self.update(0)

        def display(self, msg: str | None = None, pos: int | None = None) -> Any:
            """Draw the bar; before the first time, make room for it on the terminal."""
            if self.above is None:
                for stop in _stops:
                    stop()
                self.above = sys.stderr = LinesAboveBar(self.file, Bar)
            return super().display(msg, pos)

        def close(self) -> None:
            try:
                super().close()
            finally:
                above, self.above = self.above, None
                if above is not None and sys.stderr is above:
                    sys.stderr = self.file
                if above is not None:
                    above.write_rest()

    Bar.set_lock(threading.RLock())  # tqdm's own lock is shared with other processes
    return Bar


class LogLines:
    """Some lines that follow a `ProgressBar`, for a log, from which no bar can be removed."""

    def __init__(self, bar: ProgressBar, file: TextIO) -> None:
        self._file, self._next, self._last, self._bar = file, 0.0, "", bar
        self._begin = time.monotonic() + AFTER

    def follow(self, bar: ProgressBar) -> None:
        """Write a line, if the progress since the last line is large enough."""
        if bar.done >= self._next and time.monotonic() >= self._begin:
            self._next = bar.done + bar.total / LOG_LINES if bar.total else max(1.0, 2 * bar.done)
            self._write(bar)

    def close(self) -> None:
        """Write the last line, if others were written."""
        if self._last:
            self._write(self._bar)

    def _write(self, bar: ProgressBar) -> None:
        text = f"{bar.what}: {bar.describe()}\n"
        if text != self._last:
            self._last = text
            self._file.write(text)
            self._file.flush()


class LinesAboveBar:
    """Stderr while a bar is drawn on it: complete lines are written above the bar."""

    def __init__(self, file: TextIO, bars: Any) -> None:
        self._file, self._bars, self._rest = file, bars, ""

    def __getattr__(self, name: str) -> Any:
        """Anything else that the file has: `buffer`, `reconfigure`, `encoding`, `flush`."""
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write the lines that are complete, and keep the rest."""
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._bars.write(lines, file=self._file)
        return len(text)

    def write_rest(self) -> None:
        """Write the last line if no newline has ended it."""
        rest, self._rest = self._rest, ""
        if rest:
            self._file.write(rest)
            self._file.flush()


def format_bytes(count: float) -> str:
    """A number of bytes, such as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} PiB"
