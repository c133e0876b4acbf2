"""Writers of statistics: files, in a thread of the first rank, and the framework's own loggers."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_flex.config import flex_config
from megatron_flex.errors import FlexWarning
from megatron_flex.statistics.statistics_files import StatisticsFile, create_file, trim_bins
from megatron_flex.statistics.statistics_records import (
    BINS_PER_SIGN,
    StatisticsHeader,
    TensorStatistics,
    compute_bin_edges,
)
from megatron_flex.statistics.statistics_settings import Statistics

if TYPE_CHECKING:
    from megatron_flex.adapters.adapter_base import TrainingWriters

LOGGED_STATISTICS = ("mean", "std", "rms", "absmax", "zeros", "kurtosis")
LOGGED_COUNTS = ("nans", "infinities")  # logged where there are any
LARGEST_FLOAT = sys.float_info.max  # where the outermost bins end, for writers that want numbers

FindWriters = Callable[[], "TrainingWriters | None"]  # finds the writers of this rank; None if it has none


def find_no_writers() -> None:
    """Return None, for a model without a framework."""


class FrameworkLoggers:
    """Writes rows to the framework's writers under `flex/SITE/STATISTIC`.

    The step number is the iteration plus one, as in Megatron's own curves: Megatron increments the iteration
    before it logs, and W&B merges later logs of the same step.
    """

    def __init__(self, find: FindWriters) -> None:
        self._find = find
        self._reported: set[str] = set()

    @property
    def reads_statistics(self) -> bool:
        """Whether this rank has a writer."""
        loggers = self._find()
        return loggers is not None and (loggers.tensorboard is not None or loggers.wandb is not None)

    def write(self, iteration: int, rows: Sequence[TensorStatistics]) -> None:
        """Write the rows of an iteration. An error in a writer becomes a warning, once for each kind."""
        loggers, step = self._find(), iteration + 1
        if loggers is None or step % loggers.every:
            return
        for writer, write in ((loggers.tensorboard, to_tensorboard), (loggers.wandb, to_wandb)):
            if writer is not None:
                self._try(write, writer, step, rows)

    def _try(self, write: Callable[[Any, int, Sequence[TensorStatistics]], None], *args: Any) -> None:
        try:
            write(*args)
        except Exception as error:  # a full disk, a service that is away: training goes on whatever it is
            kind = f"{write.__name__} {type(error).__name__}"
            if kind not in self._reported:
                self._reported.add(kind)
                content = f"statistics cannot be written {write.__name__.replace('_', ' ')}: {error}"
                warnings.warn(
                    f"{content}; training continues, and their file has them", FlexWarning, stacklevel=4
                )


def iterate_scalars(rows: Sequence[TensorStatistics]) -> Iterator[tuple[str, float]]:
    """Iterate over the scalars to log, by tag, including gradient norms and, if nonzero, counts of NaNs."""
    for row in rows:
        names = LOGGED_STATISTICS if row.kind == "value" else (*LOGGED_STATISTICS, "norm")
        for name in (*names, *(n for n in LOGGED_COUNTS if getattr(row, n))):
            value = getattr(row, name)
            if value is not None:
                yield f"flex/{row.site}/{name}", float(value)


def to_tensorboard(writer: Any, step: int, rows: Sequence[TensorStatistics]) -> None:
    """Write to a SummaryWriter: all scalars as one event, as one event each takes twenty times as long."""
    file = getattr(writer, "file_writer", None)
    if file is None:
        for tag, value in iterate_scalars(rows):
            writer.add_scalar(tag, value, step)
    else:
        proto = import_module("tensorboard.compat.proto.summary_pb2").Summary
        values = [proto.Value(tag=tag, simple_value=value) for tag, value in iterate_scalars(rows)]
        file.add_summary(proto(value=values), step)
    limits = _compute_finite_edges()
    for row in rows:
        first, counts = trim_bins(row.histogram)
        finite = row.count - row.nans - row.infinities
        if counts and row.absmax is not None and row.mean is not None and row.norm is not None:
            writer.add_histogram_raw(
                f"flex/{row.site}",
                min=max(-row.absmax, limits[first]),
                max=min(row.absmax, limits[first + len(counts)]),
                num=finite,
                sum=row.mean * finite,
                sum_squares=row.norm**2,
                bucket_limits=limits[first + 1 : first + 1 + len(counts)],
                bucket_counts=list(counts),
                global_step=step,
            )


def to_wandb(writer: Any, step: int, rows: Sequence[TensorStatistics]) -> None:
    """Log to W&B: one call, for the step that the framework logs next."""
    content: dict[str, Any] = dict(iterate_scalars(rows))
    limits, wandb = _compute_finite_edges(), import_module("wandb")
    for row in rows:
        first, counts = trim_bins(row.histogram)
        if counts:
            bounds = limits[first : first + len(counts) + 1]
            content[f"flex/{row.site}/histogram"] = wandb.Histogram(np_histogram=(list(counts), bounds))
    writer.log(content, step=step)


def _compute_finite_edges() -> list[float]:
    """The bounds of bins as writers want them: numbers that ascend, also where a bin is of zero alone."""
    out = [max(-LARGEST_FLOAT, min(LARGEST_FLOAT, edge)) for edge in compute_bin_edges()]
    out[BINS_PER_SIGN + 1] = sys.float_info.min
    return out


MAX_QUEUED = 64  # iterations that wait for the disk; more, and the model waits, too


def open_writers(
    statistics: Statistics, header: StatisticsHeader, first: bool, find: FindWriters = find_no_writers
) -> StatisticsWriters:
    """Open the file, on the `first` rank, and the framework's writers. Every rank calls it.

    Args:
        statistics: the settings.
        header: the header of the file.
        first: whether this rank writes the file.
        find: returns the framework's writers on this rank; they may be created later.

    Raises:
        FlexError: on the rank that writes the file: the file cannot be created.
    """
    file = create_file(Path(statistics.path), header) if first else None
    thread = None if file is None else StatisticsThread(file)
    return StatisticsWriters(thread, FrameworkLoggers(find) if statistics.writers else None)


class StatisticsWriters:
    """All writers of the statistics of a run on one rank. Every rank makes one."""

    def __init__(self, thread: StatisticsThread | None, loggers: FrameworkLoggers | None) -> None:
        self._back, self._loggers = thread, loggers

    @property
    def reads_statistics(self) -> bool:
        """Whether `write` does anything on this rank now."""
        return self._back is not None or (self._loggers is not None and self._loggers.reads_statistics)

    @property
    def lost(self) -> int:
        """The number of iterations that could not be written to the file."""
        return 0 if self._back is None else self._back.lost

    def write(self, iteration: int, rows: Sequence[TensorStatistics]) -> None:
        """Write the rows of an iteration. No error is raised: the first is a warning, and all are counted."""
        if self._back is not None and rows:
            self._back.submit(list(rows))
            self._warn(self._back)
        if self._loggers is not None and rows:
            self._loggers.write(iteration, rows)

    def close(self) -> None:
        """Wait until everything is written, and close the file; a second call does nothing."""
        if self._back is not None:
            self._back.close()
            self._warn(self._back)

    def _warn(self, thread: StatisticsThread) -> None:
        while thread.failures:
            warnings.warn(thread.failures.popleft(), FlexWarning, stacklevel=3)


class StatisticsThread:
    """The thread that writes a file, and its queue.

    A disk that has written nothing for `flex_config.dump_seconds` counts as stalled, and is not waited for.

    Attributes:
        file: the file.
        failures: failures that are not yet reported; each kind once.
    """

    def __init__(self, file: StatisticsFile) -> None:
        self.file, self._dropped = file, 0
        self.failures: deque[str] = deque()
        self._reported: set[str] = set()
        self._change = threading.Condition()
        self._queue: deque[list[TensorStatistics]] = deque()
        self._busy = self._closing = False
        self._moved = time.monotonic()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._at_exit: Any = Finalize(None, self.close, exitpriority=100)  # not in forked children

    @property
    def lost(self) -> int:
        """The number of iterations that are not in the file, and will not be."""
        return self._dropped + self.file.lost

    def submit(self, rows: list[TensorStatistics]) -> None:
        """Queue the rows of an iteration, to be written in order."""
        if os.getpid() != self._process:
            return
        with self._change:
            if self._closing:
                return
            if not self._until(lambda: len(self._queue) < MAX_QUEUED):
                self._dropped += 1
                self._report_once("stalled", _describe_stall())
                return
            self._queue.append(rows)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, name="megatron_flex statistics", daemon=True
                )
                self._thread.start()
            self._change.notify_all()

    def close(self) -> None:
        """Wait until everything is written, unless the disk is stalled."""
        if os.getpid() != self._process:
            return
        with self._change:
            if self._closing:
                return
            self._closing = True
            self._change.notify_all()
            if not self._until(lambda: not self._queue and not self._busy):
                self._dropped += len(self._queue) + 1
                self._report_once("lost", _describe_stall())
                return
        self._at_exit.cancel()
        if self._thread is not None:
            self._thread.join()
        self._try(self.file.close)
        if self.lost:
            self._report_once("lost", "the disk did not take them")

    def _until(self, ready: Callable[[], bool]) -> bool:
        """Wait; return False if the disk is stalled. The caller holds the lock."""
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
            self._report_once(f"{type(error).__name__} {getattr(error, 'errno', '')}", why)

    def _report_once(self, kind: str, why: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self.failures.append(
                f"{self.file.path} cannot be written: {why}; so far {self.lost} iterations are lost, and "
                "those that follow are tried again"
            )


def _describe_stall() -> str:
    return f"the disk has taken nothing for {flex_config.dump_seconds:g} s"
