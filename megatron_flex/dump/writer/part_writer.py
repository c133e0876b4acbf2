"""A part before it is on disk: it collects tensors, and gets its name once it is complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_flex.checksums import CHECKSUM_BLOCK, compute_block_checksums
from megatron_flex.dump.file_names import format_iteration_folder, format_part_draft, format_part_name
from megatron_flex.dump.part_format import TENSOR_ALIGNMENT, PartHeader
from megatron_flex.dump.schema import REPLICA, PartIndex, ShardEntry, layout_to_json
from megatron_flex.layout import Layout

# Bytes in one call to the system, a multiple of what has one checksum. Their checksums are computed just
# before, while the CPU's cache has them; with fewer bytes, threads wait for the GIL more often.
WRITE_BYTES = 32 * CHECKSUM_BLOCK
MAX_VECTORS = 512  # pieces in one call; Linux allows 1024

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
        committed: parts that are on disk under their names.
        files: what is on disk.
    """

    number: int
    run_of: int
    dead: bool = False
    submitted: int = 0
    names: set[str] = field(default_factory=set)
    nbytes: int = 0
    committed: int = 0
    files: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> str:
        """Its name in the run's folder."""
        return format_iteration_folder(self.number, self.run_of)

    def remove(self) -> None:
        """Remove its files from disk; errors of the file system are ignored."""
        with suppress(IndexError):  # of no file, also if another thread removes them at the same time
            while True:
                file = self.files.pop()
                with suppress(OSError):
                    file.unlink()


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
        ready: marks to wait for before they are read.
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


@dataclass(slots=True, frozen=True)
class PartDraft:
    """A part whose bytes are with the operating system, under a name that readers ignore.

    Attributes:
        file: its name now.
        path: its name after `commit`.
    """

    file: Path
    path: Path

    def commit(self) -> None:
        """Give the file its name.

        Raises:
            OSError: it cannot be done; the draft is removed, if that could be done.
        """
        try:
            os.rename(self.file, self.path)
        except OSError:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the file; errors of the file system are ignored."""
        with suppress(OSError):
            self.file.unlink()


def write_part(folder: Path, part: PendingPart, durable: bool, on_progress: Callable[[], None]) -> PartDraft:
    """Write a part to a draft, which `PartDraft.commit` makes visible.

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
    _make_folder(where, durable and not index.part)  # earlier parts are committed earlier
    name = format_part_name(index.rank, index.part, index.parts)
    draft = PartDraft(where / format_part_draft(name), where / name)
    try:
        with suppress(FileNotFoundError):  # what a writer left that was killed
            draft.file.unlink()
        descriptor = os.open(draft.file, NEW_FILE_FLAGS, 0o666)
        try:
            _write_tensors(views, part.entries, header, descriptor, on_progress)
            _write_all([memoryview(header.encode())], descriptor, 0, on_progress)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        on_progress()
    except OSError:
        draft.discard()
        raise
    return draft


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


def _write_tensors(
    views: Sequence[memoryview],
    entries: Sequence[ShardEntry],
    header: PartHeader,
    file: int,
    on_progress: Callable[[], None],
) -> None:
    """Write tensors one after the other, and set their checksums in the header; replicas are not written."""
    batch: list[memoryview] = []
    start = header.nbytes
    nbytes = 0
    for number, (view, entry) in enumerate(zip(views, entries, strict=True)):
        checksums = []
        for at in range(0, len(view), WRITE_BYTES):
            chunk = view[at : at + WRITE_BYTES]
            checksums.append(compute_block_checksums(chunk))
            if entry.kind == REPLICA:
                continue
            if batch and (nbytes + len(chunk) > WRITE_BYTES or len(batch) == MAX_VECTORS):
                _write_all(batch, file, start, on_progress)
                start, batch, nbytes = start + nbytes, [], 0
            batch.append(chunk)
            nbytes += len(chunk)
        header.set_checksums(number, "".join(checksums))
    if batch:
        _write_all(batch, file, start, on_progress)


def _write_all(views: Sequence[memoryview], file: int, at: int, on_progress: Callable[[], None]) -> None:
    remaining = views
    while remaining:
        count = os.pwritev(file, remaining, at)
        at += count
        on_progress()
        while remaining and count >= len(remaining[0]):
            count -= len(remaining[0])
            remaining = remaining[1:]
        if count:
            remaining = [remaining[0][count:], *remaining[1:]]
