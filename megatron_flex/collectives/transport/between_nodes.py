"""Captures between nodes: the first rank of a node sends all shards of its node and step in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.collectives.rank_agreement import all_gather_pickled
from megatron_flex.collectives.transport.segments import Segment
from megatron_flex.collectives.transport.shard_placement import (
    Member,
    ShardPlacement,
    TensorSpace,
    align_tensor_size,
    place_shard,
)
from megatron_flex.layout import Sizes


class TensorRecord(NamedTuple):
    """One tensor that all ranks wrote their shards of.

    Attributes:
        tag: names the tensor.
        space: what is known about tensors like it.
        at: where it begins in the slot.
    """

    tag: Any
    space: TensorSpace
    at: int

    @property
    def place(self) -> ShardPlacement:
        """Where the local shard goes."""
        assert self.space.place is not None  # others are not written here
        return self.space.place


class NodeShards(NamedTuple):
    """The offset of each shard of a tensor in the message of a node, by global rank, and where they end."""

    at: dict[int, int]
    end: int


def locate_node_shards(record: TensorRecord, node: Sequence[Member], sizes: Sizes, start: int) -> NodeShards:
    """The offsets at which the ranks of a node write their shards of a tensor, from `start` on."""
    at: dict[int, int] = {}
    space = record.space
    size = align_tensor_size(space.local.numel() * space.dtype.itemsize)
    for member in node:
        if place_shard(space.layout, space.local, member.coords, sizes).writes:
            at[member.rank] = start
            start += size
    return NodeShards(at, start)


class NodeMessage(NamedTuple):
    """The shards of one node in one step, on the leader.

    Attributes:
        first: the rank that sends them.
        buffer: the memory for them.
        node: the ranks of that node.
        places: the offset of each rank's shard in the buffer, for each record.
    """

    first: int
    buffer: torch.Tensor
    node: Sequence[Member]
    places: Sequence[dict[int, int]]


class NodeExchange:
    """Messages between the first ranks of the nodes. Nodes without the leader collect shards as they are.

    Every method is collective over those first ranks.
    """

    def __init__(self, group: Any, firsts: Sequence[int], rank: int) -> None:
        """`firsts`: global ranks, the leader first; `group`: of them, on the CPU."""
        self.group, self.firsts, self.rank = group, tuple(firsts), rank

    def first_of(self, wrong: str) -> str:
        """The errors of all nodes, in words; empty if there are none."""
        answers = all_gather_pickled(wrong, self.group)
        return "; ".join(dict.fromkeys(s for s in answers if s))

    def least(self, size: int) -> int:
        """The least size of all nodes."""
        found = torch.tensor([size], dtype=torch.int64)
        run_collective(dist.all_reduce, found, op=dist.ReduceOp.MIN, group=self.group)
        return int(found)

    def expect(
        self, records: Sequence[TensorRecord], members: Sequence[Member], sizes: Sizes
    ) -> list[NodeMessage]:
        """On the leader, memory for what the other nodes send; no communication."""
        messages = []
        for first in self.firsts[1:] if self.rank == self.firsts[0] else ():
            name = next(m.node for m in members if m.rank == first)
            node = [m for m in members if m.node == name]
            start, places = 0, []
            for record in records:
                parts = locate_node_shards(record, node, sizes, start)
                places.append(parts.at)
                start = parts.end
            if start:
                messages.append(NodeMessage(first, torch.empty(start, dtype=torch.uint8), node, places))
        return messages

    def bring(
        self,
        messages: Sequence[NodeMessage],
        records: Sequence[TensorRecord],
        segment: Segment,
        sent: int,
        sizes: Sizes,
    ) -> None:
        """Send the shards of the other nodes to their places on the leader's node.

        Args:
            messages: from `expect`.
            records: of the step.
            segment: the slot of this node.
            sent: bytes that this node sends.
            sizes: of the axes.
        """
        if self.rank != self.firsts[0]:
            if sent:
                dist.send(segment.tensor(0, (sent,), torch.uint8), self.firsts[0], group=self.group)
            return
        works = [dist.irecv(m.buffer, m.first, group=self.group) for m in messages]
        for work, message in zip(works, messages, strict=True):
            if work is not None:
                work.wait()
            for record, at in zip(records, message.places, strict=True):
                self._place(record, message.buffer, message.node, at, segment, sizes)

    def _place(
        self,
        record: TensorRecord,
        buffer: torch.Tensor,
        node: Sequence[Member],
        at: dict[int, int],
        segment: Segment,
        sizes: Sizes,
    ) -> None:
        space, shape = record.space, (record.place.planes, *record.place.shape)
        planes = segment.tensor(record.at, shape, space.dtype)
        count = space.local.numel() * space.dtype.itemsize
        for member in node:
            start = at.get(member.rank)
            if start is not None and count:
                shard = buffer[start : start + count].view(space.dtype).view(space.local)
                place_shard(space.layout, space.local, member.coords, sizes).write(shard, planes)


def open_node_exchange(firsts: list[int], rank: int) -> NodeExchange | None:
    """Connect the first ranks of the nodes, collectively; None if gloo cannot."""
    try:
        group = dist.new_group(firsts, backend="gloo", use_local_synchronization=True)
    except RuntimeError:  # no network that gloo can use, or a build without it
        return None
    return NodeExchange(group, firsts, rank)
