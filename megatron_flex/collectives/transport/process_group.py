"""Captures by collectives: copies of the local shards, gathered on the receiving rank in few messages.

The copies are stored, in the order in which they are sent, in memory that each step reuses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from megatron_flex.collectives.expert_route import Route
from megatron_flex.collectives.gather_plan import CapturedShard, plan_gather
from megatron_flex.collectives.leader_gather import ShardGather, exchange_shapes
from megatron_flex.collectives.messages import align_size, allocate_bytes, buffer_pool
from megatron_flex.collectives.transport.interface import Arrival, TransportBytes, Watch
from megatron_flex.config import flex_config
from megatron_flex.layout import Layout, Lengths, full_shape, uneven_lengths
from megatron_flex.mesh import Mesh

FIRST_BLOCK_BYTES = 1 << 16  # bytes of a tape's first piece


@dataclass(slots=True)
class TapeBlock:
    """A run of bytes, filled up to `used`."""

    name: Hashable
    flat: Tensor
    used: int = 0


class CopyTapes:
    """Tapes of bytes: copies are stored one after the other, so that sending needs no packing.

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
        """Return the written tapes; the next copy begins new tapes."""
        written, self._written = self._written, []
        for name in {p.name for p in written}:
            now = min(sum(p.used for p in written if p.name == name), self._cap[name])
            self._want[name] = max(self._want.get(name, FIRST_BLOCK_BYTES), now)
        return written

    def give_back(self, blocks: list[TapeBlock]) -> None:
        """Let the next copies overwrite the returned tapes; buffers that are too small are released."""
        for block in blocks:
            block.used = 0
            free = self._free.setdefault(block.name, [])
            if block.flat.nbytes >= self._want.get(block.name, 0):
                free.append(block)
            self._free[block.name] = [p for p in free if p.flat.nbytes >= self._want.get(p.name, 0)]

    def clear(self) -> None:
        """Release all memory."""
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


MAX_SHARDS = 4096  # layouts, shapes and dtypes that are remembered
MAX_PLANS = 64  # sets of captures that are remembered
TAG_MASK = 0x7FFFFFFF  # the tag of a message is a signed number of 32 bits


@dataclass(slots=True)
class _PendingCapture:
    tag: Any
    layout: Layout
    tensor: Tensor | None  # None on a rank whose shard is not needed
    device: torch.device
    shard: CapturedShard | None = None  # of a route none, until the rows are back at their tokens
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Captures that are being sent: as recorded, in the order of sending, and the memory that holds them."""

    recorded: list[_PendingCapture]
    order: list[_PendingCapture]
    blocks: list[TapeBlock]
    gather: ShardGather


class ProcessGroupTransport:
    """Gathers captures over the process groups of the mesh. It carries every capture, on any machine."""

    def __init__(self, mesh: Mesh, name: str = "") -> None:
        self.mesh, self._name = mesh, name
        self._pending: list[_PendingCapture] = []
        self._waiting_bytes = 0
        self._waiting_unknown = False
        # The lengths of uneven shards that the ranks exchanged last, by which they count those that follow.
        self._lengths: dict[Layout, Lengths] = {}
        self._buffers = CopyTapes()
        self._sent: _InFlight | None = None
        self._shard_of = lru_cache(MAX_SHARDS)(partial(CapturedShard.from_layout, mesh=mesh))
        self._plan = lru_cache(MAX_PLANS)(partial(plan_gather, mesh=mesh))

    @classmethod
    def open(cls, mesh: Mesh, watch: Watch | None, name: str) -> ProcessGroupTransport:
        """Always available, and set up without communication; collectives wait without `watch`."""
        return cls(mesh, name)

    combines = False

    @property
    def active(self) -> bool:
        """Whether captures wait to be sent, or are being sent."""
        return bool(self._pending or self._sent)

    def submit(self, tag: Any, local: Tensor, layout: Layout, route: Route | None = None) -> bool:
        """Copy the local shard if the receiving rank needs it: `Transport.submit`."""
        pending = _PendingCapture(tag, layout, None, local.device, route=route)
        if route is None:
            pending.shard = self._shard_of(layout, local.shape, local.dtype)
            self._count(pending.shard)
            pending.tensor = self._copy(local, pending.shard)
        else:  # the rows of every rank are needed: they go back to their tokens first
            self._waiting_bytes += route.count_bytes(local)
            pending.tensor = self._buffers.copy(local, "rows", flex_config.bucket_bytes)
        self._pending.append(pending)
        return True

    def _count(self, shard: CapturedShard) -> None:
        """Count a capture among those that wait, as all ranks count it."""
        if shard.full_bytes is not None:
            self._waiting_bytes += shard.full_bytes
        elif shard.layout in self._lengths:
            lengths = self._lengths[shard.layout]
            shape = full_shape(shard.layout, shard.shape, self.mesh.sizes, lengths)
            self._waiting_bytes += prod(shape) * shard.dtype.itemsize
        else:
            self._waiting_unknown = True

    def start(self) -> list[Arrival]:
        """Begin to send if many bytes wait; earlier sends are awaited first.

        So no more than two batches are in memory. All ranks decide alike, from the sizes of full tensors.
        Shards that differ in length are sent at once the first time: the ranks then know how long they are.
        """
        large = self._waiting_unknown or self._waiting_bytes > flex_config.pending_bytes
        return self._post() if large else []

    def collect(self, flags: Sequence[int], at: str) -> tuple[list[int], str]:
        """Nothing is sent before the ranks agree that the step is good."""
        return list(flags), ""

    def finish(self) -> list[Arrival]:
        """Send everything and wait for it.

        Collective within the stage: `tp` and `cp`, and for the tensors of experts `ep` and `etp`.
        """
        if not self.active:  # in steps like this one shared memory carries all captures
            self._buffers.clear()
            return []
        return self._post() + self._wait()

    def drop(self, failed: bool) -> None:
        """Discard what was submitted, and release all memory but that of messages in transit.

        Another rank may never send or receive them, so this one does not wait for them.
        """
        self._pending.clear()
        self._sent = None
        self._buffers.clear()
        buffer_pool.clear()
        self._waiting_bytes, self._waiting_unknown = 0, False

    def close(self) -> None:
        """Discard what was submitted, and release all memory."""
        self.drop(failed=True)

    @staticmethod
    def estimate(part: int, ranks_per_node: Sequence[int]) -> TransportBytes:
        """Shards go from device to device; inner axes are gathered first: one rank of a node sends."""
        others = ranks_per_node[1:]
        return TransportBytes(0, max(others, default=0) * part, sum(others) * part)

    def _post(self) -> list[Arrival]:
        arrived = self._wait()
        todo, self._pending = self._pending, []
        self._waiting_bytes, self._waiting_unknown = 0, False
        if not todo:
            return arrived
        # Rows of experts last, as their copies lie in memory.
        order = sorted(todo, key=lambda p: p.route is not None) if any(p.route for p in todo) else todo
        for pending in order:
            if pending.route is not None and pending.tensor is not None:
                rows = pending.route.to_tokens(pending.tensor)
                pending.shard = self._shard_of(pending.layout, rows.shape, rows.dtype)
                pending.tensor = self._copy(rows, pending.shard)
        self._sent = _InFlight(todo, order, self._buffers.take(), self._begin(order))
        return arrived

    def _begin(self, order: list[_PendingCapture]) -> ShardGather:
        shards = [p.shard for p in order if p.shard is not None]
        device = next((p.device for p in order if p.shard is not None and p.shard.full_bytes is None), None)
        if device is not None:
            shards = exchange_shapes(shards, self.mesh, device)
            self._note_lengths(shards)
        plan = self._plan(tuple(shards), most=flex_config.bucket_bytes)
        # Messages of a dropped step, also of an earlier session, are not taken for those of this one.
        tag = crc32(f"{self._name} {order[0].tag}".encode()) & TAG_MASK
        return ShardGather(plan, [p.tensor for p in order], self.mesh, owned=True, tag=tag)

    def _note_lengths(self, shards: Sequence[CapturedShard]) -> None:
        if len(self._lengths) > MAX_SHARDS:
            self._lengths.clear()
        for shard in shards:
            if shard.shapes:
                dims = Layout(shard.layout.dims)
                self._lengths[shard.layout] = uneven_lengths(dims, shard.shapes, self.mesh.sizes)

    def _wait(self) -> list[Arrival]:
        """Wait for what is being sent."""
        if self._sent is None:
            return []
        sent, self._sent = self._sent, None
        for pending, full in zip(sent.order, sent.gather.wait(), strict=True):
            order = pending.route.gather_order() if pending.route else None
            pending.tensor = full if full is None or order is None else full[order]
        self._buffers.give_back(sent.blocks)
        return [(p.tag, p.tensor) for p in sent.recorded if p.tensor is not None]

    def _copy(self, tensor: Tensor, shard: CapturedShard) -> Tensor | None:
        """Copy a shard behind those that the same message sends, or by itself if it is not sent.

        Returns:
            The copy; None if this rank does not take part in the gather.
        """
        if not shard.needed:
            return None
        if not shard.steps:
            return tensor.clone(memory_format=torch.contiguous_format)
        first = shard.steps[0]
        tape = (first, tensor.dtype if first.op == "sum" else None)
        return self._buffers.copy(tensor, tape, flex_config.bucket_bytes)
