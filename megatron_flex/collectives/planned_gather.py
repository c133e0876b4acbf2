"""The gather of a step's small captures to the leader, planned once and executed again in each step like it.

A plan holds for captures of the same layouts, shapes and dtypes in the same order: where each shard lies in
the one message that a rank sends, and how the leader reads each full tensor out of the messages. The messages
are those of `LeaderGather`, which carries everything that has no plan: large captures, partial sums, shards
that differ in length, and layouts sharded over several axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_flex.collectives.gather_scatter import has_uneven_shards
from megatron_flex.collectives.leader_gather import is_leader, plan_read
from megatron_flex.collectives.messages import (
    align_size,
    begin_gather_to_first,
    buffer_pool,
    message_offsets,
    pack,
)
from megatron_flex.layout import Layout, find_joined_dim, full_shape
from megatron_flex.mesh import Axis, Mesh

SMALL_MESSAGE_BYTES = 1 << 20  # a rank's message; the leader copies its own beside those of the others


@dataclass(frozen=True, slots=True)
class StridedRead:
    """How the leader reads one full tensor out of the messages.

    Attributes:
        dtype: of the tensor.
        shape: of the view of all messages, which has one dim more than the tensor.
        stride: of the view, in entries.
        offset: of the view, in entries.
        whole: the shape of the full tensor.
        aliases: whether the view itself could be the full tensor, so that it must be copied explicitly.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: tuple[int, ...]
    aliases: bool

    def read(self, entries: Tensor) -> Tensor:
        """The full tensor, in memory of its own, from the messages as entries of the dtype."""
        found = entries.as_strided(self.shape, self.stride, self.offset).reshape(self.whole)
        return found.clone() if self.aliases else found


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """The gather of captures of these layouts, shapes and dtypes.

    Attributes:
        axis: the axis that they are gathered along; None where this rank sends and receives nothing.
        sent: the captures whose shards are in the message, in order.
        widths: the bytes of each of these shards.
        row: the bytes of a message with alignment.
        reads: for each capture, how the leader reads it; None for one that is not sent.
        leads: whether this rank is the leader.
    """

    axis: Axis | None
    sent: tuple[int, ...]
    widths: tuple[int, ...]
    row: int
    reads: tuple[StridedRead | None, ...]
    leads: bool


@dataclass(frozen=True, slots=True)
class GatheredShard:
    """What the plan is made of, of one capture.

    Attributes:
        layout: its layout.
        shape: of the local shard.
        dtype: of the local shard.
        needed: whether the leader needs this rank's shard.
    """

    layout: Layout
    shape: torch.Size
    dtype: torch.dtype
    needed: bool


def plan_gather(captures: Sequence[GatheredShard], mesh: Mesh, most: int) -> GatherPlan | None:
    """The plan of a gather of captures to the leader; None where `LeaderGather` carries them.

    No communication. All ranks of a stage decide alike what is in their messages; which of the two reads them
    is a matter of the leader alone.

    Args:
        captures: the captures, in the order in which all ranks of the stage recorded them.
        mesh: the run's axes.
        most: maximum bytes of one message of a rank.
    """
    names: set[str] = set()
    for capture in captures:
        steps = plan_read(capture.layout, mesh)
        if len(steps) > 1 or any(s.op != "gather" for s in steps) or has_uneven_shards(capture.layout, mesh):
            return None
        if not steps and not _is_full_tensor(capture.layout):
            return None
        names.update(s.axis for s in steps)
    if len(names) > 1:
        return None
    sent = tuple(n for n, c in enumerate(captures) if c.needed and plan_read(c.layout, mesh))
    widths = tuple(prod(captures[n].shape) * captures[n].dtype.itemsize for n in sent)
    if sum(align_size(width) for width in widths) > min(most, SMALL_MESSAGE_BYTES):
        return None
    places, length = message_offsets(widths)
    if sent and not length:  # nothing is sent, and no message is read
        return None
    row, leads = align_size(length), is_leader(mesh)
    reads: list[StridedRead | None] = [None] * len(captures)
    for n, at in zip(sent, places, strict=True) if leads else ():
        reads[n] = _plan_strided_read(captures[n], mesh, row, at)
        if reads[n] is None:
            return None
    return GatherPlan(mesh[names.pop()] if sent else None, sent, widths, row, tuple(reads), leads)


class PlannedGather:
    """An asynchronous gather by a plan, which the constructor starts; collective as `LeaderGather` is.

    Args:
        plan: the plan.
        shards: for each capture this rank's shard, a copy that may be returned; None where it is not needed.
    """

    def __init__(self, plan: GatherPlan, shards: Sequence[Tensor | None]) -> None:
        self._plan, self._shards = plan, shards
        self._rows: Tensor | None = None
        if plan.axis is None:
            return
        mine = pack([shard for n in plan.sent if (shard := shards[n]) is not None], plan.widths)
        slots: list[Tensor] = []
        if plan.axis.coord == 0:
            self._rows = buffer_pool.take(plan.row * plan.axis.size, mine.device)
            first, *slots = self._rows.view(plan.axis.size, plan.row)[:, : mine.nbytes].unbind()
            first.copy_(mine)
        self._pending = begin_gather_to_first(mine, slots, plan.axis)

    def wait(self) -> list[Tensor | None]:
        """Wait, and return for each capture the full tensor on the leader, None elsewhere. Call it once."""
        plan, rows = self._plan, self._rows
        if plan.axis is not None:
            self._pending.wait()
        out: list[Tensor | None] = [None] * len(self._shards)
        if plan.leads:
            entries: dict[torch.dtype, Tensor] = {}
            for n, (read, shard) in enumerate(zip(plan.reads, self._shards, strict=True)):
                if read is None or rows is None:
                    out[n] = shard
                    continue
                typed = entries.get(read.dtype)
                if typed is None:
                    typed = entries[read.dtype] = rows.view(read.dtype)
                out[n] = read.read(typed)
        if rows is not None:
            buffer_pool.give_back(rows)
        return out


def _is_full_tensor(layout: Layout) -> bool:
    """Whether a shard of a layout without collectives is the full tensor as it is."""
    return layout.permute is None and all(d.keep is None for d in layout.dims)


def _plan_strided_read(capture: GatheredShard, mesh: Mesh, row: int, at: int) -> StridedRead | None:
    layout, size = capture.layout, capture.dtype.itemsize
    dim = find_joined_dim(layout, capture.shape, mesh.sizes)
    if dim is None:
        return None
    full_size = full_shape(layout, capture.shape, mesh.sizes)
    count = prod([mesh[a].size for a in layout.axes])
    local = torch.empty(capture.shape, device="meta").stride()
    shape = (*capture.shape[:dim], count, *capture.shape[dim:])
    stride = (*local[:dim], row // size, *local[dim:])
    try:
        torch.empty_strided(shape, stride, device="meta").view(full_size)
    except RuntimeError:  # two of its dims cannot be one
        aliases = False
    else:
        aliases = True
    return StridedRead(capture.dtype, shape, stride, at // size, full_size, aliases)
