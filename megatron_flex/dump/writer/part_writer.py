"""A part before it is on disk: it collects tensors, and gets its name once it is complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_flex.dump.checksums import CHECKSUM_BLOCK, compute_block_checksums
from megatron_flex.dump.part_format import (
    TENSOR_ALIGNMENT,
    PartHeader,
    format_iteration_folder,
    format_part_name,
)
from megatron_flex.dump.schema import REPLICA, PartIndex, ShardEntry, layout_to_json
from megatron_flex.layout import Layout

# Bytes in one call to the system, a multiple of what has one checksum: few, so that the CPU's cache has them
# when the system copies them, as their checksums were computed just before.
WRITE_BYTES = 4 * CHECKSUM_BLOCK
MOST_VECTORS = 512  # pieces in one call; Linux allows 1024
MOST_THREADS = 2  # that write one part: the system copies to its cache in each, and the model needs cores too
THREAD_BYTES = 4 << 20  # of a part, for each thread: less is written before a thread has begun

# Of a draft: in a folder that others may write to, nobody has put a file or a link of that name there.
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True, eq=False)
class PendingIteration:
    """An iteration of this rank, until its last part is on disk.

    Attributes:
        number: the framework's.
        run_of: which run of the schedule in it.
        dead: whether it will be absent.
        submitted: parts that went to the thread.
        names: tensors that it has.
        nbytes: of buffers that it took.
        files: what is on disk.
    """

    number: int
    run_of: int
    dead: bool = False
    submitted: int = 0
    names: set[str] = field(default_factory=set)
    nbytes: int = 0
    files: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """Its name in the run's folder."""
        return format_iteration_folder(self.number, self.run_of)

    def remove(self) -> None:
        """Remove its files from disk; errors of the file system are ignored."""
        while self.files:
            with suppress(OSError):
                self.files.pop().unlink()


@dataclass(slots=True, eq=False)
class PendingPart:
    """A part that fills up.

    Attributes:
        index: the metadata that is known so far.
        running: whose it is.
        layouts: each with its number.
        entries: the shards.
        tensors: on the host, one for each entry.
        buffers: the buffers of the tensors, and whether the memory is pinned.
        kept: bytes of tensors that were kept as they are, in no buffer.
        rest: what is free of the last buffer that is shared, plain (False) and pinned (True).
        nbytes: of the tensors.
        ready: events to wait for before they are read.
    """

    index: PartIndex
    running: PendingIteration
    layouts: dict[Layout, int] = field(default_factory=dict)
    entries: list[ShardEntry] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[tuple[Tensor, bool]] = field(default_factory=list)
    kept: int = 0
    rest: dict[bool, Tensor] = field(default_factory=dict)
    nbytes: int = 0
    ready: list[Any] = field(default_factory=list)

    def add(self, entry: ShardEntry, layout: Layout, host: Tensor) -> None:
        """Put in a tensor."""
        number = self.layouts.setdefault(layout, len(self.layouts))
        self.entries.append(replace(entry, layout=number))
        self.tensors.append(host)
        self.nbytes += host.nbytes

    def cut(self, nbytes: int, pinned: bool) -> Tensor | None:
        """So many bytes of the shared buffer, if it has them."""
        rest = self.rest.get(pinned)
        if rest is None or rest.numel() < nbytes:
            return None
        self.rest[pinned] = rest[-(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT :]
        return rest[:nbytes]


def write_part(folder: Path, part: PendingPart, durable: bool, on_progress: Callable[[], None]) -> Path:
    """Write a part atomically.

    Args:
        folder: of the run.
        part: all of whose tensors are on the host.
        durable: wait until the disk itself has it.
        on_progress: called whenever the disk has taken something.

    Raises:
        OSError: it cannot be written; nothing of it is left, if that could be removed.
    """
    views = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in part.tensors]
    index = replace(part.index, layouts=[layout_to_json(x) for x in part.layouts], entries=part.entries)
    shapes = [tuple(t.shape) for t, e in zip(part.tensors, part.entries, strict=True) if e.kind != REPLICA]
    header = PartHeader(index, shapes, [len(view) for view in views])
    where = folder / part.running.folder
    if not index.part:
        _make_folder(where, durable)
    name = format_part_name(index.rank, index.part, index.parts)
    rough, path = where / f".{name}.tmp", where / name
    try:
        with suppress(FileNotFoundError):  # what a writer left that was killed
            rough.unlink()
        file = os.open(rough, NEW_FILE_FLAGS, 0o666)
        try:
            _write_tensors(views, part.entries, header, file, on_progress)
            _write_all([memoryview(header.encode())], file, 0, on_progress)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        on_progress()
        os.rename(rough, path)
    except OSError:
        with suppress(OSError):
            rough.unlink()
        raise
    part.running.files.append(path)
    if durable:
        sync_folder(where)
    return path


def sync_folder(folder: Path) -> None:
    """Wait until the disk itself has the names in a folder.

    Raises:
        OSError: it cannot be done.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _make_folder(folder: Path, durable: bool) -> None:
    with suppress(FileExistsError):  # another rank was first
        folder.mkdir()
    if durable:
        sync_folder(folder.parent)


@dataclass(slots=True)
class _Chunk:
    """Some bytes of a tensor, which are written by one call.

    Attributes:
        entry: the number of the tensor's entry.
        view: the bytes.
        at: where they are in the file; None for a replica, of which only the checksums are needed.
        checksums: those of its blocks.
    """

    entry: int
    view: memoryview
    at: int | None
    checksums: str = ""


def _write_tensors(
    views: Sequence[memoryview],
    entries: Sequence[ShardEntry],
    header: PartHeader,
    file: int,
    on_progress: Callable[[], None],
) -> None:
    """Write tensors one after the other, and set their checksums in the header; replicas are not written."""
    chunks: list[_Chunk] = []
    end = header.nbytes
    for number, (view, entry) in enumerate(zip(views, entries, strict=True)):
        written = entry.kind != REPLICA
        chunks += [
            _Chunk(number, view[at : at + WRITE_BYTES], end + at if written else None)
            for at in range(0, len(view), WRITE_BYTES)
        ]
        end += len(view) * written
    _run_side_by_side([partial(_write_chunks, lane, file, on_progress) for lane in _share_out(chunks)])
    found: list[list[str]] = [[] for _ in views]
    for chunk in chunks:
        found[chunk.entry].append(chunk.checksums)
    for number, checksums in enumerate(found):
        header.set_checksums(number, "".join(checksums))


def _share_out(chunks: Sequence[_Chunk]) -> list[Sequence[_Chunk]]:
    """Share chunks out to threads, each of which gets neighbours of about as many bytes."""
    nbytes = sum(len(c.view) for c in chunks)
    threads = min(MOST_THREADS, nbytes // THREAD_BYTES, os.cpu_count() or 1)
    out: list[Sequence[_Chunk]] = []
    first = before = 0
    for number, chunk in enumerate(chunks):
        if threads > 1 and before >= (len(out) + 1) * nbytes / threads:
            out.append(chunks[first:number])
            first = number
        before += len(chunk.view)
    return [*out, chunks[first:]]


def _run_side_by_side(functions: Sequence[Callable[[], None]]) -> None:
    """Call functions at once, the first in this thread, and return when all have; raise what one of them did.

    The threads are daemons, as that of the writer is: a process may end while the disk is stalled.
    """
    errors: list[BaseException] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    started, left = [], list(functions)
    with suppress(RuntimeError):  # the system gives no more threads: this one does the rest
        while len(left) > 1:
            thread = threading.Thread(
                target=call, args=(left[-1],), name="megatron_flex dump part", daemon=True
            )
            thread.start()
            started.append(thread)
            left.pop()
    for function in left:
        call(function)
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def _write_chunks(chunks: Sequence[_Chunk], file: int, on_progress: Callable[[], None]) -> None:
    """Write chunks that are in order, and compute their checksums just before."""
    batch: list[memoryview] = []
    start = nbytes = 0
    for chunk in chunks:
        chunk.checksums = compute_block_checksums(chunk.view)
        if chunk.at is None:
            continue
        if batch and (nbytes + len(chunk.view) > WRITE_BYTES or len(batch) == MOST_VECTORS):
            _write_all(batch, file, start, on_progress)
            batch, nbytes = [], 0
        start = start if batch else chunk.at
        batch.append(chunk.view)
        nbytes += len(chunk.view)
    if batch:
        _write_all(batch, file, start, on_progress)


def _write_all(views: Sequence[memoryview], file: int, at: int, on_progress: Callable[[], None]) -> None:
    left = views
    while left:
        count = os.pwritev(file, left, at)
        at += count
        on_progress()
        while left and count >= len(left[0]):
            count -= len(left[0])
            left = left[1:]
        if count:
            left = [left[0][count:], *left[1:]]
