"""Writing a rank's parts: tensors are copied to the host at once, and written in the background."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_flex.dump.files import NAMES, REPLICA, Entry, Index, header, iteration_folder, part_name
from megatron_flex.dump.layouts import to_json
from megatron_flex.dump.settings import Dump
from megatron_flex.errors import DumpError
from megatron_flex.layout import Layout


@dataclass(slots=True)
class _Part:
    """A part that fills up."""

    index: Index
    layouts: list[Layout] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    nbytes: int = 0


class Writer:
    """One rank's writing of a dump; `begin`, any number of `put`, `finish` or `abandon`, for each iteration.

    Not collective: nothing here waits for another rank.

    Attributes:
        failure: what went wrong, if something did; the iteration that it happened in is absent.
        written: bytes of tensors in parts that are on disk.
        held: bytes that are copied and not yet written; never above the settings' `queue_bytes`, but for a
            single tensor that is larger.
    """

    def __init__(self, folder: Path, rank: int, coords: Mapping[str, int], dump: Dump) -> None:
        self.folder, self.rank, self.coords, self.dump = folder, rank, dict(coords), dump
        self.failure: DumpError | None = None
        self.written = self.held = 0
        self._part: _Part | None = None
        self._number = 0
        self._queue: deque[_Part] = deque()
        self._change = threading.Condition()
        self._closing = False
        self._broken: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, iteration: int, run_of: int, training: bool, microbatches: int) -> None:
        """An iteration starts."""
        self._number = 0
        index = Index(self.rank, self.coords, iteration, run_of, training, microbatches, 0, 0)
        self._part = _Part(index)

    def put(self, entry: Entry, layout: Layout, tensor: Tensor) -> None:
        """Take a tensor, which may be overwritten as soon as this returns.

        Args:
            entry: what it is; `layout`, `dtype` and `crc` are filled in here.
            layout: of the shard, before anything was picked.
            tensor: what is to be written.
        """
        part = self._part
        if part is None:
            return
        if part.nbytes and part.nbytes + tensor.nbytes > self.dump.part_bytes:
            part = self._next(part)
        self._room(tensor.nbytes)
        if layout not in part.layouts:
            part.layouts.append(layout)
        host = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        part.entries.append(replace(entry, layout=part.layouts.index(layout), dtype=NAMES[host.dtype]))
        part.tensors.append(host)
        part.nbytes += host.nbytes

    def finish(self) -> None:
        """The iteration is over: its last part closes it."""
        part, self._part = self._part, None
        if part is not None:
            part.index = replace(part.index, parts=part.index.part + 1)
            self._submit(part)

    def abandon(self) -> None:
        """The iteration failed: it will not be there."""
        part, self._part = self._part, None
        if part is not None:
            with self._change:
                self.held -= part.nbytes

    def close(self) -> None:
        """Wait until everything is written."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- the queue -------------------------------------------------------------------------------------

    def _next(self, part: _Part) -> _Part:
        self._submit(part)
        self._part = _Part(replace(part.index, part=part.index.part + 1))
        return self._part

    def _room(self, nbytes: int) -> None:
        """Wait until so much more may be held."""
        part = self._part
        with self._change:
            full = self.held and self.held + nbytes > self.dump.queue_bytes
        if full and part is not None and part.nbytes:
            self._next(part)
        with self._change:
            self._change.wait_for(lambda: not self.held or self.held + nbytes <= self.dump.queue_bytes)
            self.held += nbytes

    def _submit(self, part: _Part) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="megatron_flex dump", daemon=True)
            self._thread.start()
        with self._change:
            self._queue.append(part)
            self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                part = self._queue.popleft()
            which = part.index.iteration, part.index.run_of
            try:
                if self._broken != which:
                    self._write(part)
            except OSError as error:
                self._broken = which
                where = self.folder / iteration_folder(*which)
                self.failure = DumpError(f"{where}: cannot be written: {error.strerror or error}")
            finally:
                with self._change:
                    self.held -= part.nbytes
                    self._change.notify_all()

    def _write(self, part: _Part) -> None:
        views = [_bytes(t) for t in part.tensors]
        crcs = iter([zlib.crc32(v) for v in views])
        entries = [e if e.kind == REPLICA else replace(e, crc=next(crcs)) for e in part.entries]
        index = replace(part.index, layouts=[to_json(x) for x in part.layouts], entries=entries)
        front, _ = header(index, [tuple(t.shape) for t in part.tensors], [len(v) for v in views])
        folder = self.folder / iteration_folder(index.iteration, index.run_of)
        folder.mkdir(exist_ok=True)
        name = part_name(self.rank, index.part, index.parts)
        path = folder / f".{name}.tmp"
        with path.open("wb") as file:
            file.write(front)
            for view in views:
                file.write(view)
            if self.dump.durable:
                file.flush()
                os.fsync(file.fileno())
        path.rename(folder / name)
        self.written += part.nbytes


def _bytes(tensor: Tensor) -> Any:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
