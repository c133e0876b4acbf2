"""The plan of a gather of captures on the leader of a stage: which messages each rank sends, where each shard
lies in them, and how the leader makes the full tensors. Pure: no communication, and no process groups.

Only ranks that hold a shard that the leader needs take part, and only the leader receives. Sums precede
gathers, and inner axes precede outer ones, so that all shards along one axis, of any site and dtype, go into
the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from megatron_flex.collectives.gather_scatter import has_uneven_shards
from megatron_flex.collectives.messages import align_size, group_by_size, message_offsets
from megatron_flex.layout import (
    Layout,
    ShardCopy,
    blocks,
    coordinates,
    full_shape,
    padded_shape,
    plan_copy,
    uneven_lengths,
)
from megatron_flex.mesh import Mesh

REPLICA_AXES = ("dp", "pp")  # axes along which ranks have different data or sites, each with its own leader
# A rank's message. The leader copies its own beside those of the others, so that it reads a tensor at once.
SMALL_MESSAGE_BYTES = 1 << 20


class GatherStep(NamedTuple):
    """One collective of a gather to the leader: `sum` or `gather` along one axis, to coordinate 0."""

    op: str
    axis: str


def plan_read(layout: Layout, mesh: Mesh) -> list[GatherStep]:
    """The collectives of a gather to the leader.

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


@dataclass(frozen=True, slots=True)
class CapturedShard:
    """What the plan needs of one capture on this rank.

    Attributes:
        layout: the layout of the shards.
        shape: of the local shard.
        dtype: of the local shard.
        shapes: of all shards in the order of `coordinates`, where they may differ.
        steps: the collectives that bring it to the leader.
        needed: whether this rank takes part.
        full_bytes: of the full tensor; None if the shards may differ in length.
    """

    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...] = ()
    steps: tuple[GatherStep, ...] = field(default=(), compare=False)
    needed: bool = field(default=True, compare=False)
    full_bytes: int | None = field(default=None, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: plans are looked up by the captures of each step.
        object.__setattr__(self, "_hash", hash((self.layout, self.shape, self.dtype, self.shapes)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_layout(
        cls, layout: Layout, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh
    ) -> CapturedShard:
        """The shard of a rank of this mesh.

        Raises:
            LayoutError: the shape does not fit the layout.
        """
        steps, needed, nbytes = tuple(plan_read(layout, mesh)), takes_part(layout, mesh), None
        if not has_uneven_shards(layout, mesh):
            nbytes = prod(full_shape(layout, shape, mesh.sizes)) * dtype.itemsize
            # Here, where every rank raises, and not on the leader alone while the others send to it.
            blocks(layout, mesh.coords, mesh.sizes, padded_shape(layout, shape, mesh.sizes))
        return cls(layout, tuple(shape), dtype, (), steps, needed, nbytes)

    @property
    def width(self) -> int:
        """The bytes of the largest shard."""
        return max(map(prod, self.shapes or (self.shape,))) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """One message of each rank along an axis, or one reduction.

    Attributes:
        step: the operation and the axis.
        captures: whose shards are in it, in order, and how many of each.
        widths: the bytes of each shard; shorter ones are padded.
        places: where each begins.
        nbytes: of the message.
        dtype: of what is summed.
        kept: whether the first rank copies its own message beside those that it receives.
    """

    step: GatherStep
    captures: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    places: tuple[int, ...]
    nbytes: int
    dtype: torch.dtype | None
    kept: bool

    @property
    def row(self) -> int:
        """The bytes from one received message to the next."""
        return align_size(self.nbytes)


class StridedShards(NamedTuple):
    """Where all shards of a capture are among received messages, in entries: one view of them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class FullTensorRead:
    """How the leader makes a full tensor.

    Attributes:
        layout: of the shards, after the sums.
        dtype: of the tensor.
        shape: of the tensor.
        summed: whether the shard lies in a message.
        copy: the copy of gathered shards; None where the shard, or `view` in one contiguous copy, is the full
            tensor.
        order: which of the gathered shards is the one at each of the `coordinates`.
        shapes: of these.
        view: all shards as one tensor among the received messages; None where they are not evenly spaced.
    """

    layout: Layout
    dtype: torch.dtype
    shape: tuple[int, ...]
    summed: bool
    copy: ShardCopy | None
    order: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    view: StridedShards | None = None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The messages of this rank, those of each step after those of the step before, and what it reads.

    Attributes:
        messages: in the order of steps; those of one step are sent together.
        reads: for each capture; None where this rank does not receive it.
    """

    messages: tuple[tuple[Message, ...], ...]
    reads: tuple[FullTensorRead | None, ...]


def plan_gather(shards: tuple[CapturedShard, ...], mesh: Mesh, most: int) -> GatherPlan:
    """The plan of a gather of captures to the leader.

    Args:
        shards: the captures, in the order in which all ranks of the stage recorded them.
        mesh: the run's axes.
        most: maximum bytes of one message of a rank; larger data are split into several messages.

    Raises:
        LayoutError: shapes do not fit their layout.
    """
    present = {n for n, s in enumerate(shards) if s.needed}
    counts = [1] * len(shards)
    views: dict[int, StridedShards] = {}
    messages: list[tuple[Message, ...]] = []
    for step, indices in order_steps([s.steps for s in shards]):
        axis, now = mesh[step.axis], [n for n in indices if n in present]
        if now:
            messages.append(tuple(_plan_messages(step, now, shards, counts, most)))
        for message in messages[-1] if now and step.op == "gather" else ():
            firsts = accumulate([count for _, count in message.captures], initial=0)
            # Shards of a first gather are evenly spaced in the received messages: one view has them all.
            for (n, count), first in zip(message.captures, firsts, strict=False):
                if message.kept and count == 1 and not shards[n].shapes:
                    views[n] = _plan_view(shards[n], axis.size, message.row, message.places[first])
                else:
                    views.pop(n, None)
                counts[n] *= axis.size
        if axis.coord:  # its data are with coordinate 0 now
            present.difference_update(indices)
    reads = [_plan_read(s, mesh, views.get(n)) if n in present else None for n, s in enumerate(shards)]
    return GatherPlan(tuple(messages), tuple(reads) if is_leader(mesh) else (None,) * len(shards))


def _plan_messages(
    step: GatherStep, now: list[int], shards: Sequence[CapturedShard], counts: Sequence[int], most: int
) -> list[Message]:
    out = []
    # One reduction is of one dtype.
    for dtype in dict.fromkeys(shards[n].dtype if step.op == "sum" else None for n in now):
        alike = [n for n in now if dtype in (None, shards[n].dtype)]
        for group in group_by_size([align_size(shards[n].width) * counts[n] for n in alike], most):
            captures = tuple([(alike[i], counts[alike[i]]) for i in group])
            widths = [shards[n].width for n, count in captures for _ in range(count)]
            places, nbytes = message_offsets(widths)
            keeps = step.op == "gather" and nbytes <= SMALL_MESSAGE_BYTES
            out.append(Message(step, captures, tuple(widths), tuple(places), nbytes, dtype, keeps))
    return out


def _plan_view(shard: CapturedShard, count: int, row: int, place: int) -> StridedShards:
    """The view of the shards in the first gather of them."""
    size = shard.dtype.itemsize
    stride = torch.empty(shard.shape, device="meta").stride()
    return StridedShards((count, *shard.shape), (row // size, *stride), place // size)


def _plan_read(shard: CapturedShard, mesh: Mesh, view: StridedShards | None) -> FullTensorRead:
    old, sizes = shard.layout, mesh.sizes
    layout = Layout(old.dims, (), old.shared, old.permute)
    axes = [s.axis for s in shard.steps if s.op == "gather"]
    if not axes:
        return FullTensorRead(layout, shard.dtype, shard.shape, bool(shard.steps), None)
    places = coordinates(layout, sizes)
    lengths = uneven_lengths(layout, shard.shapes, sizes) if shard.shapes else None
    shapes = shard.shapes or (shard.shape,) * len(places)
    copy = plan_copy(layout, shapes[0], sizes, lengths)
    order = []
    for coords in places:
        at = 0
        for axis in reversed(axes):  # the last gathered axis counts slowest
            at = at * mesh[axis].size + coords[axis]
        order.append(at)
    shape = full_shape(layout, shapes[0], sizes, lengths)
    if view is not None and copy.strides is not None:
        return FullTensorRead(layout, shard.dtype, shape, False, None, view=_sort_dims(view, copy.strides))
    return FullTensorRead(layout, shard.dtype, shape, False, copy, tuple(order), shapes, view)


def _sort_dims(view: StridedShards, strides: Sequence[int]) -> StridedShards:
    """The view with its dims in the order in which they lie in the contiguous full tensor.

    Args:
        view: of all shards.
        strides: of the same dims in the full tensor.
    """
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    return StridedShards(
        tuple([view.shape[d] for d in order]), tuple([view.stride[d] for d in order]), view.offset
    )


def order_steps(plans: Sequence[Sequence[GatherStep]]) -> list[tuple[GatherStep, list[int]]]:
    """The steps in order, each with the indices of its captures.

    The result depends on all plans, also of captures in which this rank takes no part: ranks that take part
    in different captures must agree on the captures of each message. Each step occurs once, since all plans
    are subsequences of one order.
    """
    remaining = {i: list(steps) for i, steps in enumerate(plans) if steps}
    out: list[tuple[GatherStep, list[int]]] = []
    while remaining:
        later = {s for steps in remaining.values() for s in steps[1:]}
        step = next(steps[0] for steps in remaining.values() if steps[0] not in later)
        now = [i for i, steps in remaining.items() if steps[0] == step]
        remaining = {
            i: steps[1:] if i in now else steps for i, steps in remaining.items() if i not in now or steps[1:]
        }
        out.append((step, now))
    return out
