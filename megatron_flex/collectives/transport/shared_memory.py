"""Captures without a collective: each rank writes its shards to shared memory, where the leader reads full
tensors.

    forward, backward   every rank copies its shard to its place in the current slot; no one waits
    end of the step     every rank sends a note to the first rank of its node; the first rank waits for the
                        notes, has the tensors in the slot without a copy, and answers with the slot of the
                        next step, for which the others wait

An error on one rank (no more descriptors, a closed connection, a full folder) is never raised inside a step,
as the other ranks would wait for this one: `collect` reports it before the ranks agree, by a collective, that
the step is good. All ranks then raise, and later steps go with another transport.

The place of a shard follows from the captures before it, which are the same on all ranks. A capture that does
not fit goes with another transport; all ranks decide alike. Between nodes, the first rank of each node sends
one message for a step. During setup the ranks of a stage find which of them share memory.
"""

from __future__ import annotations

import errno
import os
import socket  # noqa: TID251
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.expert_route import Route
from megatron_flex.collectives.leader_gather import REPLICA_AXES
from megatron_flex.collectives.rank_agreement import gather_objects
from megatron_flex.collectives.transport.between_nodes import (
    NodeExchange,
    TensorRecord,
    locate_node_shards,
    open_node_exchange,
)
from megatron_flex.collectives.transport.device_copies import DeviceCopies
from megatron_flex.collectives.transport.interface import Arrival, TransportBytes, Watch
from megatron_flex.collectives.transport.node_sockets import NodeConnection, NodeServer, connect_to_node
from megatron_flex.collectives.transport.segments import Segment, Slot, SlotRing, remove_stale_files
from megatron_flex.collectives.transport.shard_placement import (
    Member,
    TensorSpace,
    TensorSpaceCache,
    sum_planes,
)
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError, FlexWarning, HookError, describe_error
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh

NOT_SENT = (
    "the captures of this step are lost, as shared memory failed: {why}; later steps use collectives; raise "
    "the limit of open files (ulimit -n), or use no shared memory (FLEX_SHARED_BYTES=0)"
)


class SharedMemoryTransport:
    """The transport of one rank. `members[0]` is the leader, which receives what all members submit.

    Attributes:
        watch: called now and then while this rank waits for another one; it may raise.
    """

    def __init__(
        self,
        members: Sequence[Member],
        me: int,
        mesh: Mesh,
        lines: dict[int, NodeConnection],
        ring: SlotRing | None,
        across: NodeExchange | None,
    ) -> None:
        """`lines`: to the others of the node if this is its first rank, which has the `ring`, else to it."""
        self.members, self.me = members, me
        self.sizes = {a: mesh[a].size for a in members[me].coords}
        elsewhere = {a for a, n in mesh.sizes.items() if n > 1 and a not in self.sizes}
        self._lines, self._ring, self._across = lines, ring, across
        self._here = members[me].node == members[0].node  # full tensors are assembled on this node
        self._near = [m for m in members if m.node == members[me].node]
        self._spaces = TensorSpaceCache(members, me, self.sizes, elsewhere)
        self._segments: dict[int, Segment] = {}
        self._slot: Slot | None = None  # on the node's first rank
        self._segment: Segment | None = None
        self._capacity = 0
        self._announced: set[int] = set()
        self._copies: DeviceCopies | None = None
        self._failure, self._warned = "", False  # the first error of this rank; the transport then ends
        self._arrived: list[Arrival] = []
        self.watch: Watch | None = None
        self._records: list[tuple[Any, TensorSpace, int]] = []  # of the leader
        self._submitted: list[
            tuple[Any, str]
        ] = []  # all that was recorded in this step, with what must be common
        self._at, self._need = 0, 0  # where the next goes, and what all together would have needed
        self._sent = 0  # bytes of what goes to another node
        self._skip = False

    def begin(self) -> None:
        """Agree on the first slot with the other ranks of the stage.

        Raises:
            FlexError: a connection failed.
            OSError: this rank cannot map the slot.
        """
        if self._ring is None:
            self._read_answer()
            return
        self._next(self._ring.take(1))
        self._answer(self._agreed_capacity())

    @classmethod
    def open(cls, mesh: Mesh, watch: Watch | None) -> SharedMemoryTransport | None:
        """Connect the ranks of the stage: `Transport.open`."""
        found = open_shared_memory(mesh)
        if found is not None:
            found.watch = watch
        return found

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
        space = self._spaces.known.get((id(layout), local.shape, local.dtype)) or self._spaces.of(
            layout, local
        )
        self._submitted.append((tag, space.words))
        size = space.size
        if space.place is None or local.layout != torch.strided:
            return False
        self._need += size
        at = self._at
        if self._skip or at + size > self._capacity:
            return False
        self._at = at + size
        if self.me == 0:
            self._records.append((tag, space, at))
        if self._segment is None or not self._here or local.is_cuda:
            with self._recording_errors():
                self._write(TensorRecord(tag, space, at), local)
            return True
        for target in space.targets:
            entries = self._segment.entries(space.dtype)
            start = at // space.dtype.itemsize + target.offset
            block = local if target.source is None else local[target.source]
            entries.as_strided(target.shape, target.stride, start).copy_(block)
        return True

    def _write(self, record: TensorRecord, local: Tensor) -> None:
        """Write a shard that goes to another node, or that a device holds."""
        if self._segment is None or not local.numel():
            return
        if not self._here:
            parts = locate_node_shards(record, self._near, self.sizes, self._sent)
            self._sent = parts.end
            at = parts.at.get(self.members[self.me].rank)
            if at is None:
                return
            full = self._segment.tensor(at, local.shape, local.dtype)
            pairs = [(full, local)]
        elif record.place.writes:
            shape = (record.place.planes, *record.place.shape)
            planes = self._segment.tensor(record.at, shape, local.dtype)
            pairs = [(target, local[source]) for target, source in record.place.targets(planes)]
        else:
            return
        if local.is_cuda:
            self._copies = self._copies or DeviceCopies(local.device)
            self._copies.start(pairs, self._segment)
            return
        for target, source in pairs:
            target.copy_(source)

    # -- at the end of a step ----------------------------------------------------------------------------

    def start(self) -> list[Arrival]:
        """Nothing is left to send: every rank has written its shard to its place."""
        return []

    def collect(self, failed: bool = False) -> str:
        """End the step with the ranks of the node and the first ranks of the others: `Transport.collect`."""
        with self._recording_errors():
            if self._copies is not None:
                self._copies.finish()
        mine = self.note_of_step(failed)
        if self._ring is None:
            self._report(mine)
        else:
            self._collect_node(mine)
        return self._failure and NOT_SENT.format(why=self._failure)

    def finish(self) -> list[Arrival]:
        """The tensors that `collect` has found."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def _report(self, mine: dict[str, Any]) -> None:
        """Tell the node's first rank that the shards are written, and learn where to write next."""
        self._begin(skip=False)
        (line,) = self._lines.values()
        with self._recording_errors():
            try:
                line.send(mine)
            except FlexError:
                line.close()  # the first rank must not wait for the note
                raise
            self._read_answer()

    def _collect_node(self, mine: dict[str, Any]) -> None:
        """Take the tensors of the step once all ranks have written them, and answer.

        Every part is reached whatever failed before it: the other ranks wait for it.
        """
        with self._recording_errors():
            differing = self._compare_notes(mine)
            self._failure = self._failure or differing
        records = [TensorRecord(*record) for record in self._records]
        need, sent, before = self._need, self._sent, self._segment
        self._begin(skip=False)
        across = self._across
        if across is not None:
            incoming, good = [], False
            with self._recording_errors():
                incoming = across.expect(records, self.members, self.sizes)
            with self._recording_errors():
                good = not across.first_of(self._failure or ("failed" if mine["failed"] else ""))
            with self._recording_errors():
                if good and before is not None:
                    across.bring(incoming, records, before, sent, self.sizes)
        with self._recording_errors():
            self._arrived = self._collect_tensors(records if self._leads else [], need)
        if self._failure:
            self._next(None)
        capacity = 0
        with self._recording_errors():
            capacity = self._agreed_capacity()
        with self._recording_errors():
            self._answer(capacity)
        with self._recording_errors():
            if need > capacity:
                self._warn_if_lacking(need)
        if self._failure or mine["failed"]:
            self._arrived = []

    def note_of_step(self, failed: bool) -> dict[str, Any]:
        """What all ranks of the node must have in common at the end of a step, unless it failed on one."""
        crc = 0
        for tag, words in self._submitted:
            crc = crc32(f"{tag!s}{words}".encode(), crc)
        failed = failed or bool(self._failure)
        return {"count": len(self._submitted), "crc": crc, "skip": self._skip, "failed": failed}

    def drop(self, failed: bool) -> None:
        """Discard the step, which perhaps failed at different places: what comes next is gathered.

        Another rank may still be writing its shards of that step, so the slot is not used again before all
        ranks have met at the end of a step.
        """
        if not failed and not self._submitted:
            return
        with self._recording_errors():
            if self._copies is not None:
                self._copies.finish()
        self._arrived = []
        self._begin(skip=True)

    def close(self) -> None:
        """Disconnect, and release the memory; tensors that were returned stay as they are."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        for line in self._lines.values():
            line.close()
        self._lines, self._arrived = {}, []
        self._slot = self._segment = None
        self._segments.clear()
        self._records.clear()
        self._capacity = 0
        if self._ring is not None:
            self._ring.close()

    @staticmethod
    def estimate(part: int, ranks_per_node: Sequence[int]) -> TransportBytes:
        """Each rank copies its shard to host memory; one rank of each other node sends its node's shards."""
        others = ranks_per_node[1:]
        return TransportBytes(part, max(others, default=0) * part, sum(others) * part)

    # -- inside ------------------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return self.me == 0

    def _begin(self, skip: bool) -> None:
        self._records, self._submitted = [], []
        self._at = self._need = self._sent = 0
        self._skip = skip

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        """Keep an error for `collect` to report, as the other ranks do not have it."""
        try:
            yield
        except HookError:  # of the watch: the ranks are at different points
            raise
        except Exception as error:
            self._failure = self._failure or describe_error(error)

    def _compare_notes(self, mine: dict[str, Any]) -> str:
        """Wait for the notes of the other ranks of the node; how they differ, empty if they do not.

        `mine["failed"]` is set if the step failed on any of them: they may have recorded different tensors.
        """
        wrong, lost = [], []
        for number, line in self._lines.items():
            try:
                theirs, _ = line.receive(self.watch)
            except HookError:  # of the watch
                raise
            except FlexError as error:
                lost.append(str(error))
                continue
            mine["failed"] = mine["failed"] or theirs["failed"]
            if any(theirs[name] != mine[name] for name in ("count", "crc", "skip")):
                rank = self.members[number].rank
                wrong.append(
                    f"rank {rank} recorded {theirs['count']} tensors in a step in which rank "
                    f"{self.members[self.me].rank} recorded {mine['count']}, or tensors of other sites or "
                    "shapes; all ranks of a stage must capture the same tensors, in the same order"
                )
        return "; ".join(lost + ([] if mine["failed"] else wrong))

    def _collect_tensors(self, records: list[TensorRecord], need: int) -> list[tuple[Any, Tensor]]:
        ring, slot, segment = self._ring, self._slot, self._segment
        assert ring is not None
        if slot is None or segment is None:
            self._next(ring.take(need))
            return []
        if not records:
            self._next(ring.taken(slot, need))
            return []
        for record in records:
            if record.place.planes > 1:
                shape = (record.place.planes, *record.place.shape)
                sum_planes(segment.tensor(record.at, shape, record.space.dtype))
        wanted = [(r.at, r.place.shape, r.space.dtype) for r in records]
        after = ring.take(need, besides=slot)
        if after is None:  # the session holds so many tensors that the slot is needed again
            tensors = [segment.tensor(*w).clone() for w in wanted]
            after = ring.taken(slot, need)
        else:
            tensors = segment.give(wanted)
        self._next(after)
        return [(r.tag, t) for r, t in zip(records, tensors, strict=True)]

    def _next(self, slot: Slot | None) -> None:
        self._slot, self._segment = slot, None if slot is None else slot.segment

    def _agreed_capacity(self) -> int:
        size = 0 if self._segment is None else self._segment.size
        return size if self._across is None else self._across.least(size)

    def _answer(self, capacity: int) -> None:
        """Send the other ranks of the node the place where they write next.

        Raises:
            FlexError: a rank did not get it; the others have it nevertheless.
        """
        ring, slot = self._ring, self._slot
        assert ring is not None
        self._capacity = capacity
        number = None if slot is None else slot.number
        size = 0 if slot is None else slot.segment.size
        note = {"slot": number, "size": size, "capacity": capacity, "kept": ring.numbers}
        new = slot is not None and slot.number not in self._announced
        failed: FlexError | None = None
        for line in self._lines.values():
            try:
                line.send(note, slot.fd if new and slot is not None else None)
            except FlexError as error:
                line.close()  # that rank must not wait for the answer
                failed = error
        if slot is not None:
            self._announced.add(slot.number)
        if failed is not None:
            raise failed

    def _read_answer(self) -> None:
        """Read the answer of the node's first rank, waiting for it.

        Raises:
            FlexError: the connection failed.
            OSError: this process has no more descriptors or memory for the slot.
        """
        (line,) = self._lines.values()
        note, fd = line.receive(self.watch)
        self._segment, self._capacity = None, note["capacity"]
        if fd is not None:
            self._segments[note["slot"]] = Segment(fd, note["size"])
        self._segments = {n: s for n, s in self._segments.items() if n in note["kept"]}
        self._segment = self._segments.get(note["slot"])
        if self._copies is not None:
            self._copies.keep(self._segments.values())
        if note["slot"] is not None and self._segment is None:
            # The system drops a descriptor that the receiving process has no room for.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _warn_if_lacking(self, need: int) -> None:
        ring = self._ring
        assert ring is not None
        if self._warned or not ring.lacking:
            return
        self._warned = True
        warnings.warn(
            f"the captures of a step need {need} bytes of shared memory, and {ring.lacking}; what does not "
            "fit is gathered, which is slower: give it room (docker run --shm-size="
            f"{-(-4 * need // (1 << 30))}g, FLEX_SHARED_BYTES={2 * need}), name another folder in memory "
            "(FLEX_SHARED_FOLDER), or capture less",
            FlexWarning,
            stacklevel=2,
        )


def open_shared_memory(mesh: Mesh) -> SharedMemoryTransport | None:
    """Shared memory for the ranks of a stage; None, on all of them, where every capture must be gathered.

    Collective over the axes that a stage's tensors are cut along.
    """
    axes = [a.name for a in mesh if a.name not in REPLICA_AXES and a.size > 1]
    if not axes:
        return None
    door = _open_server()
    member = Member(dist.get_rank(), {a: mesh[a].coord for a in axes}, flex_config.node or _node_name())
    open_at = (door.name, door.token) if door else ("", "")
    answers = gather_objects((member, open_at, flex_config.shared_bytes), mesh, axes)
    members = [m for m, _, _ in answers]
    me = members.index(member)
    firsts = [i for i, m in enumerate(members) if m.node not in [n.node for n in members[:i]]]
    first = next(i for i in firsts if members[i].node == member.node)
    line, across, good = None, None, min(most for _, _, most in answers) > 0
    if good and me != first:
        name, token = answers[first][1]
        line = connect_to_node(name, token, me, f"rank {members[first].rank}")
        good = line is not None
    elif good:
        good = door is not None
        if len(firsts) > 1:
            across = open_node_exchange([members[i].rank for i in firsts], member.rank)
            good = good and across is not None
    good = all(gather_objects(good, mesh, axes))
    lines: dict[int, NodeConnection] = {} if line is None else {first: line}
    transport: SharedMemoryTransport | None = None
    # The other ranks wait for the error of one: it is told to them, and its captures are gathered.
    with suppress(OSError, FlexError, RuntimeError):
        ring = None
        if good and me == first and door is not None:
            near = {i: f"rank {m.rank}" for i, m in enumerate(members) if m.node == member.node and i != me}
            lines = door.let_in(near)
            remove_stale_files(flex_config.shared_folder)
            ring = SlotRing(flex_config.shared_folder, flex_config.shared_bytes)
        if good:
            begun = SharedMemoryTransport(members, me, mesh, lines, ring, across)
            begun.begin()
            transport = begun
    if door is not None:
        door.close()
    if transport is None:
        for line in lines.values():
            line.close()
    if good and all(gather_objects(transport is not None, mesh, axes)):
        return transport
    if transport is not None:
        transport.close()
    return None


def _open_server() -> NodeServer | None:
    if sys.platform != "linux":
        return None
    try:
        return NodeServer()
    except OSError:  # a sandbox without such sockets
        return None


def _node_name() -> str:
    """The same for processes that can reach each other by abstract sockets, which go by network namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
