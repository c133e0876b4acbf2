"""A progress bar: tqdm's on stderr if stderr is a terminal, and no output otherwise.

The bar is drawn on the first rank only, once the work has taken AFTER seconds, and is removed when the work
ends or fails. Stdout is never written to. A failure to draw never stops the work.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol, TextIO, TypeVar

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
        shown: draws the bar; None if nothing is drawn.
    """

    def __init__(self, what: str, total: float | None = None, unit: str = "") -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.more = 0.0, ""
        self.shown: SafeDrawing | None = None
        self._lock = threading.Lock()

    def advance(self, count: float = 1, more: str | None = None) -> None:
        """Add `count` to the amount that is done."""
        with self._lock:
            self.done += count
            self.more = self.more if more is None else more
        if self.shown is not None:
            self.shown.moved(self)

    def to(self, done: float, total: float | None = None, more: str | None = None) -> None:
        """Set the amount that is done."""
        with self._lock:
            self.done = done
            self.total = self.total if total is None else total
            self.more = self.more if more is None else more
        if self.shown is not None:
            self.shown.moved(self)

    def describe(self) -> str:
        """Return the progress as text: `3 of 10 sites`, `1.50 GiB of 3.00 GiB`."""
        if self.unit == BYTES:
            of = "" if self.total is None else f" of {format_bytes(self.total)}"
            amount = format_bytes(self.done) + of
        else:
            of = "" if self.total is None else f" of {self.total:,.0f}"
            amount = f"{self.done:,.0f}{of} {self.unit}".rstrip()
        return f"{amount} {self.more}".rstrip()


class BarDrawing(Protocol):
    """Draws a bar."""

    def draw(self, bar: ProgressBar) -> None:
        """Draw the progress."""
        ...

    def end(self, bar: ProgressBar) -> None:
        """Remove the drawing and restore the terminal."""
        ...


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
        shown = _choose_drawing()
        bar.shown = None if shown is None else SafeDrawing(shown)
        yield bar
    finally:
        try:
            if bar.shown is not None:
                bar.shown.end(bar)
        finally:
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


class SafeDrawing:
    """Draws at intervals, from any thread; an error in a drawing ends the drawing, not the work."""

    def __init__(self, drawing: BarDrawing) -> None:
        self._drawing: BarDrawing | None = drawing
        self._next = time.monotonic() + AFTER
        self._lock = threading.Lock()

    def moved(self, bar: ProgressBar) -> None:
        """Draw the bar if the last drawing is old enough."""
        now = time.monotonic()
        if now < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = now + EVERY
            self._try(bar, lambda drawing: drawing.draw(bar))
        finally:
            self._lock.release()

    def end(self, bar: ProgressBar) -> None:
        """End the drawing."""
        with self._lock:
            self._try(bar, lambda drawing: drawing.end(bar))
            self._drawing = None

    def _try(self, bar: ProgressBar, do: Callable[[BarDrawing], None]) -> None:
        drawing = self._drawing
        if drawing is None:
            return
        try:
            do(drawing)
        except Exception:  # a terminal that is gone must not stop the work
            self._drawing = None
            with suppress(Exception):  # restores stderr at least
                drawing.end(bar)


def _choose_drawing() -> BarDrawing | None:
    """How this process draws bars; None if it draws none."""
    file: TextIO | None = sys.stderr  # None in a process without one
    if file is None or flex_config.progress == 0 or not _is_first():
        return None
    if not _is_terminal(file):
        return LogDrawing(file) if flex_config.progress > 0 else None
    return TqdmDrawing(file)


def _is_terminal(file: TextIO) -> bool:
    try:
        return file.isatty()
    except (OSError, ValueError):  # closed
        return False


def _is_first() -> bool:
    """Whether this is the first rank, according to torch or to the launcher's environment."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()) == 0
    return os.environ.get("RANK", "") in ("", "0")


@cache
def _make_bar_class() -> Any:
    """Make a class of tqdm bars that starts no thread and makes no lock between processes."""
    from tqdm import tqdm

    kind: Any = type("FlexBar", (tqdm,), {"monitor_interval": 0})
    kind.set_lock(threading.RLock())
    return kind


class TqdmDrawing:
    """A tqdm bar, below other output to stderr."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._bar: Any = None
        self._stderr: LinesAboveBar | None = None

    def draw(self, bar: ProgressBar) -> None:
        """Draw the progress."""
        if self._bar is None:
            for stop in _stops:
                stop()
            self._stderr = LinesAboveBar(self._file)
            sys.stderr = self._stderr
            self._bar = _make_bar_class()(
                desc=bar.what,
                initial=bar.done,
                total=bar.total,
                postfix=bar.describe(),
                file=self._file,
                bar_format=BAR_FORMAT if bar.total else BAR_FORMAT_WITHOUT_TOTAL,
                leave=False,
                ncols=_terminal_columns(self._file) - 1,
                nrows=ROWS,
            )
            return
        self._bar.ncols = _terminal_columns(self._file) - 1
        self._bar.n, self._bar.total = bar.done, bar.total
        self._bar.bar_format = BAR_FORMAT if bar.total else BAR_FORMAT_WITHOUT_TOTAL
        self._bar.set_postfix_str(bar.describe())

    def end(self, bar: ProgressBar) -> None:
        """Remove the bar."""
        stderr, self._stderr = self._stderr, None
        if stderr is not None and sys.stderr is stderr:
            sys.stderr = self._file
        try:
            if self._bar is not None:
                self._bar.close()
        finally:
            if stderr is not None:
                stderr.write_rest()


class LinesAboveBar(io.TextIOBase):
    """Stderr while a bar is drawn on it: complete lines are written above the bar."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._rest = file, ""

    def __getattr__(self, name: str) -> Any:
        """Anything else that the file has: `buffer`, `reconfigure`, `name`, `line_buffering`."""
        if name.startswith("_"):  # while the object is made
            raise AttributeError(name)
        return getattr(self._file, name)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """How the file encodes what its encoding lacks."""
        return self._file.errors

    @property
    def newlines(self) -> Any:  # type: ignore[override]
        """The newlines that the file translates."""
        return self._file.newlines

    @property
    def encoding(self) -> str:  # type: ignore[override]  # nobody sets it, and C's attribute cannot be set
        """The encoding of the file."""
        return self._file.encoding

    def isatty(self) -> bool:
        """Always true, as bars are drawn on terminals only."""
        return True

    def fileno(self) -> int:
        """The file descriptor of the file."""
        return self._file.fileno()

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, text: str) -> int:
        """Write the lines that are complete, and keep the rest."""
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            with _make_bar_class().external_write_mode(self._file):
                self._file.write(lines + newline)
        return len(text)

    def write_rest(self) -> None:
        """Write the last line if no newline has ended it."""
        rest, self._rest = self._rest, ""
        if rest:
            self._file.write(rest)
            self._file.flush()

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


class LogDrawing:
    """Writes a line at intervals, for a log."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._next, self._last = file, 0.0, ""

    def draw(self, bar: ProgressBar) -> None:
        """Write a line if the progress since the last line is large enough."""
        if bar.done >= self._next:
            self._next = bar.done + bar.total / LOG_LINES if bar.total else max(1.0, 2 * bar.done)
            self._write(bar)

    def end(self, bar: ProgressBar) -> None:
        """Write the last line, if others were written."""
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
