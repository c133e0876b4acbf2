"""Gathers captures on the leader of a stage: one coalesced gather of all shards.

Only ranks that hold a shard that the leader needs take part, and only the leader receives. Sums precede
gathers, and inner axes precede outer ones, so that all shards along one axis, of any site and dtype, go into
the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.gather_scatter import stack_along
from megatron_flex.collectives.messages import (
    align_size,
    begin_collective,
    begin_gather_to_first,
    buffer_pool,
    group_by_size,
    message_offsets,
    pack,
)
from megatron_flex.layout import Layout, assemble, coordinates
from megatron_flex.mesh import Axis, Mesh

REPLICA_AXES = ("dp", "pp")  # axes along which ranks have different data or sites, each with its own leader


@dataclass(slots=True)
class PendingShard:
    """One shard to be gathered; on the ranks that collect, `shards` grows.

    Attributes:
        layout: the layout of the shards.
        shards: this rank's shard, if the rank takes part.
        owned: whether the memory of `shards` may be overwritten and reused.
    """

    layout: Layout
    shards: list[Tensor]
    owned: bool = False


@dataclass(frozen=True, slots=True)
class GatherStep:
    """One collective of a gather to the leader: `sum` or `gather` along one axis, to coordinate 0."""

    op: str
    axis: str


def plan_read(layout: Layout, mesh: Mesh) -> list[GatherStep]:
    """The collectives of a gather to the leader. No communication.

    Every plan is a subsequence of one global order: sums, then gathers, inner axes first.
    """
    inner = {a.name: n for n, a in enumerate(reversed((*mesh.experts, *mesh.axes)))}
    live = sorted((a for a in layout.axes if mesh[a].size > 1), key=lambda a: inner[a])
    sums = [GatherStep("sum", a) for a in live if a in layout.partial]
    return sums + [GatherStep("gather", a) for a in live if a not in layout.partial]


def takes_part(layout: Layout, mesh: Mesh) -> bool:
    """Whether the leader needs the local shard; otherwise the shard need not be stored."""
    split = {s.axis for s in plan_read(layout, mesh)}
    return mesh.is_first(a.name for a in mesh if a.name not in split and a.name not in REPLICA_AXES)


def is_leader(mesh: Mesh) -> bool:
    """Whether this rank receives the captures of its pipeline stage."""
    return mesh.is_first(a.name for a in mesh if a.name not in REPLICA_AXES)


def is_leader_for(layout: Layout, mesh: Mesh) -> bool:
    """Whether this rank receives captures in `layout`, which may be sharded over data parallel ranks too."""
    return is_leader(mesh) and ("dp" not in layout.axes or mesh["dp"].coord == 0)


def gather_to_leader(parcels: Sequence[PendingShard], mesh: Mesh, most: int) -> list[Tensor | None]:
    """Assemble parcels on the leader of each stage: a `LeaderGather` with an immediate wait."""
    return LeaderGather(parcels, mesh, most).wait()


class LeaderGather:
    """An asynchronous gather of parcels to the leader of each stage, which the constructor starts.

    The constructor and `wait` are collective over the axes in the parcels' plans: every rank of a group calls
    both with the same parcels in the same order. The gather sends one message of each rank along each axis,
    one reduction for each axis and dtype summed over it, and one small all-gather for each axis of uneven
    sharding.

    Args:
        parcels: one for each capture, with the local shard; ranks that take no part pass unused shards.
        mesh: the run's axes.
        most: maximum bytes of one message of a rank; larger data are split into several messages.
    """

    def __init__(self, parcels: Sequence[PendingShard], mesh: Mesh, most: int) -> None:
        self._mesh, self._most = mesh, most
        self._items = [ShardInTransit(p, plan_read(p.layout, mesh)) for p in parcels]
        self._mine = {n for n, i in enumerate(self._items) if takes_part(i.parcel.layout, mesh)}
        self._taken: list[Tensor] = []
        self._way = self._go()
        next(self._way, None)

    def wait(self) -> list[Tensor | None]:
        """Wait, and return for each parcel the full tensor on the leader, None elsewhere. Call it once.

        The full tensor has separate memory, or that of its shard where no collective was needed.
        """
        for _ in self._way:
            pass
        leader = is_leader(self._mesh)
        here = [leader and n in self._mine for n in range(len(self._items))]
        full_tensors = [
            i.assemble_full(self._mesh) if h else None for i, h in zip(self._items, here, strict=True)
        ]
        for buffer in self._taken:
            buffer_pool.give_back(buffer)
        return full_tensors

    def _go(self) -> Iterator[None]:
        """Start the collectives along one axis; resume after the wait for them."""
        self._measure()
        for step, indices in order_steps([i.steps for i in self._items]):
            axis, now = self._mesh[step.axis], [self._items[n] for n in indices if n in self._mine]
            if now:
                pending = self._sum(now, axis) if step.op == "sum" else self._gather(now, axis)
                yield
                for work, arrive in pending:
                    if work is not None:
                        work.wait()
                    arrive()
            if axis.coord:
                self._mine.difference_update(indices)

    def _measure(self) -> None:
        """Exchange the shapes of uneven shards, of all parcels at once."""
        for n in self._mine:
            self._items[n].measure()
        asked = [n for n, i in enumerate(self._items) if i.uneven(self._mesh) and n in self._mine]
        for axis in _step_axes([self._items[n].steps for n in asked], "gather"):
            now = [self._items[n] for n in asked if GatherStep("gather", axis) in self._items[n].steps]
            lengths = torch.tensor([n for i in now for s in i.shapes for n in s])
            flat = lengths.to(now[0].device, non_blocking=True)  # the driver takes so few bytes at once
            rows = iter(stack_along(flat, self._mesh[axis]).flatten().tolist())
            before = [[len(s) for s in i.shapes] for i in now]
            for item in now:
                item.shapes = []
            for _ in range(self._mesh[axis].size):
                for item, dims in zip(now, before, strict=True):
                    item.shapes += [tuple(int(next(rows)) for _ in range(n)) for n in dims]

    def _sum(self, items: list[ShardInTransit], axis: Axis) -> PendingWork:
        out: PendingWork = []
        for dtype in dict.fromkeys(i.parcel.shards[0].dtype for i in items):
            alike = [i for i in items if i.parcel.shards[0].dtype == dtype]
            for group in group_by_size([align_size(i.parcel.shards[0].nbytes) for i in alike], self._most):
                now = [alike[n] for n in group]
                shards = [i.parcel.shards[0] for i in now]
                flat = pack(shards, [s.nbytes for s in shards])
                shared = flat.untyped_storage().data_ptr() == shards[0].untyped_storage().data_ptr()
                if shared and not all(i.parcel.owned for i in now):
                    flat = flat.clone()
                total = flat.view(dtype)
                args = (total, axis.ranks[0])
                work = begin_collective("reduce", axis, total, dist.reduce, *args) if total.nbytes else None
                out.append((work, partial(_store_sums, now, flat)))
        return out

    def _gather(self, items: list[ShardInTransit], axis: Axis) -> PendingWork:
        out: PendingWork = []
        sizes = [align_size(i.width) * len(i.parcel.shards) for i in items]
        for group in group_by_size(sizes, self._most):
            now = [items[n] for n in group]
            widths = [i.width for i in now for _ in i.parcel.shards]
            mine = pack([s for i in now for s in i.parcel.shards], widths)
            slots, rows = None, torch.empty(0)
            if axis.coord == 0:
                step = align_size(mine.nbytes)
                buffer_rows = buffer_pool.take(step * (axis.size - 1), mine.device)
                self._taken.append(buffer_rows)
                rows = buffer_rows.view(axis.size - 1, step)[:, : mine.nbytes]
                slots = [mine, *rows]  # the rank's own message needs no copy
            work = begin_gather_to_first(mine, list(rows), axis) if mine.nbytes else None
            out.append((work, partial(_store_gathered, now, widths, slots)))
        return out


PendingWork = list[tuple[Any, Callable[[], None]]]  # work to wait for, and a function to call after it


class ShardInTransit:
    """The state of a parcel during its gather.

    Attributes:
        parcel: the parcel; after a gather along an axis its shards are slots of `width` bytes.
        steps: the remaining steps.
        shapes: the shape of the local shard, and at the end the shapes of all shards, the last gathered axis
            counting slowest; a single shape if all are equal.
        device: the device of the shard.
        dtype: the dtype of the shard.
    """

    def __init__(self, parcel: PendingShard, steps: list[GatherStep]) -> None:
        self.parcel, self.steps = parcel, steps
        self.shapes: list[tuple[int, ...]] = []
        self.device, self.dtype = torch.device("cpu"), torch.uint8

    def measure(self) -> None:
        """Record the shape, device and dtype of the local shard."""
        shard = self.parcel.shards[0]
        self.shapes, self.device, self.dtype = [tuple(shard.shape)], shard.device, shard.dtype

    def uneven(self, mesh: Mesh) -> bool:
        """Whether the shards may differ in length."""
        cut = [d for d in self.parcel.layout.dims if any(mesh[c.axis].size > 1 for c in d.cuts)]
        return any(d.uneven for d in cut)

    @property
    def width(self) -> int:
        """The size of the largest shard in bytes."""
        return max(prod(s) for s in self.shapes) * self.dtype.itemsize

    def assemble_full(self, mesh: Mesh) -> Tensor:
        """Assemble the full tensor from the received shards."""
        old = self.parcel.layout
        layout = Layout(old.dims, (), old.shared, old.permute)
        shards = self.parcel.shards
        axes = [s.axis for s in self.steps if s.op == "gather"]
        if not axes:
            assemble_full = assemble(layout, shards, mesh.sizes)
            keep = torch.contiguous_format
            return (
                assemble_full.clone(memory_format=keep) if self.parcel.owned else assemble_full.contiguous()
            )
        shapes = self.shapes if len(self.shapes) > 1 else self.shapes * len(shards)
        shaped = [
            t[: prod(n) * self.dtype.itemsize].view(self.dtype).reshape(n)
            for t, n in zip(shards, shapes, strict=True)
        ]
        order = []
        for coords in coordinates(layout, mesh.sizes):
            at = 0
            for axis in reversed(axes):
                at = at * mesh[axis].size + coords[axis]
            order.append(shaped[at])
        return assemble(layout, order, mesh.sizes)


def order_steps(plans: Sequence[Sequence[GatherStep]]) -> list[tuple[GatherStep, list[int]]]:
    """The steps in order, each with the indices of its parcels.

    The result depends on all plans, also of parcels in which this rank takes no part: ranks that take part in
    different parcels must agree on the parcels of each collective. Each step occurs once, since all plans are
    subsequences of one order.
    """
    left = {i: list(steps) for i, steps in enumerate(plans) if steps}
    out: list[tuple[GatherStep, list[int]]] = []
    while left:
        later = {s for steps in left.values() for s in steps[1:]}
        step = next(steps[0] for steps in left.values() if steps[0] not in later)
        now = [i for i, steps in left.items() if steps[0] == step]
        left = {i: steps[1:] if i in now else steps for i, steps in left.items() if i not in now or steps[1:]}
        out.append((step, now))
    return out


def _step_axes(plans: Sequence[Sequence[GatherStep]], op: str) -> list[str]:
    return [step.axis for step, _ in order_steps([[s for s in plan if s.op == op] for plan in plans])]


def _store_sums(items: list[ShardInTransit], flat: Tensor) -> None:
    shards = [i.parcel.shards[0] for i in items]
    at, _ = message_offsets([s.nbytes for s in shards])
    for item, shard, start in zip(items, shards, at, strict=True):
        total = flat[start : start + shard.nbytes].view(shard.dtype).reshape(shard.shape)
        item.parcel.shards, item.parcel.owned = [total], True


def _store_gathered(
    items: list[ShardInTransit], widths: Sequence[int], slots: Sequence[Tensor] | None
) -> None:
    """Store the gathered shards of each parcel; the last gathered axis counts slowest."""
    if slots is None:
        return
    at, first = message_offsets(widths)[0], 0
    for item in items:
        count = len(item.parcel.shards)
        places = at[first : first + count]
        item.parcel.shards = [slot[a : a + item.width] for slot in slots for a in places]
        first += count
