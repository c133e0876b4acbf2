"""Writing a rank's parts: tensors are copied to the host at once, and written in the background."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_flex.config import flex_config
from megatron_flex.dump.dump_settings import Dump
from megatron_flex.dump.part_format import DTYPE_NAMES, compute_part_limit
from megatron_flex.dump.schema import PartIndex, ShardEntry
from megatron_flex.dump.writer.copy_stream import CopyStream
from megatron_flex.dump.writer.part_writer import PendingIteration, PendingPart
from megatron_flex.dump.writer.writer_threads import LOG, LOG_SECONDS, WriterThreads
from megatron_flex.errors import DumpError, FlexWarning
from megatron_flex.layout import Layout


class DumpWriter:
    """One rank's writing of a dump; `begin`, any number of `put`, `finish` or `abandon`, for each iteration.

    Not collective: nothing here waits for another rank, and nothing raises. An iteration that cannot be
    written is absent, and `trouble` has the reason.

    What was finished is written when the process ends without `close`, unless it is killed; it is not waited
    for when the disk takes nothing for `flex_config.dump_seconds`. Forked children write nothing.
    """

    def __init__(self, folder: Path, rank: int, coords: Mapping[str, int], dump: Dump) -> None:
        self.folder, self.rank, self.coords, self.dump = folder, rank, dict(coords), dump
        self._back = WriterThreads(
            folder, dump.queue_bytes, dump.durable, rank == 0, dump.on_error == "raise"
        )
        self.tally = self._back.tally
        self._part: PendingPart | None = None
        self._largest_iteration = 0  # bytes of the largest iteration so far
        self._sides: dict[torch.device, CopyStream] = {}
        self._warned: set[str] = set()
        self._logged_at = 0.0
        self._closed = False

    @property
    def held(self) -> int:
        """Bytes that are copied and not yet written."""
        return self._back.buffers.held

    @property
    def greatest(self) -> int:
        """The most that was ever held: within the settings' `queue_bytes`, but for a single larger tensor."""
        return self._back.buffers.greatest

    def would_wait(self) -> bool:
        """Whether an iteration as large as the largest so far would have to wait for the disk."""
        return self.held > 0 and self.held + self._largest_iteration > self.dump.queue_bytes

    def drop(self, iteration: int) -> None:
        """Drop an iteration because the disk is too slow; all ranks drop the same one."""
        self.tally.dropped += 1
        now = time.monotonic()
        if self.rank == 0 and (self.tally.dropped == 1 or now - self._logged_at >= LOG_SECONDS):
            self._logged_at = now
            LOG.warning(
                "%s: iteration %d is dropped, as the disk is too slow; %d so far",
                self.folder,
                iteration,
                self.tally.dropped,
            )

    def begin(self, iteration: int, run_of: int, training: bool, microbatches: int) -> None:
        if self._back.is_forked_child or self._closed:
            return
        self.abandon()
        index = PartIndex(self.rank, self.coords, iteration, run_of, training, microbatches, 0, 0)
        running = PendingIteration(iteration, run_of)
        self._part = PendingPart(index, running)
        self._back.note_open(running)
        if self._back.stalled:
            self._back.fail(running, _make_stall_error())

    def put(self, entry: ShardEntry, layout: Layout, tensor: Tensor, owned: bool = False) -> None:
        """Take a tensor, which may be overwritten as soon as this returns.

        Args:
            entry: what it is; `layout`, `dtype` and the checksums are filled in here. Of a `replica` only the
                checksum is written.
            layout: of the shard, before anything was picked.
            tensor: what is to be written.
            owned: nobody else has it: it need not be copied on its device.
        """
        part = self._part
        if part is None or part.running.dead or self._back.is_forked_child:
            return
        try:
            self._take(part, entry, layout, tensor.detach(), owned)
        except Exception as error:  # raised here, other ranks would hang
            self._fail(part.running, error)

    def fail(self, error: BaseException) -> None:
        """The iteration that is under way cannot be written."""
        if self._part is not None:
            self._fail(self._part.running, error)

    def finish(self) -> None:
        """The iteration is over: its last part closes it."""
        part = self._part
        if part is None or self._back.is_forked_child:
            return
        if part.running.dead:
            self.abandon()
        else:
            self._part = None
            self._largest_iteration = max(self._largest_iteration, part.running.nbytes)
            part.index = replace(part.index, parts=part.index.part + 1)
            self._back.note_open(None)
            self._submit(part)
        self._warn()

    def abandon(self) -> None:
        """The iteration failed: it will not be there, and what is on disk of it is removed."""
        part, self._part = self._part, None
        if part is None or self._back.is_forked_child:
            return
        running = part.running
        running.dead = True
        self._back.note_open(None)
        self._back.release(part)
        if running.submitted:
            self._back.submit(running)

    def trouble(self) -> DumpError | None:
        """What went wrong since this was last asked."""
        latest = None
        while self._back.failures:
            latest = self._back.failures.popleft()[1]
        return latest

    def close(self) -> None:
        """Wait until everything is written, as long as the disk takes anything, and sum up in the log."""
        if self._closed or self._back.is_forked_child:
            return
        self.abandon()
        self._closed = True
        began = time.monotonic()
        if not self._back.close():
            lost = DumpError(
                f"{self.folder}: {_make_stall_error()}; unwritten data is lost", path=self.folder
            )
            self._back.failures.append(("stalled", lost))
        self.tally.waited += time.monotonic() - began
        self._warn()
        LOG.info("%s, rank %d: %s", self.folder, self.rank, str(self.tally))

    # -- on the way to the thread ----------------------------------------------------------------------

    def _take(
        self, part: PendingPart, entry: ShardEntry, layout: Layout, tensor: Tensor, owned: bool
    ) -> None:
        if tensor.dtype not in DTYPE_NAMES:
            raise DumpError(f"{entry.site}: {tensor.dtype} has no name in safetensors; give Dump a dtype")
        running, nbytes = part.running, tensor.nbytes
        entry = replace(entry, dtype=DTYPE_NAMES[tensor.dtype])
        if entry.tensor in running.names:
            raise DumpError(f"{entry.tensor} was recorded twice")
        running.names.add(entry.tensor)
        most = compute_part_limit(part.index.part, self.dump.part_bytes)
        if part.nbytes and part.nbytes + nbytes > most:
            part = self._next(part)
        on_host = tensor.device.type == "cpu"
        if on_host and owned and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == nbytes:
            part = self._room(part, nbytes)
            self._back.keep(nbytes)
            part.kept += nbytes
            host = tensor
        else:
            part, place = self._place(part, nbytes, not on_host)
            host = place.view(tensor.dtype).view(tensor.shape)
            if on_host:
                host.copy_(tensor)
            else:
                self._side(tensor.device).copy(host, tensor, owned)
        part.add(entry, layout, host)

    def _place(self, part: PendingPart, nbytes: int, pinned: bool) -> tuple[PendingPart, Tensor]:
        """So many bytes of host memory; they belong to the part that is returned."""
        shares = self._back.buffers.shares(nbytes)
        block = part.cut(nbytes, pinned) if shares else None
        if block is not None:
            return part, block
        size = self._back.buffers.size(nbytes, pinned)
        part = self._room(part, size)
        buffer = self._back.buffer(size, pinned)
        part.buffers.append((buffer, pinned))
        if shares:
            part.rest[pinned] = buffer
            block = part.cut(nbytes, pinned)
        return part, buffer[:nbytes] if block is None else block

    def _room(self, part: PendingPart, size: int) -> PendingPart:
        """Wait until so much more may be held; what waits for more tensors goes ahead."""
        if not self._back.fits(size) and part.nbytes:
            part = self._next(part)
        if not self._back.reserve(size):
            raise _make_stall_error()
        part.running.nbytes += size
        return part

    def _side(self, device: torch.device) -> CopyStream:
        if device not in self._sides:
            self._sides[device] = CopyStream(device)
        return self._sides[device]

    def _next(self, part: PendingPart) -> PendingPart:
        self._submit(part)
        self._part = PendingPart(replace(part.index, part=part.index.part + 1), part.running)
        return self._part

    def _submit(self, part: PendingPart) -> None:
        pinned = any(pinned for _, pinned in part.buffers)
        marks = [s.mark() for s in self._sides.values()] if pinned else []
        part.ready = marks
        part.rest.clear()
        part.running.submitted += 1
        self._back.submit(part)

    def _fail(self, running: PendingIteration, error: BaseException) -> None:
        self._back.fail(running, error)
        self.abandon()

    def _warn(self) -> None:
        if self.dump.on_error != "warn":
            return
        while self._back.failures:
            kind, error = self._back.failures.popleft()
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(str(error), FlexWarning, stacklevel=3)


def _make_stall_error() -> DumpError:
    return DumpError(f"the disk has taken nothing for {flex_config.dump_seconds:g} s")
