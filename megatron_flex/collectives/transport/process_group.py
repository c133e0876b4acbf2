"""Captures by collectives: copies of the local shards, gathered on the receiving rank in few messages.

The copies are stored, in the order in which they are sent, in memory that each step reuses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives.expert_route import Route
from megatron_flex.collectives.leader_gather import (
    GatherStep,
    LeaderGather,
    PendingShard,
    plan_read,
    takes_part,
)
from megatron_flex.collectives.messages import align_size, allocate_bytes, buffer_pool
from megatron_flex.collectives.planned_gather import GatheredShard, GatherPlan, PlannedGather, plan_gather
from megatron_flex.collectives.transport.interface import Arrival, TransportBytes, Watch
from megatron_flex.config import flex_config
from megatron_flex.layout import Layout, full_shape
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


MAX_SEND_PLANS = 4096  # layouts and shapes that are remembered
MAX_BATCH_PLANS = 64  # sets of captures that are remembered


@dataclass(slots=True)
class _PendingCapture:
    tag: Any
    layout: Layout
    tensor: Tensor | None  # None on a rank whose shard is not needed
    route: Route | None = None
    plan: _SendPlan | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class _SendPlan:
    """How all local shards of one layout and shape are sent.

    Attributes:
        layout: itself: while it is here no other one is found by its identity.
        shape: of the shards.
        needed: whether the shard of this rank is.
        steps: in which it is sent.
        entries: of the full tensor, if all ranks count the same number.
    """

    layout: Layout
    shape: torch.Size
    needed: bool
    steps: list[GatherStep]
    entries: int


@dataclass(frozen=True, slots=True)
class _BatchPlan:
    """How all captures of such steps are sent.

    Attributes:
        plans: of the captures: while they are here no other ones are found by their identity.
        gather: the plan of the gather; None where each step plans its own.
    """

    plans: list[_SendPlan]
    gather: GatherPlan | None


@dataclass(slots=True)
class _InFlight:
    """Captures that are being sent: as recorded, in the order of sending, and the memory that holds them."""

    recorded: list[_PendingCapture]
    order: list[_PendingCapture]
    blocks: list[TapeBlock]
    sending: LeaderGather | PlannedGather


class ProcessGroupTransport:
    """Gathers captures over the process groups of the mesh. It carries every capture, on any machine."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._pending: list[_PendingCapture] = []
        self._waiting_bytes = 0
        self._buffers = CopyTapes()
        self._sent: _InFlight | None = None
        self._plans: dict[tuple[int, torch.Size], _SendPlan] = {}
        self._batches: dict[tuple[Any, ...], _BatchPlan] = {}

    @classmethod
    def open(cls, mesh: Mesh, watch: Watch | None) -> ProcessGroupTransport:
        """Always available, and set up without communication; collectives wait without `watch`."""
        return cls(mesh)

    combines = False

    @property
    def active(self) -> bool:
        """Whether captures wait to be sent, or are being sent."""
        return bool(self._pending or self._sent)

    def submit(self, tag: Any, local: Tensor, layout: Layout, route: Route | None = None) -> bool:
        """Copy the local shard if the receiving rank needs it: `Transport.submit`."""
        if route is not None:  # the rows of every rank are needed: they go back to their tokens first
            kept = self._buffers.copy(local, "rows", flex_config.bucket_bytes)
            self._pending.append(_PendingCapture(tag, layout, kept, route))
            return True
        plan = self._plan(layout, local.shape)
        shard = self._copy(local, plan) if plan.needed else None
        self._pending.append(_PendingCapture(tag, layout, shard, None, plan, local.dtype))
        self._waiting_bytes += plan.entries * local.element_size()
        return True

    def start(self) -> list[Arrival]:
        """Begin to send if many bytes wait; earlier sends are awaited first.

        So no more than two batches are in memory. All ranks decide alike, from the sizes of full tensors.
        """
        return self._post() if self._waiting_bytes > flex_config.pending_bytes else []

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
        """Discard what was submitted, and release all memory."""
        self._pending.clear()
        self._sent = None
        self._buffers.clear()
        buffer_pool.clear()
        self._waiting_bytes = 0

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
        todo, self._pending, self._waiting_bytes = self._pending, [], 0
        # Rows of experts last, as their copies lie in memory.
        order = sorted(todo, key=lambda p: p.route is not None) if any(p.route for p in todo) else todo
        for pending in order:
            if pending.route is not None and pending.tensor is not None:
                rows = pending.route.to_tokens(pending.tensor)
                pending.plan = self._plan(pending.layout, rows.shape)
                pending.tensor = self._copy(rows, pending.plan) if pending.plan.needed else None
        self._sent = _InFlight(todo, order, self._buffers.take(), self._begin(order))
        return arrived

    def _begin(self, order: list[_PendingCapture]) -> LeaderGather | PlannedGather:
        """Begin the gather of captures, by the plan of such captures if there is one."""
        planned = self._find_batch(order)
        if planned is not None:
            return PlannedGather(planned, [p.tensor for p in order])
        parcels = [
            PendingShard(
                p.layout, [] if p.tensor is None else [p.tensor], bool(plan_read(p.layout, self.mesh))
            )
            for p in order
        ]
        return LeaderGather(parcels, self.mesh, flex_config.bucket_bytes)

    def _find_batch(self, order: list[_PendingCapture]) -> GatherPlan | None:
        """The plan of captures like these; None where there is none."""
        at = tuple([(id(p.plan), p.dtype) for p in order])
        found = self._batches.get(at)
        if found is None:
            plans = [p.plan for p in order if p.plan is not None]
            shards = [
                GatheredShard(p.layout, p.plan.shape, p.dtype, p.plan.needed)
                for p in order
                if p.route is None and p.plan is not None and p.dtype is not None
            ]
            local = all(p.tensor is None or p.tensor.is_cpu for p in order)
            most = flex_config.bucket_bytes
            plan = plan_gather(shards, self.mesh, most) if local and len(shards) == len(order) else None
            if len(self._batches) >= MAX_BATCH_PLANS:
                self._batches.clear()
            found = self._batches[at] = _BatchPlan(plans, plan)
        return found.gather

    def _wait(self) -> list[Arrival]:
        """Wait for what is being sent."""
        if self._sent is None:
            return []
        sent, self._sent = self._sent, None
        for pending, full in zip(sent.order, sent.sending.wait(), strict=True):
            order = pending.route.order if pending.route else None
            pending.tensor = full if full is None or order is None else full[order]
        self._buffers.give_back(sent.blocks)
        return [(p.tag, p.tensor) for p in sent.recorded if p.tensor is not None]

    def _plan(self, layout: Layout, shape: torch.Size) -> _SendPlan:
        found = self._plans.get((id(layout), shape))
        if found is None:
            if len(self._plans) >= MAX_SEND_PLANS:
                self._plans.clear()
            even = not any(d.uneven for d in layout.dims)
            entries = prod(full_shape(layout, shape, self.mesh.sizes)) if even else 0
            needed = takes_part(layout, self.mesh)
            found = _SendPlan(layout, shape, needed, plan_read(layout, self.mesh), entries)
            self._plans[id(layout), shape] = found
        return found

    def _copy(self, tensor: Tensor, plan: _SendPlan) -> Tensor:
        """A copy, after those that are sent with it; of a tensor that is not sent a copy of its own."""
        if not plan.steps:
            return tensor.clone(memory_format=torch.contiguous_format)
        first = plan.steps[0]
        tape = (first, tensor.dtype if first.op == "sum" else None)
        return self._buffers.copy(tensor, tape, flex_config.bucket_bytes)
