"""Captures without a message: each rank copies its shards to shared memory, where the receiving rank has the
full tensors.

    forward, backward   every rank copies its shard to its place in the current segment; no one waits
    end of the step     with the flags of the step the ranks exchange what they recorded, and the segment of
                        the next step, which the receiving rank chooses; it returns the tensors without a copy

The place of a shard follows from the captures before it, which are the same on all ranks. A capture that does
not fit goes with another transport; all ranks decide alike. Ranks of other nodes keep their shards in memory
of their own, and send them from host to host at the end of the step.

An error on one rank is never raised inside a step, as the other ranks would wait for this one: it travels
with the flags, all ranks raise, and the next step uses shared memory again.

The life of a segment, of which the receiving rank has a few:

    made        the receiving rank makes the file, and names it in the note of a step's end (`fresh`)
    mapped      the other ranks of the node map it after that exchange; whether all could is a second exchange
                (`settles`) if it is the segment of the next step, else the next note tells (`unmapped`)
    announced   all ranks have it: the receiving rank removes the file's name, so that no end of a process
                leaves it behind
    written     it is the current one, and all ranks write their shards of a step to it
    lent        captures of that step are views of it; it is free again when the user has dropped them
"""

from __future__ import annotations

import os
import socket  # noqa: TID251
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.expert_route import Route
from megatron_flex.collectives.gather_plan import REPLICA_AXES
from megatron_flex.collectives.host_groups import open_host_group, receive_from, send_to
from megatron_flex.collectives.messages import align_size, buffer_pool, group_by_size
from megatron_flex.collectives.rank_agreement import gather_objects, max_over_ranks
from megatron_flex.collectives.transport.device_copies import DeviceCopies
from megatron_flex.collectives.transport.interface import Arrival, TransportBytes, Watch
from megatron_flex.collectives.transport.segments import (
    Segment,
    SegmentPool,
    map_segment,
    remove_stale_files,
    segment_path,
)
from megatron_flex.collectives.transport.shard_targets import BlockTarget, Places, find_targets
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexWarning, HookError, describe_error
from megatron_flex.layout import Layout, full_shape, is_partial
from megatron_flex.mesh import Mesh

NOT_SENT = (
    "the captures of this step are lost, as shared memory failed on rank {rank}: {why}; the next step tries "
    "again: raise the limit of open files (ulimit -n), or use no shared memory (FLEX_SHARED_BYTES=0)"
)
DIFFERENT = (
    "rank {other} recorded {theirs} tensors in a step in which rank {rank} recorded {count}, or tensors of "
    "other sites or shapes; all ranks of a stage must capture the same tensors, in the same order"
)
TENSOR_ALIGN = 64  # bytes; where tensors begin
MAX_SPACES = 4096  # that are remembered; sequences of ever new lengths make new ones


class Member(NamedTuple):
    """One of the ranks whose captures go to one receiving rank: its global rank, coordinates and node."""

    rank: int
    coords: dict[str, int]
    node: str


@dataclass(frozen=True, slots=True)
class TensorSpace:
    """What is known about all tensors of one layout, shape and dtype.

    Attributes:
        layout: their layout.
        local: the shape of the local tensors.
        dtype: their dtype.
        words: what all ranks must have in common of them.
        size: bytes that a full tensor needs; -1 where another transport carries it.
        full: the shape of the full tensor.
        targets: where the blocks of the local shard go.
    """

    layout: Layout
    local: torch.Size
    dtype: torch.dtype
    words: str
    size: int = -1
    full: tuple[int, ...] = ()
    targets: tuple[BlockTarget, ...] = ()

    @property
    def shard_bytes(self) -> int:
        return align_size(self.local.numel() * self.dtype.itemsize, TENSOR_ALIGN)


class _Record(NamedTuple):
    """A tensor that all ranks wrote their shards of, and where it begins in the segment."""

    tag: Any
    space: TensorSpace
    at: int


class _Note(NamedTuple):
    """What the ranks exchange at the end of a step, as the greatest values of all ranks.

    Attributes:
        failed: whether a rank lost its captures.
        code: of what was recorded.
        negative: the same, negative: if both fit, all ranks recorded the same.
        segment: the number of the next segment plus one; 0 for none. The receiving rank alone has these.
        size: its bytes.
        kept: the segments that there are, one bit each.
        fresh: the segments whose files have names, to be mapped after this exchange, one bit each.
        unmapped: whether a rank could not map a segment of an earlier exchange.
        settles: whether another exchange follows: the next segment is new, or holds captures of this step.
    """

    failed: int = 0
    code: int = 0
    negative: int = 0
    segment: int = 0
    size: int = 0
    kept: int = 0
    fresh: int = 0
    unmapped: int = 0
    settles: int = 0


class SharedMemoryTransport:
    """The transport of one rank. `members[0]` receives what all members submit.

    Args:
        members: the ranks of the stage.
        me: this rank's index among them.
        mesh: the run's axes.
        pool: the segments of the receiving rank; elsewhere only their names are used.
        group: of the members, on the host; None if all are on one node.
        watch: called now and then while this rank waits for another one; it may raise.
    """

    def __init__(
        self,
        members: Sequence[Member],
        me: int,
        mesh: Mesh,
        pool: SegmentPool,
        group: Any = None,
        watch: Watch | None = None,
    ) -> None:
        self.members, self.me = members, me
        self._stage = Mesh(tuple(mesh[a] for a in members[me].coords))
        self._sizes = tuple((a.name, a.size) for a in self._stage)
        self._elsewhere = {a for a, n in mesh.sizes.items() if n > 1 and a not in members[me].coords}
        self._pool, self._group, self._watch = pool, group, watch
        self._leads, self._near = me == 0, members[me].node == members[0].node
        self._spaces: dict[tuple[Layout, torch.Size, torch.dtype], TensorSpace] = {}
        self._segments: dict[int, Segment] = {}  # of the receiving rank, mapped by another rank of its node
        self._private: Segment | None = None  # of a rank of another node
        self._segment: Segment | None = None
        self._number: int | None = None
        self._capacity = 0
        self._announced: set[int] = set()  # segments whose numbers the other ranks have
        self._unmapped, self._unmapped_bytes = "", 0  # why this rank could not map one, and its size
        self._named: list[Path] = []  # files that the receiving rank has not unlinked yet
        self._copies: DeviceCopies | None = None
        self._warned = False
        self._arrived: list[Arrival] = []
        self._begin(skip=False)

    def _begin(self, skip: bool) -> None:
        self._records: list[_Record] = []
        self._submitted: list[tuple[Any, str]] = []  # with what must be common of each
        self._sent: list[int] = []  # the bytes of each shard that goes to another node
        self._at = self._need = 0  # where the next goes, and what all together would need
        self._failure = ""  # the first error of this rank in this step
        self._skip = skip

    @classmethod
    def open(cls, mesh: Mesh, watch: Watch | None, name: str) -> SharedMemoryTransport | None:
        """Agree on who shares memory, and map the first segment: `Transport.open`."""
        axes = [a.name for a in mesh if a.name not in REPLICA_AXES and a.size > 1]
        if not axes:
            return None
        pool = SegmentPool(flex_config.shared_folder, flex_config.shared_bytes)
        member = Member(dist.get_rank(), {a: mesh[a].coord for a in axes}, flex_config.node or _node_name())
        usable = pool.most > 0 and sys.platform == "linux"
        # Every rank makes these exchanges, also one that cannot share memory: all decide by all answers.
        answers = gather_objects((member, pool.stem, usable), mesh, axes)
        if not all(usable for _, _, usable in answers):
            return None
        members = [m for m, _, _ in answers]
        me, pool.stem, group = members.index(member), answers[0][1], None
        if any(m.node != members[0].node for m in members):
            try:
                group = open_host_group(f"captures/{pool.stem}", [m.rank for m in members], me)
            except RuntimeError:
                group = None
            if not all(gather_objects(group is not None, mesh, axes)):
                return None
        if me == 0:
            remove_stale_files(pool.folder)
            pool.open()
        transport = cls(members, me, mesh, pool, group, watch)
        transport.collect([0], "the first segment of shared memory")
        return transport

    combines = True

    @property
    def active(self) -> bool:
        """Whether anything was submitted in this step, gathered captures included."""
        return bool(self._submitted)

    # -- while the model runs ----------------------------------------------------------------------------

    def submit(self, tag: Any, local: Tensor, layout: Layout, route: Route | None = None) -> bool:
        """Write the local shard to its place; False where it has to be gathered: `Transport.submit`."""
        if route is not None:  # rows of experts go back to their tokens first
            self._submitted.append((tag, ""))
            return False
        space = self._spaces.get((layout, local.shape, local.dtype)) or self._space(layout, local)
        self._submitted.append((tag, space.words))
        if space.size < 0 or local.layout != torch.strided:
            return False
        self._need += space.size
        at = self._at
        if self._skip or at + space.size > self._capacity:
            return False
        self._at = at + space.size
        if self._leads:
            self._records.append(_Record(tag, space, at))
        if not self._near:
            at = sum(self._sent)
            self._sent += [space.shard_bytes] if space.targets else []
        try:
            self._write(space, at, local)
        except Exception as error:  # kept: raised here, it would leave the other ranks waiting for this one
            self._keep_error(error)
        return True

    def _write(self, space: TensorSpace, at: int, local: Tensor) -> None:
        segment = self._segment
        assert segment is not None  # there is capacity
        entries, start = segment.entries(space.dtype), at // space.dtype.itemsize
        if local.is_cuda:
            pairs = [
                (t.view(entries, start), local if t.source is None else local[t.source])
                for t in space.targets
            ]
            self._copies = self._copies or DeviceCopies(local.device)
            self._copies.start(pairs, segment)
            return
        for target in space.targets:
            block = local if target.source is None else local[target.source]
            entries.as_strided(target.shape, target.stride, start + target.offset).copy_(block)

    def _space(self, layout: Layout, local: Tensor) -> TensorSpace:
        """What is known about tensors like this one.

        Raises:
            LayoutError: its shape does not fit the layout.
        """
        if len(self._spaces) >= MAX_SPACES:
            self._spaces.clear()
        space = self._plan_space(layout, local.shape, local.dtype)
        self._spaces[layout, local.shape, local.dtype] = space
        return space

    def _plan_space(self, layout: Layout, shape: torch.Size, dtype: torch.dtype) -> TensorSpace:
        if any(d.uneven for d in layout.dims):
            return TensorSpace(layout, shape, dtype, "")
        words, sizes = f"{tuple(shape)}{dtype}", dict(self._sizes)
        # Partial sums are added where they are, and not by one process.
        if not self._elsewhere.isdisjoint(layout.axes) or is_partial(layout, sizes):
            return TensorSpace(layout, shape, dtype, words)
        full, targets = tuple(full_shape(layout, shape, sizes)), self._targets(layout, shape, self.me)
        size = align_size(prod(full) * dtype.itemsize, TENSOR_ALIGN)
        if self._group is not None:  # with its padding a shard may have more than the full tensor
            size = max(size, align_size(shape.numel() * dtype.itemsize, TENSOR_ALIGN))
        if targets and not self._near:
            stride = torch.empty(shape, device="meta").stride()
            targets = (BlockTarget(shape, stride, 0, None),)
        return TensorSpace(layout, shape, dtype, words, size, full, targets)

    def _targets(self, layout: Layout, shape: torch.Size, member: int) -> tuple[BlockTarget, ...]:
        coords: Places = tuple(self.members[member].coords.items())
        return find_targets(layout, shape, coords, self._sizes)

    # -- at the end of a step ----------------------------------------------------------------------------

    def start(self) -> list[Arrival]:
        """Nothing is left to send: every rank has written its shard to its place."""
        return []

    def collect(self, flags: Sequence[int], at: str) -> tuple[list[int], str]:
        """End the step with the other ranks of the stage: `Transport.collect`."""
        number: int | None = None
        lends, tensors = False, []
        if self._unmapped:  # not at once: files of a receiving rank that has ended are gone, and not missed
            rank = self.members[self.me].rank
            self._warn(f"rank {rank} cannot map shared memory: {self._unmapped}", self._unmapped_bytes)
        try:
            if self._copies is not None:
                self._copies.finish()
            if self._leads:  # before the exchange, in which the other ranks learn the number
                number, lends = self._choose_segment()
                tensors = self._lend() if lends else []
        except Exception as error:  # kept: it travels with the flags, and all ranks raise
            self._keep_error(error)
        try:
            # The only exchange of most steps: the caller's flags, and behind them the note.
            greatest = max_over_ranks([*flags, *self._note(number)], self._stage, at, self._watch)
        except BaseException:  # a rank has ended: nobody maps a new file, nor removes its name
            self._pool.drop_unmapped()
            for path in self._named:
                path.unlink(missing_ok=True)
            raise
        flags, note = greatest[: len(flags)], _Note(*greatest[len(flags) :])
        lost = self._describe_loss(flags, note)
        good = not (flags[0] or note.failed or lost)  # the same on all ranks, which receive or drop alike
        self._arrived = []
        if good:
            try:
                self._arrived = self._receive(tensors, lends)
            except Exception as error:  # kept: `_advance` sends it, and all ranks raise
                self._keep_error(error)
        need, failure = self._need, self._failure
        failed = self._advance(note, good, at)
        if self._leads and need > self._capacity:
            self._warn_if_lacking(need)
        self._begin(skip=False)
        if good and not failed:
            return flags, lost
        self._arrived = []
        return [1, *flags[1:]] if not flags[0] else flags, lost or self._describe_lost_captures(failure)

    def finish(self) -> list[Arrival]:
        """The tensors that `collect` has found."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def drop(self, failed: bool) -> None:
        """Discard the step, which perhaps failed at different places: what comes next is gathered.

        Another rank may still be writing its shards of that step, so the segment is not used again before all
        ranks have met at the end of a step.
        """
        if not failed and not self._submitted:
            return
        self._arrived = []
        self._begin(skip=True)
        try:
            if self._copies is not None:
                self._copies.finish()
        except Exception as error:  # kept: the next step's flags carry it
            self._keep_error(error)

    def close(self) -> None:
        """Release the memory; tensors that were returned stay as they are."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        self._begin(skip=True)
        self._arrived, self._segment, self._private, self._capacity = [], None, None, 0
        self._segments.clear()
        if self._leads:
            self._pool.close()
        self._group = None

    @staticmethod
    def estimate(part: int, ranks_per_node: Sequence[int]) -> TransportBytes:
        """Each rank copies its shard to host memory; ranks of other nodes send theirs."""
        others = ranks_per_node[1:]
        return TransportBytes(part, part if others else 0, sum(others) * part)

    # -- inside ------------------------------------------------------------------------------------------

    def _keep_error(self, error: Exception) -> None:
        """Keep an error for the end of the step, as the other ranks do not have it."""
        if isinstance(error, HookError):  # of the watch: the ranks are at different points
            raise error
        self._failure = self._failure or describe_error(error)

    def _describe_lost_captures(self, failure: str) -> str:
        return failure and NOT_SENT.format(rank=self.members[self.me].rank, why=failure)

    def _code(self) -> int:
        """A number that is the same on all ranks that recorded the same."""
        code = crc32(f"{len(self._submitted)} {self._skip}".encode())
        for tag, words in self._submitted:
            code = crc32(f"{tag!s}{words}".encode(), code)
        return code

    def _note(self, number: int | None) -> _Note:
        code, pool = self._code(), self._pool
        note = _Note(int(bool(self._failure)), code, -code, unmapped=int(bool(self._unmapped)))
        if not self._leads:
            return note
        kept_bits = sum(1 << n for n in pool.segments)
        fresh_bits = sum(1 << n for n, shared in pool.segments.items() if shared.path is not None)
        size = 0 if number is None else pool.segments[number].segment.size
        again = number == self._number and bool(self._records)  # the others wait until it has been copied
        settles = number is not None and (number not in self._announced or again)
        return note._replace(
            segment=0 if number is None else number + 1,
            size=size,
            kept=kept_bits,
            fresh=fresh_bits,
            settles=int(settles),
        )

    def _describe_loss(self, flags: Sequence[int], note: _Note) -> str:
        """Why no rank can deliver the captures; empty where they can, or where the step failed anyway."""
        if flags[0]:  # ranks may have recorded different tensors
            return ""
        if note.failed:
            return self._describe_lost_captures(self._failure)
        if note.code == -note.negative:
            return ""
        recorded = self.members[self.me].rank, len(self._submitted), self._code()
        (rank, count, code), *rows = gather_objects(recorded, self._stage, [a.name for a in self._stage])
        other, their_count, _ = next((row for row in rows if row[2] != code), rows[0])
        return DIFFERENT.format(other=other, theirs=their_count, rank=rank, count=count)

    def _choose_segment(self) -> tuple[int | None, bool]:
        """The segment of the next step, and whether the tensors of this step are lent; else they are copied.

        The segment is None if the pool is full. Tensors are lent while the pool has one more segment
        for the step after the next, so that no step needs the segment of the step before it.
        """
        pool, need = self._pool, self._need
        if not self._records:
            free = pool.find_free(need)
            return (free[0] if free else pool.make(need)), False
        free = pool.find_free(need, self._number)
        if not free and (number := pool.make(need)) is not None:
            free.append(number)
        if not free:  # no room: the segment of this step is written again, once it has been copied
            return (self._number if need <= self._capacity else None), False
        return free[0], len(free) > 1 or pool.make(need) is not None

    def _lend(self) -> list[Tensor]:
        places = [(r.at, r.space.full, r.space.dtype) for r in self._records]
        return self._segment.lend(places) if self._segment is not None and places else []

    def _receive(self, tensors: list[Tensor], lends: bool) -> list[Arrival]:
        """The full tensors of the step, on the receiving rank, once the shards of other nodes have come."""
        if self._group is not None:
            self._exchange_nodes()
        if not lends:
            tensors = [t.clone() for t in self._lend()]
        return [(r.tag, t) for r, t in zip(self._records, tensors, strict=True)]

    def _advance(self, note: _Note, good: bool, at: str) -> bool:
        """Take the segment of the next step; whether the captures of this step were lost after all.

        Collective in the stage where a rank may have failed since the flags were exchanged.
        """
        number, lost = (note.segment - 1 if note.segment else None), 0
        if self._leads and not note.unmapped:  # what earlier exchanges announced is mapped everywhere
            self._pool.unlink(self._announced & self._pool.segments.keys())
        self._map(note)
        unmapped = note.unmapped
        # A second exchange, where a rank may fail after the first: in mapping the next segment, in copying
        # this step's tensors out of it, or in sending them to another node.
        if note.settles or (good and self._group is not None):
            failed = [int(bool(self._failure)), int(bool(self._unmapped))]
            lost, unmapped = max_over_ranks(failed, self._stage, at, self._watch)
            if self._leads and not unmapped:
                self._pool.unlink(self._pool.segments)
        number = None if unmapped else number  # until all ranks have it, the captures are gathered
        # What some rank could not map is announced again, with an exchange of whether all ranks have it now.
        self._announced = set() if unmapped else set(self._pool.segments)
        self._number, self._capacity = number, 0 if number is None else note.size
        self._segment = self._mapped(number)
        if self._copies is not None:
            self._copies.keep(self._list_mapped())
        return bool(lost)

    def _map(self, note: _Note) -> None:
        """Map the segments that are new, and note why this rank cannot."""
        if self._leads:
            return
        self._unmapped, self._named = "", []
        try:
            if not self._near:
                if note.size and (self._private is None or self._private.size < note.size):
                    self._private = Segment(-1, note.size)
                return
            self._segments = {n: s for n, s in self._segments.items() if note.kept >> n & 1}
            for number in range(note.fresh.bit_length()):
                if note.fresh >> number & 1 and number not in self._segments:
                    path = segment_path(self._pool.folder, self._pool.stem, number)
                    self._segments[number] = map_segment(path)
                    self._named.append(path)
        except (OSError, ValueError) as error:
            self._unmapped, self._unmapped_bytes = describe_error(error), note.size

    def _mapped(self, number: int | None) -> Segment | None:
        if number is None:
            return None
        if self._leads:
            return self._pool.segments[number].segment
        return self._segments[number] if self._near else self._private

    def _list_mapped(self) -> list[Segment]:
        if self._leads:
            return [shared.segment for shared in self._pool.segments.values()]
        return list(self._segments.values()) if self._near else [s for s in [self._private] if s]

    def _exchange_nodes(self) -> None:
        """Bring the shards of other nodes to their places, in messages of at most FLEX_PENDING_BYTES, or of
        one shard.
        """
        if self._leads:
            for index, member in enumerate(self.members):
                if member.node != self.members[0].node:
                    self._receive_shards(index)
        elif self._sent and self._segment is not None:
            flat, start = self._segment.entries(torch.uint8), 0
            for window in group_by_size(self._sent, flex_config.pending_bytes):
                end = start + sum(self._sent[n] for n in window)
                send_to(self._group, flat[start:end], 0).wait()
                start = end

    def _receive_shards(self, index: int) -> None:
        """Receive the shards of a rank of another node; what it sends follows from the records."""
        spaces = [(r, self._targets(r.space.layout, r.space.local, index)) for r in self._records]
        sent = [(record, targets) for record, targets in spaces if targets]
        sizes = [record.space.shard_bytes for record, _ in sent]
        for window in group_by_size(sizes, flex_config.pending_bytes):
            buffer = buffer_pool.take(sum(sizes[n] for n in window), torch.device("cpu"))
            receive_from(self._group, buffer, index).wait()
            start = 0
            for n in window:
                self._place(*sent[n], buffer[start : start + sizes[n]])
                start += sizes[n]
            buffer_pool.give_back(buffer)

    def _place(self, record: _Record, targets: Sequence[BlockTarget], received: Tensor) -> None:
        space, segment = record.space, self._segment
        assert segment is not None
        count = space.local.numel() * space.dtype.itemsize
        shard = received[:count].view(space.dtype).view(space.local)
        entries, start = segment.entries(space.dtype), record.at // space.dtype.itemsize
        for target in targets:
            target.view(entries, start).copy_(shard if target.source is None else shard[target.source])

    def _warn_if_lacking(self, need: int) -> None:
        if self._pool.lacking:
            why = f"the captures of a step need {need} bytes of shared memory, and {self._pool.lacking}"
            self._warn(why, need)

    def _warn(self, why: str, need: int) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{why}; what does not fit is gathered, which is slower: give it room (docker run --shm-size="
            f"{-(-4 * need // (1 << 30))}g, FLEX_SHARED_BYTES={2 * need}), name another folder in memory "
            "(FLEX_SHARED_FOLDER), release earlier captures, or capture less",
            FlexWarning,
            stacklevel=2,
        )


def _node_name() -> str:
    """The same for processes that have the folder of shared memory in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat(flex_config.shared_folder).st_dev}"
    except OSError:
        return socket.gethostname()
