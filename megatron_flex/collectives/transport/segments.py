"""Segments of memory that the ranks of a node share, and the ring of slots that the next step's captures
are written to.

A segment is a file without a name in a folder of memory, mapped. The leader of a node decides which slot is
written next.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

# The others are viewed from bytes, since not every dtype can be asked for of a buffer.
READ_DIRECTLY = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64))

PREFIX = "megatron_flex-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-[0-9a-f]+")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap does not name


class Segment:
    """Shared memory of `size` bytes. All its pages are allocated before it is written: no write can fail.

    It has no name in the file system, so that nothing is left of it once the processes are gone.
    """

    def __init__(self, fd: int, size: int) -> None:
        """Map what `fd` is open on, and close `fd`."""
        try:
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.size = size
        self._own = memoryview(self._map)
        self._entries: dict[torch.dtype, Tensor] = {}
        self._given: weakref.ref[memoryview] | None = None
        with suppress(OSError):  # before Linux 5.14: the first writes then fault page by page
            self._map.madvise(_POPULATE_WRITE, 0, size)

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The bytes from `at` on as a tensor to write to; it does not count as held."""
        return _tensor_at(self._own, at, shape, dtype)

    def entries(self, dtype: torch.dtype) -> Tensor:
        """The memory as entries of a dtype, to write to; it does not count as held."""
        found = self._entries.get(dtype)
        if found is None:
            with torch.inference_mode(False):  # written inside and outside inference mode
                found = torch.frombuffer(self._own, dtype=torch.uint8).view(dtype)
            self._entries[dtype] = found
        return found

    def give(self, wanted: Sequence[tuple[int, Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Tensors on this memory without a copy; it is held while any of them exists.

        Each has a storage of its own: whoever saves one does not save the others with it.
        """
        given = memoryview(self._map)
        self._given = weakref.ref(given)
        return [_tensor_at(given, at, shape, dtype) for at, shape, dtype in wanted]

    @property
    def held(self) -> bool:
        """Whether a tensor that `give` made still exists."""
        return self._given is not None and self._given() is not None

    @property
    def address(self) -> int:
        """The address at which this process has it mapped."""
        return torch.frombuffer(self._own, dtype=torch.uint8, count=1).data_ptr()


def _tensor_at(memory: memoryview, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    if dtype in READ_DIRECTLY:
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=at).view(shape)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=at)
    return flat.view(dtype).view(shape)


def create_segment_file(folder: str, size: int) -> int:
    """Make a file of `size` bytes that has no name, all of its pages allocated.

    Returns:
        A descriptor that it is open on.

    Raises:
        OSError: the folder does not exist or is full; see its `strerror`.
    """
    fd = _open_unnamed(folder)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_unnamed(folder: str) -> int:
    with suppress(OSError):  # file systems that cannot do so
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path = Path(folder, f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}")
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path.unlink()
    return fd


def remove_stale_files(folder: str) -> None:
    """Remove what processes of this user left that were killed between making a file and unlinking it."""
    with suppress(OSError):  # a missing folder is an error where a file is made in it
        for entry in os.scandir(folder):
            found = _NAME.fullmatch(entry.name)
            if found and int(found[1]) == os.getuid() and not _is_alive(int(found[2])):
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
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


FIRST = 16 << 20  # bytes of the first slot, before it is known what a step captures
SLOT_ROUNDING = 1 << 16  # bytes; slots are multiples of it


@dataclass(eq=False)
class Slot:
    """One piece of shared memory, known to the ranks of the node by its number."""

    number: int
    segment: Segment
    fd: int  # for ranks that do not have it yet
    retired: bool = False  # a forked process may read it: it is released, not written again


class SlotRing:
    """The slots of one leader.

    Tensors are returned as views of their slot. A slot is written again once none of them exists, and
    given back to the system where it no longer fits.

    Attributes:
        folder: the folder of the files.
        most: bytes that all slots together may have.
        lacking: why there is no slot that fits, for the person to read; empty if there is one.
    """

    def __init__(self, folder: str, most: int) -> None:
        self.folder, self.most, self.lacking = folder, most, ""
        self.slots: list[Slot] = []
        self._made = 0
        _rings.add(self)

    def take(self, need: int, besides: Slot | None = None) -> Slot | None:
        """A slot of at least `need` bytes that is not held, not `besides`; None if there is no room."""
        self.lacking = ""
        for slot in list(self.slots):
            if slot is not besides and not slot.segment.held and (slot.retired or not _fits(slot, need)):
                self.slots.remove(slot)
        for slot in self.slots:
            if slot is not besides and not slot.segment.held:
                return slot
        least = 0 if self._made else min(FIRST, self.most)
        return self._make(max(-(-need // SLOT_ROUNDING) * SLOT_ROUNDING, least))

    def taken(self, slot: Slot, need: int) -> Slot | None:
        """The next slot after one whose tensors were copied out: the same, if it fits."""
        if slot.segment.held or slot.retired:
            return None
        if slot.segment.size >= need:
            return slot
        self.slots.remove(slot)  # so that its room counts as free
        larger = self._make(-(-need // SLOT_ROUNDING) * SLOT_ROUNDING)
        if larger is None:
            self.slots.append(slot)
            return slot
        return larger

    @property
    def numbers(self) -> list[int]:
        """The slots there are."""
        return [s.number for s in self.slots]

    def spoil(self) -> None:
        """Never write again to a slot that is held now."""
        for slot in self.slots:
            slot.retired = slot.retired or slot.segment.held

    def close(self) -> None:
        """Release all slots; tensors that exist stay as they are."""
        self.slots.clear()

    def _make(self, size: int) -> Slot | None:
        used, room = sum(s.segment.size for s in self.slots), free_bytes(self.folder)
        if used + size > self.most:
            self.lacking = f"FLEX_SHARED_BYTES allows {self.most}, of which {used} are in use"
            return None
        if size > room // 2:  # others need it too: collectives, workers that load data
            self.lacking = f"{self.folder} has {room} bytes free, of which at most half are taken"
            return None
        try:
            fd = create_segment_file(self.folder, size)
        except OSError as error:
            self.lacking = f"{self.folder}: {error.strerror}"
            return None
        try:
            segment = Segment(os.dup(fd), size)
        except OSError as error:
            os.close(fd)
            self.lacking = f"{self.folder}: {error.strerror}"
            return None
        slot = Slot(self._made, segment, fd)
        weakref.finalize(slot, os.close, fd)
        self._made += 1
        self.slots.append(slot)
        return slot


def _fits(slot: Slot, need: int) -> bool:
    return slot.segment.size >= need


_rings: weakref.WeakSet[SlotRing] = weakref.WeakSet()


def _retire_before_fork() -> None:
    # The child sees the same memory: its tensors must not change.
    for ring in _rings:
        ring.spoil()


os.register_at_fork(before=_retire_before_fork)
