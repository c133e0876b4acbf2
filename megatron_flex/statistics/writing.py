"""Where statistics go: to the files of the first rank, in the background, and to the framework's writers."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from megatron_flex.errors import FlexWarning
from megatron_flex.config import flex_config
from megatron_flex.statistics.files import StatisticsFile, create_file
from megatron_flex.statistics.header import StatisticsHeader
from megatron_flex.statistics.loggers import FindWriters, FrameworkLoggers, find_no_writers
from megatron_flex.statistics.measured import TensorStatistics
from megatron_flex.statistics.statistics_settings import Statistics

MOST_QUEUED = 64  # iterations that wait for the disk; more, and the model waits, too


def open_writers(statistics: Statistics, header: StatisticsHeader, first: bool, find: FindWriters = find_no_writers) -> StatisticsWriters:
    """Begin the file, where this is the `first` rank. Every rank calls it.

    Args:
        statistics: what is wanted.
        header: what the file says of the run.
        first: whether this rank writes the file.
        find: tells which writers the framework has on this rank; they may come later.

    Raises:
        FlexError: the file cannot be begun. It is raised on the rank that writes it.
    """
    file = create_file(Path(statistics.path), statistics.format, header) if first else None
    thread = None if file is None else StatisticsThread(file)
    return StatisticsWriters(thread, FrameworkLoggers(find) if statistics.writers else None)


class StatisticsWriters:
    """All that the statistics of a run are written to, as one rank sees it. Every rank makes one."""

    def __init__(self, thread: StatisticsThread | None, loggers: FrameworkLoggers | None) -> None:
        self._back, self._loggers = thread, loggers

    @property
    def wanted(self) -> bool:
        """Whether `write` does anything on this rank now."""
        return self._back is not None or (self._loggers is not None and self._loggers.wanted)

    @property
    def lost(self) -> int:
        """How many iterations could not be written to the file."""
        return 0 if self._back is None else self._back.lost

    def write(self, iteration: int, rows: Sequence[TensorStatistics]) -> None:
        """Write the rows of an iteration. No error is raised: the first one is a warning, all are counted."""
        if self._back is not None and rows:
            self._back.submit(list(rows))
            self._warn(self._back)
        if self._loggers is not None and rows:
            self._loggers.write(iteration, rows)

    def close(self) -> None:
        """Wait until everything is written, and close the file; again, it does nothing."""
        if self._back is not None:
            self._back.close()
            self._warn(self._back)

    def _warn(self, thread: StatisticsThread) -> None:
        while thread.failures:
            warnings.warn(thread.failures.popleft(), FlexWarning, stacklevel=3)


class StatisticsThread:
    """The thread that writes a file, and what waits for it.

    A disk that has taken nothing for `flex_config.dump_seconds` counts as stalled: nobody waits for it then.

    Attributes:
        file: what it writes.
        failures: what went wrong and has not been told; each kind once.
    """

    def __init__(self, file: StatisticsFile) -> None:
        self.file, self._dropped = file, 0
        self.failures: deque[str] = deque()
        self._told: set[str] = set()
        self._change = threading.Condition()
        self._queue: deque[list[TensorStatistics]] = deque()
        self._busy = self._closing = False
        self._moved = time.monotonic()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._at_exit: Any = Finalize(None, self.close, exitpriority=100)  # not in forked children

    @property
    def lost(self) -> int:
        """Iterations that are not in the file, and will not be."""
        return self._dropped + self.file.lost

    def submit(self, rows: list[TensorStatistics]) -> None:
        """Have the rows of an iteration written, in order."""
        if os.getpid() != self._process:
            return
        with self._change:
            if self._closing:
                return
            if not self._until(lambda: len(self._queue) < MOST_QUEUED):
                self._dropped += 1
                self._tell("stalled", _describe_stall())
                return
            self._queue.append(rows)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, name="megatron_flex statistics", daemon=True
                )
                self._thread.start()
            self._change.notify_all()

    def close(self) -> None:
        """Wait until everything is written, as long as the disk takes something."""
        if os.getpid() != self._process:
            return
        with self._change:
            if self._closing:
                return
            self._closing = True
            self._change.notify_all()
            if not self._until(lambda: not self._queue and not self._busy):
                self._dropped += len(self._queue) + 1
                self._tell("lost", _describe_stall())
                return
        self._at_exit.cancel()
        if self._thread is not None:
            self._thread.join()
        self._try(self.file.close)
        if self.lost:
            self._tell("lost", "the disk did not take them")

    def _until(self, ready: Callable[[], bool]) -> bool:
        """Wait; False if the disk is stalled. The lock is held."""
        while not ready():
            if self._busy and time.monotonic() - self._moved > flex_config.dump_seconds:
                return False
            self._change.wait(min(1.0, flex_config.dump_seconds))
        return True

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                rows, self._busy, self._moved = self._queue.popleft(), True, time.monotonic()
                self._change.notify_all()
            try:
                self._try(partial(self.file.write, rows))
            finally:
                with self._change:
                    self._busy = False
                    self._change.notify_all()

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # a full disk, a library's own: training goes on whatever it is
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._tell(f"{type(error).__name__} {getattr(error, 'errno', '')}", why)

    def _tell(self, kind: str, why: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self.failures.append(
                f"{self.file.path} cannot be written: {why}; so far {self.lost} iterations are lost, and "
                "those that follow are tried again"
            )


def _describe_stall() -> str:
    return f"the disk has taken nothing for {flex_config.dump_seconds:g} s"
