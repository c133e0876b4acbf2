"""Memory of the CPU for tensors that are read or about to be written: large ones on huge pages.

Each page of new memory costs a page fault when it is first written. Pages of 4 KiB make half of the time in
which a large tensor is copied out of a file, and a third of the time in which a large tensor is copied and
written. Linux uses pages of 2 MiB where a program advises it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

MIN_ADVISED_BYTES = 8 << 20  # below, memory comes from a heap whose pages are there already
HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # None where the system has no such advice


def allocate_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialized tensor on the CPU.

    Args:
        shape: its shape.
        dtype: its dtype.
    """
    out = torch.empty(list(shape), dtype=dtype)
    storage = out.untyped_storage()
    if storage.nbytes() >= MIN_ADVISED_BYTES:
        _advise(storage.data_ptr(), storage.nbytes())
    return out


class ReusedMemory:
    """Memory for tensors, reused after release. One thread may take a tensor while another one releases one.

    The system clears the pages of new memory, which takes about as long as a copy into them.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}  # by address

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor on the CPU, in memory that was released if it is large enough."""
        nbytes = math.prod(shape) * dtype.itemsize
        try:
            memory = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.numel() < nbytes:
            memory = allocate_on_host([nbytes], torch.uint8)
        self._lent[memory.data_ptr()] = memory
        return memory[:nbytes].view(dtype).view(list(shape))

    def release(self, *tensors: Tensor) -> None:
        """Release tensors from `take`, which its next calls overwrite. Other tensors are ignored."""
        for tensor in tensors:
            memory = self._lent.pop(tensor.data_ptr(), None)
            if memory is not None:
                self._free.append(memory)


def _advise(address: int, nbytes: int) -> None:
    """Advise huge pages for the full pages of some memory. Whether the system follows does not matter."""
    advise = _load_madvise()
    if advise is None or HUGE_PAGES is None:
        return
    page = mmap.PAGESIZE
    first, last = -(-address // page) * page, (address + nbytes) // page * page
    advise(first, last - first, HUGE_PAGES)


@cache
def _load_madvise() -> Callable[[int, int, int], int] | None:
    """The function of the C library; None where there is none."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise.restype = ctypes.c_int
    call: Callable[[int, int, int], int] = madvise
    return call
