"""Gathers captures on the leader of a stage: sends the messages of a plan, and makes the full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.gather_plan import (
    CapturedShard,
    FullTensorRead,
    GatherPlan,
    Message,
    plan_gather,
)
from megatron_flex.collectives.gather_scatter import stack_along
from megatron_flex.collectives.messages import begin_collective, begin_gather_to_first, buffer_pool, pack
from megatron_flex.layout import Layout, coordinates, single_device_view
from megatron_flex.mesh import Axis, Mesh


def gather_to_leader(tensors: Sequence[tuple[Layout, Tensor]], mesh: Mesh, most: int) -> list[Tensor | None]:
    """Assemble tensors on the leader of each stage.

    Collective over the axes of the layouts: every rank of a group passes the same layouts in the same order.

    Args:
        tensors: the local shards with their layouts, on one device.
        mesh: the run's axes.
        most: maximum bytes of one message of a rank; larger data are split into several messages.

    Returns:
        For each the full tensor on the leader, None elsewhere; it may share memory with the shard.
    """
    shards = [CapturedShard.from_layout(layout, t.shape, t.dtype, mesh) for layout, t in tensors]
    shards = exchange_shapes(shards, mesh, tensors[0][1].device)
    needed = [t if s.needed else None for s, (_, t) in zip(shards, tensors, strict=True)]
    return ShardGather(plan_gather(tuple(shards), mesh, most), needed, mesh).wait()


def exchange_shapes(shards: Sequence[CapturedShard], mesh: Mesh, device: torch.device) -> list[CapturedShard]:
    """The captures with the shapes of all shards, where these may differ.

    Collective over the axes of the layouts of such captures: one small all-gather for each, of all captures
    at once.

    Args:
        shards: the captures, also those in which this rank takes no part.
        mesh: the run's axes.
        device: that the axes' backend uses.
    """
    uneven = {n: s.layout for n, s in enumerate(shards) if s.full_bytes is None}
    if not uneven:
        return list(shards)
    names = {s.axis for n in uneven for s in shards[n].steps if s.op == "gather"}
    axes = [a for a in (*mesh.axes, *mesh.experts) if a.name in names]
    lengths = torch.tensor([length for n in uneven for length in shards[n].shape])
    flat = lengths.to(device, non_blocking=True)  # the driver takes so few bytes at once
    for axis in reversed(axes):
        flat = stack_along(flat, axis)
    rows, first, out = flat.view(-1, len(lengths)).tolist(), 0, list(shards)
    for n, layout in uneven.items():
        end = first + len(shards[n].shape)
        shapes = []
        for coords in coordinates(Layout(layout.dims), mesh.sizes):
            at = 0
            for axis in axes:
                at = at * axis.size + coords.get(axis.name, axis.coord)
            shapes.append(tuple(rows[at][first:end]))
        out[n], first = replace(shards[n], shapes=tuple(shapes)), end
    return out


class ShardGather:
    """An asynchronous gather by a plan, which the constructor starts.

    The constructor and `wait` are collective over the axes in the plan: every rank of a group calls both with
    its plan of the same captures.

    Args:
        plan: the plan of this rank.
        shards: for each capture the local shard; None where this rank takes no part.
        mesh: the run's axes.
        owned: whether the memory of shards that are sent may be overwritten.
        tag: of messages between two ranks: those of another tag are not taken for these.
    """

    def __init__(
        self,
        plan: GatherPlan,
        shards: Sequence[Tensor | None],
        mesh: Mesh,
        owned: bool = False,
        tag: int = 0,
    ) -> None:
        self.plan, self._mesh, self._owned, self._tag = plan, mesh, owned, tag
        self._slots = [[] if s is None else [s] for s in shards]
        self._entries: dict[
            int, Tensor
        ] = {}  # received messages, for captures that are read from them at once
        self._buffers: list[Tensor] = []
        self._progress = self._run()
        next(self._progress, None)

    def wait(self) -> list[Tensor | None]:
        """Wait, and return for each capture the full tensor on the leader, None elsewhere. Call it once.

        The full tensor has separate memory, or that of its shard where no collective was needed.
        """
        for _ in self._progress:
            pass
        full = [None if read is None else self._read(n, read) for n, read in enumerate(self.plan.reads)]
        for buffer in self._buffers:
            buffer_pool.give_back(buffer)
        return full

    def _run(self) -> Iterator[None]:
        """Start the messages of one step; resume after the wait for them."""
        for messages in self.plan.messages:
            sent = [self._sum(m) if m.step.op == "sum" else self._gather(m) for m in messages]
            yield
            for message, (work, parts) in zip(messages, sent, strict=True):
                if work is not None:
                    work.wait()
                if parts:
                    self._store(message, parts)

    def _sum(self, message: Message) -> tuple[Any, list[Tensor]]:
        """Begin a reduction; its result is one message."""
        shards = [self._slots[n][0] for n, _ in message.captures]
        flat, axis = pack(shards, message.widths), self._mesh[message.step.axis]
        if not self._owned and flat.untyped_storage().data_ptr() == shards[0].untyped_storage().data_ptr():
            flat = flat.clone()
        if not message.nbytes or message.dtype is None:
            return None, [flat]
        total = flat.view(message.dtype)
        return begin_collective("reduce", axis, total, dist.reduce, total, axis.ranks[0]), [flat]

    def _gather(self, message: Message) -> tuple[Any, list[Tensor]]:
        """Begin to send a message, or to receive those of all ranks."""
        message_bytes = pack([t for n, _ in message.captures for t in self._slots[n]], message.widths)
        axis = self._mesh[message.step.axis]
        rows: list[Tensor] = []
        if axis.coord == 0:
            rows = self._take_rows(message, axis, message_bytes)
        work = begin_gather_to_first(message_bytes, rows[1:], axis, self._tag) if message.nbytes else None
        return work, rows

    def _take_rows(self, message: Message, axis: Axis, message_bytes: Tensor) -> list[Tensor]:
        """Memory for the messages of all ranks, of which the first is this rank's."""
        count = axis.size if message.kept else axis.size - 1
        buffer = buffer_pool.take(message.row * count, message_bytes.device)
        self._buffers.append(buffer)
        rows = list(buffer.view(count, message.row)[:, : message.nbytes].unbind())
        if not message.kept:
            return [message_bytes, *rows]
        rows[0].copy_(message_bytes)
        entries: dict[torch.dtype, Tensor] = {}
        for n, _ in message.captures:
            read = self.plan.reads[n]
            if read is not None and read.view is not None:
                if read.dtype not in entries:
                    entries[read.dtype] = buffer.view(read.dtype)
                self._entries[n] = entries[read.dtype]
        return rows

    def _store(self, message: Message, parts: Sequence[Tensor]) -> None:
        """Replace the shards by those that arrived; the last gathered axis counts slowest."""
        first = 0
        for n, count in message.captures:
            places = range(first, first + count)
            first += count
            if n not in self._entries:
                self._slots[n] = [
                    part[message.places[i] : message.places[i] + message.widths[i]]
                    for part in parts
                    for i in places
                ]

    def _read(self, n: int, read: FullTensorRead) -> Tensor:
        if read.copy is None and read.view is not None:
            whole = self._entries[n].as_strided(*read.view)
            return whole.clone(memory_format=torch.contiguous_format).view(read.shape)
        if read.copy is None:
            shard = _view_as(self._slots[n][0], read.dtype, read.shape)
            full = single_device_view(read.layout, shard)
            return full.clone(memory_format=torch.contiguous_format) if read.summed else full.contiguous()
        entries = self._entries.get(n)
        if entries is not None and read.view is not None:
            out = entries.new_empty(read.shape)
            read.copy(entries.as_strided(*read.view), out)
            return out
        slots = self._slots[n]
        shards = [
            _view_as(slots[at], read.dtype, shape) for at, shape in zip(read.order, read.shapes, strict=True)
        ]
        out = shards[0].new_empty(read.shape)
        read.copy(shards, out)
        return out


def _view_as(slot: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor at the beginning of a run of bytes."""
    if slot.dtype == dtype and slot.shape == shape:
        return slot
    return slot[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
