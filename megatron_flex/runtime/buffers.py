"""Memory for copies of shards, used again at each step: what is sent together is copied to one place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.collectives import allocate_bytes, align_size

FIRST_BLOCK_BYTES = 1 << 16  # bytes of a tape's first piece


@dataclass(slots=True)
class TapeBlock:
    """A run of bytes, filled up to `used`."""

    name: Hashable
    flat: Tensor
    used: int = 0


class CopyTapes:
    """Tapes of bytes: copies lie one after the other, so that nothing need be packed to be sent.

    A tape grows by pieces. Once it is known how much a step writes, one piece takes it all: fresh pages cost
    more than the copying.
    """

    def __init__(self) -> None:
        self._written: list[TapeBlock] = []  # the last one of each name is being filled
        self._free: dict[Hashable, list[TapeBlock]] = {}
        self._want: dict[Hashable, int] = {}  # bytes that a piece should have
        self._cap: dict[Hashable, int] = {}

    def copy(self, tensor: Tensor, name: Hashable, most: int) -> Tensor:
        """A contiguous copy at the end of a tape.

        Args:
            tensor: what is copied.
            name: the tape's; each device has its own of that name.
            most: bytes of a piece, unless a single tensor has more.
        """
        key, size = (name, tensor.device), align_size(tensor.nbytes)
        block = next((p for p in reversed(self._written) if p.name == key), None)
        if block is None or block.used + size > block.flat.nbytes:
            block = self._open(key, size, most, tensor.device)
        end = block.used + tensor.nbytes
        out = block.flat[block.used : end].view(tensor.dtype).reshape(tensor.shape)
        block.used += size
        return out.copy_(tensor)

    def take(self) -> list[TapeBlock]:
        """Hand out what was written; the next copy begins new tapes."""
        written, self._written = self._written, []
        for name in {p.name for p in written}:
            now = min(sum(p.used for p in written if p.name == name), self._cap[name])
            self._want[name] = max(self._want.get(name, FIRST_BLOCK_BYTES), now)
        return written

    def give_back(self, blocks: list[TapeBlock]) -> None:
        """Let the next copies overwrite what was handed out; pieces that are too small are let go of."""
        for block in blocks:
            block.used = 0
            free = self._free.setdefault(block.name, [])
            if block.flat.nbytes >= self._want.get(block.name, 0):
                free.append(block)
            self._free[block.name] = [p for p in free if p.flat.nbytes >= self._want.get(p.name, 0)]

    def clear(self) -> None:
        """Let go of all memory."""
        self._written.clear()
        self._free.clear()
        self._want.clear()

    def _open(self, key: Hashable, size: int, most: int, device: torch.device) -> TapeBlock:
        """Begin a piece; the first of a tape as large as any tape was, each further one doubling it."""
        so_far = sum(p.used for p in self._written if p.name == key)
        self._cap[key] = most
        length = max(size, min(most, max(so_far, self._want.get(key, FIRST_BLOCK_BYTES))))
        free = self._free.get(key, [])
        fitting = [n for n, p in enumerate(free) if p.flat.nbytes >= size]
        block = free.pop(fitting[0]) if fitting else TapeBlock(key, allocate_bytes(length, device))
        self._written.append(block)
        return block
