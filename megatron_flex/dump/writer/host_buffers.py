"""The bounded host memory that holds tensors until they are on disk.

Memory is used again, as fresh pages cost more than copying.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_flex.dump.host_memory import allocate_on_host
from megatron_flex.dump.part_format import TENSOR_ALIGNMENT

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

    def give_back(self, buffer: Tensor, pinned: bool) -> None:
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
