"""Host memory for what goes to disk: bounded, and used again, as fresh pages cost more than copying.

On a GPU the copies run on a stream of their own, into pinned memory, while the model goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_flex.dump.part_format import TENSOR_ALIGNMENT

SLAB_BYTES = 8 << 20  # bytes; tensors of less than a quarter of it lie side by side


class HostBuffers:
    """Buffers of plain or pinned host memory. The caller locks.

    Attributes:
        most: bytes that may be held, but for a single larger tensor.
        held: bytes in buffers that are handed out, and in tensors that are kept as they are.
        greatest: the most that was ever held.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.slab = max(min(most // 8, SLAB_BYTES) // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT, TENSOR_ALIGNMENT)
        self.held = self.greatest = self._idle = 0
        self._free: dict[tuple[int, bool], list[Tensor]] = {}

    def shares(self, nbytes: int) -> bool:
        """Whether so few bytes lie in a buffer with others."""
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
        """Count what is kept as it is; negative when it is let go."""
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
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
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
        """Let go of what nobody holds."""
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
        module: what stands for the kind of device in torch, such as `torch.cuda`.
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
        kept = tensor.contiguous() if owned else tensor.clone(memory_format=torch.contiguous_format)
        self.stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.stream):
            host.copy_(kept, non_blocking=True)
        kept.record_stream(self.stream)  # its memory is free for others only after the copy

    def mark(self) -> Any:
        """An event that comes when all copies that have begun are through."""
        event = self.module.Event()
        event.record(self.stream)
        return event
