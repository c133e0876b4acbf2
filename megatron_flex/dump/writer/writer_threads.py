"""The threads of a rank that write parts to disk.

Each part is a file that one thread writes: Linux lets only one thread at a time write to a file. Two threads
that write to one file take as long as one thread, which takes 1.7 times as long as two that write to two.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_flex.config import flex_config
from megatron_flex.dump.writer.host_buffers import HostBuffers
from megatron_flex.dump.writer.part_writer import (
    PartDraft,
    PendingIteration,
    PendingPart,
    sync_folder,
    write_part,
)
from megatron_flex.dump.writer.writers_lock import WritersLock
from megatron_flex.errors import DumpError
from megatron_flex.progress import BYTES, progress

MAX_THREADS = 2  # that write at the same time: the model needs cores too
LOG = logging.getLogger("megatron_flex.dump")
LOG_SECONDS = 10.0  # seconds between two words on progress


@dataclass(slots=True)
class WriteTally:
    """What became of a rank's iterations.

    Attributes:
        written: iterations of which this rank has written its whole part.
        dropped: iterations that were dropped because the disk was too slow.
        failed: iterations that could not be written.
        nbytes: of tensors in parts that are on disk, later removed ones among them.
        waited: seconds for which the model waited for the disk.
        wrote: seconds for which a thread was at work.
    """

    written: int = 0
    dropped: int = 0
    failed: int = 0
    nbytes: int = 0
    waited: float = 0.0
    wrote: float = 0.0

    def __str__(self) -> str:
        rate = f" at {self.nbytes / self.wrote / 1e6:.0f} MB/s" if self.wrote else ""
        return (
            f"{self.written} iterations ({self.nbytes / 1e6:.1f} MB{rate}) written, {self.dropped} dropped, "
            f"{self.failed} failed; the model waited {self.waited:.1f} s for the disk"
        )


class WriterThreads:
    """The threads of a writer, which are daemons, and their queue.

    At the end of the process, they have as long as they make progress. A disk that has taken nothing for
    `flex_config.dump_seconds` counts as stalled; then no rank waits for it.

    Attributes:
        folder: of the run.
        tally: what became of the iterations.
        buffers: the memory of tensors until they are written; used with `change` locked.
        failures: kind and error of each failure that is not yet reported.
    """

    def __init__(
        self, folder: Path, most: int, durable: bool, logs_progress: bool, stops: bool = False
    ) -> None:
        self.folder, self.durable, self.logs_progress, self.stops = folder, durable, logs_progress, stops
        self.tally, self.buffers = WriteTally(), HostBuffers(most)
        self.failures: deque[tuple[str, DumpError]] = deque()
        self.change = threading.Condition()
        self._queue: deque[PendingPart | PendingIteration] = deque()
        self._closing = False
        self._active: list[PendingPart | PendingIteration] = []
        self._moved = self._began = self._logged_at = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self._open: PendingIteration | None = None
        self._at_exit: Any = None
        self._lock = WritersLock(folder)

    @property
    def is_forked_child(self) -> bool:
        """Whether this is a forked child, which has no thread and must not write, nor wait for a lock."""
        return os.getpid() != self._process

    @property
    def stalled(self) -> bool:
        """Whether the disk takes nothing."""
        return bool(self._active) and time.monotonic() - self._moved > flex_config.dump_seconds

    def note_open(self, running: PendingIteration | None) -> None:
        """Note the iteration that is under way, to remove it should the process end before it does."""
        self._open = running

    def fits(self, size: int) -> bool:
        """Whether so much more may be held now."""
        with self.change:
            return self.buffers.fits(size)

    def reserve(self, size: int) -> bool:
        """Wait until so much more may be held; False if the disk is stalled."""
        if self.fits(size):
            return True
        began = time.monotonic()
        has_room = self._wait_until(lambda: self.buffers.fits(size))
        self.tally.waited += time.monotonic() - began
        return has_room

    def buffer(self, size: int, pinned: bool) -> Tensor:
        """A buffer for which there is room."""
        with self.change:
            return self.buffers.take(size, pinned)

    def keep(self, size: int) -> None:
        """Count a tensor that is kept as it is."""
        with self.change:
            self.buffers.hold(size)

    def release(self, part: PendingPart) -> None:
        """Forget a part's tensors."""
        with self.change:
            for buffer, pinned in part.buffers:
                self.buffers.give_back(buffer, pinned)
            self.buffers.hold(-part.kept)
            self.change.notify_all()
        part.tensors, part.buffers, part.rest, part.kept = [], [], {}, 0

    def submit(self, item: PendingPart | PendingIteration) -> None:
        """Write a part; or remove what is on disk of an iteration."""
        with self.change:
            self._queue.append(item)
            self._start()
            self.change.notify_all()

    def fail(self, running: PendingIteration, error: BaseException) -> None:
        """Mark an iteration as failed, and queue its error for the report."""
        with self.change:
            if running.dead:
                return
            running.dead = True
            self.tally.failed += 1
        if isinstance(error, DumpError):
            kind, why = str(error), str(error)
        else:
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        then = "the run stops" if self.stops else "those that follow are tried again"
        failure = DumpError(
            f"{self.folder / running.folder} cannot be written: {why}; the iteration is absent, and {then}",
            path=self.folder / running.folder,
        )
        failure.__cause__ = error
        self.failures.append((kind, failure))

    def close(self) -> bool:
        """Wait until everything is written; returns whether it is, which it is not where the disk stalls."""
        if self.is_forked_child:
            return True
        with self.change:
            self._closing = True
            if self._open is not None and not self._open.dead:
                self._open.dead = True
                self._queue.append(self._open)
                self._start()
            self._open = None
            self.change.notify_all()
        pending_bytes = self.buffers.held
        with progress("writing the dump", pending_bytes, BYTES) as bar:
            done = self._wait_until(
                lambda: not self._queue and not self._active,
                lambda: bar.to(pending_bytes - self.buffers.held),
            )
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        if done:
            for thread in self._threads:
                thread.join()
            with self.change:
                self.buffers.clear()
            self._lock.release()
        return done

    # -- the threads -----------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin threads for what the queue has, again if they died. The lock is held."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        most = min(MAX_THREADS, os.cpu_count() or 1)
        while len(self._threads) < min(len(self._active) + len(self._queue), most):
            thread = threading.Thread(target=self._work, name="megatron_flex dump", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads: those that there are do the rest
                if not self._threads:
                    raise
                break
            self._threads.append(thread)
        if self._at_exit is None and not self._closing:
            # Unlike atexit it is run by multiprocessing's children too, and not in forked ones.
            self._at_exit = Finalize(None, self.close, exitpriority=100)

    def _wait_until(self, ready: Callable[[], bool], report: Callable[[], None] = lambda: None) -> bool:
        """Wait, as long as the disk takes anything; it logs progress now and then, without the lock."""
        while True:
            with self.change:
                if ready():
                    return True
                if self.stalled:
                    return False
                if self._queue:
                    self._start()
                self.change.wait(1.0)
            report()

    def _work(self) -> None:
        while True:
            with self.change:
                self.change.wait_for(lambda: self._may_begin() or (self._closing and not self._queue))
                if not self._queue:
                    return
                item = self._queue.popleft()
                if not self._active:
                    self._moved = self._began = time.monotonic()
                self._active.append(item)
            try:
                if isinstance(item, PendingPart):
                    self._write_part(item)
                else:
                    item.remove()
            finally:
                with self.change:
                    self._active.remove(item)
                    if not self._active:
                        self.tally.wrote += time.monotonic() - self._began
                    self.change.notify_all()
            self._log_progress()

    def _may_begin(self) -> bool:
        """Whether the first item of the queue may begin beside what is being written. The lock is held.

        It may, unless it is a part whose file an earlier try of the same iteration may still write or remove.
        """
        if not self._queue:
            return False
        item = self._queue[0]
        if isinstance(item, PendingIteration):
            return True
        for active in self._active:
            if isinstance(active, PendingPart) and active.running is item.running:
                continue
            iteration = active.running if isinstance(active, PendingPart) else active
            if iteration.folder == item.running.folder:
                return False
        return True

    def _write_part(self, part: PendingPart) -> None:
        running = part.running
        try:
            for mark in part.ready:
                mark.wait()
            if not running.dead:
                self._commit(part, write_part(self.folder, part, self.durable, self._note_progress))
        except BaseException as error:  # whatever it is, training goes on; a dead thread is begun again
            self.fail(running, error)
            running.remove()
            if not isinstance(error, Exception):
                raise
        finally:
            self.release(part)

    def _commit(self, part: PendingPart, draft: PartDraft) -> None:
        """Give a part its name after the earlier parts of its iteration have theirs.

        The last part, whose name says how many there are, is thus the last to appear.
        """
        running = part.running
        with self.change:
            self.change.wait_for(lambda: running.dead or running.committed == part.index.part)
            dead = running.dead
        if dead:
            draft.discard()
            return
        draft.commit()
        running.files.append(draft.path)
        if self.durable:
            sync_folder(draft.path.parent)
        with self.change:
            running.committed += 1
            self.tally.nbytes += part.nbytes
            self.tally.written += part.index.parts > 0
            self.change.notify_all()
        if running.dead:  # since the question above
            running.remove()

    def _note_progress(self) -> None:
        self._moved = time.monotonic()

    def _log_progress(self) -> None:
        now = time.monotonic()
        if self.logs_progress and now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            LOG.info("%s: %s; %.1f MB to go", self.folder, str(self.tally), self.buffers.held / 1e6)
