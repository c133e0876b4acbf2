"""Memory for copies of shards, used again at each step."""

from __future__ import annotations

import torch
from torch import Tensor


class Buffers:
    """Memory for copies of shards, used again at each step: fresh pages cost more than the copying."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy, in memory that was given back if there is some of that shape."""
        free = self._free.get((tensor.shape, tensor.dtype, tensor.device))
        buffer = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return buffer.copy_(tensor)

    def give_back(self, tensor: Tensor) -> None:
        """Let the next copy overwrite a tensor."""
        self._free.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(tensor)

    def clear(self) -> None:
        """Let go of all memory."""
        self._free.clear()
