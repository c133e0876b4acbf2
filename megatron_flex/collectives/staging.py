"""Memory that no user sees, used again: on a host, fresh pages cost more than what is copied into them."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_POOL_BYTES = 256 << 20  # kept for the next time, all together
MAX_POOL_BUFFERS = 4


class BufferPool:
    """Buffers of bytes on the host that were given back. (Of a GPU's, its caching allocator keeps care.)"""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """A flat tensor of bytes, with anything in them."""
        fitting = [n for n, t in enumerate(self._free) if t.nbytes >= nbytes] if device.type == "cpu" else []
        if fitting:
            return self._free.pop(min(fitting, key=lambda n: self._free[n].nbytes))[:nbytes]
        return allocate_bytes(nbytes, device)

    def give_back(self, buffer: Tensor) -> None:
        """Let the next one overwrite it. Nothing may read it any more."""
        base = buffer if buffer._base is None else buffer._base
        if base.device.type != "cpu" or base.nbytes > MAX_POOL_BYTES:
            return
        self._free.append(base)
        while len(self._free) > MAX_POOL_BUFFERS or sum(t.nbytes for t in self._free) > MAX_POOL_BYTES:
            del self._free[0]

    def clear(self) -> None:
        """Let go of all memory."""
        self._free.clear()


def allocate_bytes(nbytes: int, device: torch.device) -> Tensor:
    """New bytes, which may be written to within inference mode and outside of it."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


buffer_pool = BufferPool()
