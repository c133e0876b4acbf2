"""Segments of memory that ranks of a node share, and the pool of those that the receiving rank owns.

A segment is a file in a folder of memory, which has a name only until all ranks have mapped it.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from torch import Tensor

# The others are viewed from bytes, since not every dtype can be asked for of a buffer.
READ_DIRECTLY = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64))

PREFIX = "megatron_flex-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-[0-9a-f]+")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap does not name
FIRST_BYTES = 16 << 20  # of the first segment, before it is known what a step captures
ROUNDING = 1 << 16  # bytes; segments are multiples of it
NUMBERS = 60  # of segments, one bit each in a flag that ranks exchange
MAX_SEGMENTS = 8  # of a pool; tensors of further steps that are still referred to are copies


class Segment:
    """Mapped memory of `size` bytes, all of whose pages are allocated: no write to it can fail."""

    def __init__(self, fd: int, size: int) -> None:
        """Map what `fd` is open on, and close `fd`; -1 for memory that no other process has."""
        try:
            self._map = mmap.mmap(fd, size)
        finally:
            if fd >= 0:
                os.close(fd)
        self.size = size
        self._view = memoryview(self._map)
        self._entries: dict[torch.dtype, Tensor] = {}
        self._given: weakref.ref[memoryview] | None = None
        with suppress(OSError):  # before Linux 5.14: the first writes then fault page by page
            self._map.madvise(_POPULATE_WRITE, 0, size)

    def entries(self, dtype: torch.dtype) -> Tensor:
        """The memory as entries of a dtype, to write to; it does not count as held."""
        entries = self._entries.get(dtype)
        if entries is None:
            with torch.inference_mode(False):  # written inside and outside inference mode
                entries = torch.frombuffer(self._view, dtype=torch.uint8).view(dtype)
            self._entries[dtype] = entries
        return entries

    def lend(self, tensors: Sequence[tuple[int, Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Tensors on this memory without a copy, given by offset, shape and dtype; it is held while any of
        them exists.

        Each has a storage of its own: whoever saves one does not save the others with it.
        """
        lent = memoryview(self._map)
        self._given = weakref.ref(lent)
        return [_tensor_at(lent, at, shape, dtype) for at, shape, dtype in tensors]

    @property
    def held(self) -> bool:
        """Whether a tensor that `lend` made still exists."""
        return self._given is not None and self._given() is not None

    @property
    def address(self) -> int:
        """The address at which this process has it mapped."""
        return self.entries(torch.uint8).data_ptr()


def _tensor_at(memory: memoryview, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    if dtype in READ_DIRECTLY:
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=at)
    return flat.view(dtype).view(shape)


class SharedSegment:
    """A segment of the pool.

    Attributes:
        path: its file, until all ranks have mapped it.
        segment: its memory.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Make the file, all of its pages allocated.

        Raises:
            OSError: the folder does not exist or is full; see its `strerror`.
        """
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.path: Path | None = path
        self._remove = weakref.finalize(self, _unlink, path)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            self.unlink()
            raise
        try:
            self.segment = Segment(fd, size)
        except OSError:
            self.unlink()
            raise

    def unlink(self) -> None:
        """Remove the file's name: it is gone once no process has it mapped."""
        self.path = None
        self._remove()


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def map_segment(path: Path) -> Segment:
    """Map the file of another rank.

    Raises:
        OSError: it does not exist here, or this process has no more descriptors or memory.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    return Segment(fd, os.fstat(fd).st_size)


class SegmentPool:
    """The segments of one receiving rank.

    Captures are returned as views of their segment, which is written again once none of them exists, and
    given back to the system where it no longer fits.

    Attributes:
        folder: the folder of the files.
        most: bytes that all segments together may have.
        stem: the beginning of the files' names.
        segments: the segments by number.
        lacking: why the last segment could not be made, for the person to read; empty if it could.
    """

    def __init__(self, folder: str, most: int) -> None:
        self.folder, self.most, self.lacking = folder, most, ""
        self.stem = f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        self.segments: dict[int, SharedSegment] = {}
        self._next = 0

    def open(self) -> None:
        """Make two segments: captures of a step are copied from one while the next step writes the other."""
        if self.make(min(FIRST_BYTES, self.most)) is not None:
            self.make(min(FIRST_BYTES, self.most))

    def unlink(self, numbers: Iterable[int]) -> None:
        """Remove the names of files: all ranks have mapped them."""
        for number in numbers:
            self.segments[number].unlink()

    def find_free(self, need: int, besides: int | None = None) -> list[int]:
        """The segments of at least `need` bytes that are not held, without `besides`; smaller ones are given
        back to the system once all ranks have mapped them.
        """
        free = [n for n, s in self.segments.items() if n != besides and not s.segment.held]
        small = [number for number in free if self.segments[number].segment.size < need]
        for number in small:
            if self.segments[number].path is None:  # a rank that is a step behind must find the file
                self.drop(number)
        return [number for number in free if number not in small]

    def drop(self, number: int) -> None:
        """Give a segment back to the system once its tensors are gone."""
        self.segments.pop(number).unlink()

    def drop_unmapped(self) -> None:
        """Give back the segments that other ranks have not mapped."""
        for number in [n for n, shared in self.segments.items() if shared.path is not None]:
            self.drop(number)

    def close(self) -> None:
        """Release all segments; tensors that exist stay as they are."""
        for number in list(self.segments):
            self.drop(number)

    def make(self, need: int) -> int | None:
        """Make a segment of at least `need` bytes; its number, or None where `lacking` says why not."""
        self.lacking = ""
        size = max(-(-need // ROUNDING), 1) * ROUNDING
        used, room = sum(s.segment.size for s in self.segments.values()), free_bytes(self.folder)
        if len(self.segments) >= MAX_SEGMENTS:
            self.lacking = f"all {MAX_SEGMENTS} segments are in use"
            return None
        if used + size > self.most:
            self.lacking = f"FLEX_SHARED_BYTES allows {self.most}, of which {used} are in use"
            return None
        if size > room // 2:  # others need it too: collectives, workers that load data
            self.lacking = f"{self.folder} has {room} bytes free, of which at most half are taken"
            return None
        # Not a number that was just given back: other ranks may still have mapped its file.
        number: int = next(
            n for n in (*range(self._next, NUMBERS), *range(NUMBERS)) if n not in self.segments
        )
        try:
            self.segments[number] = SharedSegment(segment_path(self.folder, self.stem, number), size)
        except OSError as error:
            self.lacking = f"{self.folder}: {error.strerror}"
            return None
        self._next = (number + 1) % NUMBERS
        return number


def segment_path(folder: str, stem: str, number: int) -> Path:
    """The file of a segment, from what all ranks know of the pool."""
    return Path(folder, f"{stem}{number:x}")


def remove_stale_files(folder: str) -> None:
    """Remove what processes of this user left that were killed before all ranks had mapped a file."""
    with suppress(OSError):  # a missing folder is an error where a file is made in it
        for entry in os.scandir(folder):
            name = _NAME.fullmatch(entry.name)
            if name and int(name[1]) == os.getuid() and not _is_alive(int(name[2])):
                with suppress(FileNotFoundError):  # another rank sweeps too
                    os.unlink(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def free_bytes(folder: str) -> int:
    """How many bytes the folder has room for; 0 if it is not there."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize
