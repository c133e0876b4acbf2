"""A piece of memory that the ranks of a node share: a file without a name in a folder of memory, mapped."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

PREFIX = "megatron_flex-"
_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-[0-9a-f]+")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap does not name


class Segment:
    """Shared memory of `size` bytes. All its pages are there before anybody writes: nothing can fail later.

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
        self._given: weakref.ref[memoryview] | None = None
        with suppress(OSError):  # before Linux 5.14: the first writes then fault page by page
            self._map.madvise(_POPULATE_WRITE, 0, size)

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The bytes from `at` on as a tensor to write to; it does not count as held."""
        return _tensor_at(self._own, at, shape, dtype)

    def give(self, wanted: Sequence[tuple[int, Sequence[int], torch.dtype]]) -> list[Tensor]:
        """Tensors of what lies there, which are held until nobody has any of them any more.

        Each has a storage of its own: whoever saves one does not save the others with it.
        """
        given = memoryview(self._map)
        self._given = weakref.ref(given)
        return [_tensor_at(given, at, shape, dtype) for at, shape, dtype in wanted]

    @property
    def held(self) -> bool:
        """Whether somebody has a tensor that `give` made."""
        return self._given is not None and self._given() is not None

    @property
    def address(self) -> int:
        """Where this process has it mapped."""
        return torch.frombuffer(self._own, dtype=torch.uint8, count=1).data_ptr()


def _tensor_at(memory: memoryview, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = dtype.itemsize
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    # By way of bytes, since not every dtype can be asked for there.
    return torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=at).view(dtype).view(tuple(shape))


def create_segment_file(folder: str, size: int) -> int:
    """Make a file of `size` bytes that has no name, all of its pages allocated.

    Returns:
        A descriptor that it is open on.

    Raises:
        OSError: the folder is not there or has no room, said by its `strerror`.
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
    with suppress(OSError):  # a folder that is not there is found out by who makes a file in it
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
