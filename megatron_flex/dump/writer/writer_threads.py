"""The threads of a rank that write parts to disk, and the bounded host memory that holds them until then.

Each part is a file that one thread writes: Linux lets only one thread at a time write to a file. Two threads
that write to one file take as long as one thread, which takes 1.7 times as long as two that write to two.

Memory is used again, as fresh pages cost more than copying. On a GPU the copies run on a stream of their own,
into pinned memory, while the model runs.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_flex.config import flex_config
from megatron_flex.dump.host_memory import allocate_on_host
from megatron_flex.dump.part_format import TENSOR_ALIGNMENT
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

MOST_THREADS = 2  # that write at the same time: the model needs cores too
SLAB_BYTES = 8 << 20  # bytes; tensors of less than a quarter of it lie side by side


class HostBuffers:
    """Buffers of plain or pinned host memory. The caller locks.

    Attributes:
        most: bytes that may be held, but for a single larger tensor.
        held: bytes in buffers that are in use, and in tensors that are kept as they are.
        greatest: the most that was ever held.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.slab = max(min(most // 8, SLAB_BYTES) // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT, TENSOR_ALIGNMENT)
        self.held = self.greatest = self._idle = 0
        self._free: dict[tuple[int, bool], list[Tensor]] = {}

    def shares(self, nbytes: int) -> bool:
        """Whether a tensor of this size shares a buffer with others."""
        return nbytes <= self.slab // 4

    def size(self, nbytes: int, pinned: bool) -> int:
        """How large a buffer for so many bytes is: few sizes, so that they can be used again."""
        if self.shares(nbytes):
            return self.slab
        if pinned:  # torch rounds it up to that anyway
            size = 1 << (nbytes - 1).bit_length()
        else:
            step = max(1 << max(nbytes.bit_length() - 4, 0), TENSOR_ALIGNMENT)
            size = -(-nbytes // step) * step
        return max(nbytes, min(size, self.most))

    def fits(self, size: int) -> bool:
        """Whether so much more may be held."""
        return not self.held or self.held + size <= self.most

    def hold(self, size: int) -> None:
        """Count bytes that are held without a copy; negative when they are released."""
        self.held += size
        self.greatest = max(self.greatest, self.held)
        self._shrink(self.most - self.held)

    def take(self, size: int, pinned: bool) -> Tensor:
        """A buffer `[size]` of bytes."""
        free = self._free.get((size, pinned))
        if free:
            buffer = free.pop()
            self._idle -= size
        else:
            self._shrink(self.most - self.held - size)
            buffer = (
                torch.empty(size, dtype=torch.uint8, pin_memory=True)
                if pinned
                else allocate_on_host([size], torch.uint8)
            )
        self.held += size
        self.greatest = max(self.greatest, self.held)
        return buffer

    def give(self, buffer: Tensor, pinned: bool) -> None:
        """Take a buffer back."""
        size = buffer.nbytes
        self.held -= size
        if self.held + self._idle + size <= self.most:
            self._free.setdefault((size, pinned), []).append(buffer)
            self._idle += size

    def clear(self) -> None:
        """Release the buffers that nothing refers to."""
        self._shrink(0)

    def _shrink(self, most: int) -> None:
        for key, free in self._free.items():
            while free and self._idle > most:
                free.pop()
                self._idle -= key[0]


class CopyStream:
    """A stream of a device, on which tensors go to pinned memory.

    Args:
        device: of the tensors.
        module: torch's module for the kind of device, such as `torch.cuda`.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self.module = module or torch.get_device_module(device)
        self.stream = self.module.Stream(device)

    def copy(self, host: Tensor, tensor: Tensor, owned: bool) -> None:
        """Begin to copy; the model may overwrite `tensor` at once, unless the caller `owned` it alone.

        Args:
            host: of the same shape and dtype, in pinned memory; not to be read before `mark`'s event.
            tensor: on the device, ready on the current stream.
            owned: nothing else writes to it.
        """
        source = tensor.contiguous() if owned else tensor.clone(memory_format=torch.contiguous_format)
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # its memory is free for others only after the copy

    def mark(self) -> CopyMark:
        """A mark that is reached when all copies that have begun have ended."""
        event = self.module.Event()
        event.record(self.stream)
        return CopyMark(self.device, self.module, event)


class CopyMark(NamedTuple):
    """A moment of a device's stream: its device, torch's module for that kind of device, and the event."""

    device: torch.device
    module: Any
    event: Any

    def wait(self) -> None:
        """Wait until the moment is reached, in a thread that has no device of its own.

        A new thread's device is the first one: to wait there would make a context on the first GPU for every
        process of the node, about 0.5 GB each.
        """
        self.module.set_device(self.device)
        self.event.synchronize()


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
    def elsewhere(self) -> bool:
        """Whether this is a forked child, which has no thread and must not write, nor wait for a lock."""
        return os.getpid() != self._process

    @property
    def stalled(self) -> bool:
        """Whether the disk takes nothing."""
        return bool(self._active) and time.monotonic() - self._moved > flex_config.dump_seconds

    def opens(self, running: PendingIteration | None) -> None:
        """Know the iteration that is under way, to remove it should the process end before it does."""
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
        has_room = self._until(lambda: self.buffers.fits(size))
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
                self.buffers.give(buffer, pinned)
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
        """An iteration will be absent."""
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
        if self.elsewhere:
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
            done = self._until(
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
        most = min(MOST_THREADS, os.cpu_count() or 1)
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

    def _until(self, ready: Callable[[], bool], report: Callable[[], None] = lambda: None) -> bool:
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
                    self._part(item)
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

    def _part(self, part: PendingPart) -> None:
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
