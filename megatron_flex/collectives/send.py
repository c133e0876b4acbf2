"""Bring what was read to the leader: one coalesced gather for all shards, then one hop up the pipeline.

Only ranks that hold something the leader lacks take part, and none but the leader receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.edit import all_assemble
from megatron_flex.layout import Layout, assemble
from megatron_flex.mesh import Axis, Mesh

ALIGN = 16  # bytes; every dtype may start at a multiple of it
REPLICAS = ("dp", "pp")  # axes along which ranks hold other data or other sites, each with its own leader


@dataclass(slots=True)
class Parcel:
    """One shard on its way; `shards` grows on the ranks that collect."""

    layout: Layout
    shards: list[Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a read: `sum` or `gather` along one axis, towards coordinate 0."""

    op: str
    axis: str


def plan_read(layout: Layout, mesh: Mesh) -> list[Step]:
    """What a read to the leader communicates; known without communicating."""
    sums = [Step("sum", a) for a in layout.partial if mesh[a].size > 1]
    cuts = [a for a in layout.axes if a not in layout.partial and mesh[a].size > 1]
    return sums + [Step("gather", a) for a in reversed(cuts)]


def takes_part(layout: Layout, mesh: Mesh) -> bool:
    """Whether this rank's shard is needed by its leader; if not, it need not even be kept."""
    split = {s.axis for s in plan_read(layout, mesh)}
    return mesh.is_first(a.name for a in mesh if a.name not in split and a.name not in REPLICAS)


def is_leader(mesh: Mesh) -> bool:
    """Whether this rank receives what its pipeline stage reads."""
    return mesh.is_first(a.name for a in mesh if a.name not in REPLICAS)


def leads(layout: Layout, mesh: Mesh) -> bool:
    """Whether this rank receives what is read in `layout`, which may go over data parallel ranks too."""
    return is_leader(mesh) and ("dp" not in layout.axes or mesh["dp"].coord == 0)


def send_to_leader(parcels: Sequence[Parcel], mesh: Mesh, bucket_bytes: int) -> list[Tensor | None]:
    """Assemble parcels on the leader of each stage.

    Collective over the axes in the parcels' plans: every rank of a group calls it with the same parcels in
    the same order. Small shards travel together, in buckets of `bucket_bytes`.

    Args:
        parcels: one for each read, with the local shard; on ranks that take no part their shards are unused.
        mesh: the run's axes.
        bucket_bytes: shards of at least this size travel alone, without being copied.

    Returns:
        For each parcel the whole on the leader, None elsewhere.
    """
    plans: list[list[Step]] = []
    mine: set[int] = set()
    for index, parcel in enumerate(parcels):
        steps = plan_read(parcel.layout, mesh)
        uneven = bool(steps) and any(d.uneven for d in parcel.layout.dims)
        if takes_part(parcel.layout, mesh):
            mine.add(index)
            if uneven:
                parcel.shards = [all_assemble(parcel.shards[0], parcel.layout, mesh)[0]]
                if not leads(parcel.layout, mesh):
                    mine.discard(index)
        plans.append([] if uneven else steps)
    for step, indices in rounds(plans):
        axis, now = mesh[step.axis], [i for i in indices if i in mine]
        if now:
            (_sum if step.op == "sum" else _gather)([parcels[i] for i in now], axis, bucket_bytes)
        if axis.coord:
            mine.difference_update(now)
    leader = is_leader(mesh)
    return [_arrived(p, mesh) if leader and i in mine else None for i, p in enumerate(parcels)]


def rounds(plans: Sequence[Sequence[Step]]) -> list[tuple[Step, list[int]]]:
    """Which parcels go together in which collective, in order.

    It follows from all plans, also of parcels that this rank takes no part in: ranks that take part in
    different ones must still agree on what travels together.
    """
    left = {i: list(steps) for i, steps in enumerate(plans) if steps}
    out: list[tuple[Step, list[int]]] = []
    while left:
        step = next(iter(left.values()))[0]
        now = [i for i, steps in left.items() if steps[0] == step]
        left = {i: steps[1:] if i in now else steps for i, steps in left.items() if i not in now or steps[1:]}
        out.append((step, now))
    return out


def _arrived(parcel: Parcel, mesh: Mesh) -> Tensor:
    layout = Layout(parcel.layout.dims, (), parcel.layout.shared, parcel.layout.permute)
    if len(parcel.shards) == 1 and any(d.uneven for d in layout.dims):
        return parcel.shards[0]  # assembled already, by the way for uneven parts
    return assemble(layout, parcel.shards, mesh.sizes).contiguous()


def _sum(parcels: list[Parcel], axis: Axis, _: int) -> None:
    for parcel in parcels:
        total = parcel.shards[0].clone(memory_format=torch.contiguous_format)
        dist.reduce(total, dst=axis.ranks[0], group=axis.group)
        parcel.shards = [total]


def _gather(parcels: list[Parcel], axis: Axis, bucket_bytes: int) -> None:
    posted = []
    for bucket in _buckets(parcels, bucket_bytes):
        mine = _pack([s for p in bucket for s in p.shards])
        slots = [torch.empty_like(mine) for _ in range(axis.size)] if axis.coord == 0 else None
        work = dist.gather(mine, slots, dst=axis.ranks[0], group=axis.group, async_op=True)
        posted.append((bucket, mine, slots, work))
    for bucket, _, slots, work in posted:
        if work is not None:
            work.wait()
        if slots is not None:
            _unpack(bucket, slots)


def _buckets(parcels: list[Parcel], limit: int) -> Iterator[list[Parcel]]:
    """Group parcels so that small ones share a message; a large one goes alone."""
    bucket: list[Parcel] = []
    filled = 0
    for parcel in parcels:
        size = sum(s.nbytes for s in parcel.shards)
        if size >= limit:
            yield [parcel]
            continue
        if filled + size > limit and bucket:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parcel)
        filled += size
    if bucket:
        yield bucket


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _pack(shards: list[Tensor]) -> Tensor:
    if len(shards) == 1:
        return _as_bytes(shards[0])
    sizes = [-(-s.nbytes // ALIGN) * ALIGN for s in shards]
    out = torch.empty(sum(sizes), dtype=torch.uint8, device=shards[0].device)
    offset = 0
    for shard, size in zip(shards, sizes, strict=True):
        out[offset : offset + shard.nbytes].copy_(_as_bytes(shard))
        offset += size
    return out


def _unpack(bucket: list[Parcel], slots: list[Tensor]) -> None:
    """Give each parcel its shards from all ranks; the axis gathered last counts slowest."""
    offset = 0
    alone = sum(len(p.shards) for p in bucket) == 1
    for parcel in bucket:
        places = []
        for shard in parcel.shards:
            places.append((offset, shard))
            offset += shard.nbytes if alone else -(-shard.nbytes // ALIGN) * ALIGN
        parcel.shards = [
            slot[at : at + s.nbytes].view(s.dtype).reshape(s.shape) for slot in slots for at, s in places
        ]


def send_up_pipeline(items: Sequence[tuple[Any, Tensor]], mesh: Mesh) -> list[tuple[Any, Tensor]]:
    """Bring what each stage's leader holds to the leader of the first stage.

    Collective over `pp` among the stages' leaders; the tensors themselves go point to point.

    Args:
        items: picklable tags with their tensors, in any number, on the CPU.
        mesh: the run's axes.

    Returns:
        On the first stage its own items and then those of the other stages in order; elsewhere nothing.
    """
    axis = mesh["pp"]
    if axis.size == 1:
        return list(items)
    device = "cuda" if dist.get_backend(axis.group) == "nccl" else "cpu"
    note = [(tag, tuple(t.shape), t.dtype) for tag, t in items]
    notes: list[Any] | None = [None] * axis.size if axis.coord == 0 else None
    dist.gather_object(note, notes, dst=axis.ranks[0], group=axis.group)
    if notes is None:
        sent = [_as_bytes(t.to(device)) for _, t in items if t.nbytes]
        for work in [dist.isend(t, axis.ranks[0], group=axis.group) for t in sent]:
            _wait(work)
        return []
    came, works = [], []
    for source, theirs in zip(axis.ranks[1:], notes[1:], strict=True):
        for tag, shape, dtype in theirs:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            came.append((tag, tensor))
            if tensor.nbytes:
                works.append(dist.irecv(_as_bytes(tensor), source, group=axis.group))
    for work in works:
        _wait(work)
    return [*items, *((tag, t.cpu()) for tag, t in came)]


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
