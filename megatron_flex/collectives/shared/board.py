"""What each rank writes its parts to, and what the leader takes the wholes from, with no collective.

    forward, backward   every rank copies its part to its place in the current slot; nobody waits
    end of the step     every rank sends a note to the first rank of its node, and goes on
                        the first rank waits for the notes, hands out the tensors as they lie in the slot, and
                        answers with the slot of the next step
    next step           a rank reads that answer when it first has something to write

Where things go follows from what was recorded before, which is the same on all ranks. What does not fit is
for the caller to gather; all ranks find so alike.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from megatron_flex.collectives.shared.across import NodeExchange, locate_node_shards
from megatron_flex.collectives.transport.node_sockets import NodeConnection
from megatron_flex.collectives.transport.device_copies import DeviceCopies
from megatron_flex.collectives.shared.placing import ShardPlacement, sum_planes
from megatron_flex.collectives.shared.rooms import Member, TensorSpaceCache
from megatron_flex.collectives.shared.segment import Segment
from megatron_flex.collectives.shared.slots import SlotRing, Slot
from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor that all ranks wrote their parts of."""

    tag: Any
    layout: Layout
    local: tuple[int, ...]
    dtype: torch.dtype
    at: int
    place: ShardPlacement


class SharedMemoryTransport:
    """One rank's end of it. `members[0]` is the leader; the others' `put` gives it all they have."""

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
        self._near = [m for m in members if m.node == members[me].node]
        self._rooms = TensorSpaceCache(members, me, self.sizes, elsewhere)
        self._segments: dict[int, Segment] = {}
        self._slot: Slot | None = None  # on the node's first rank
        self._segment: Segment | None = None
        self._capacity = 0
        self._told: set[int] = set()
        self._answer_pending = ring is None  # an answer that was not read yet
        self._copies: DeviceCopies | None = None
        self._broken, self._warned = "", False
        self._records: list[TensorRecord] = []
        self.count, self._crc = 0, 0  # of all that was recorded in this step
        self._at, self._need = 0, 0  # where the next goes, and what all together would have needed
        self._sent = 0  # bytes of what goes to another node
        self._skip = False
        if ring is not None:
            self._next(ring.take(1))
            self._answer(self._agreed_capacity())

    # -- while the model runs ----------------------------------------------------------------------------

    def put(self, tag: Any, local: Tensor, layout: Layout) -> bool:
        """Write this rank's part of a tensor; False, on all ranks alike, where it has to be gathered.

        Raises:
            LayoutError: its shape does not fit the layout.
            FlexError: the others are gone, or recorded something else in the step before.
        """
        known = self._rooms.of(layout, local)
        self.note(f"{tag}{known.words}")
        place, size = known.place, known.size
        if place is None or local.layout != torch.strided:
            return False
        self._need += size
        if self._answer_pending:
            self._read_answer()
        if self._skip or self._at + size > self._capacity:
            return False
        record = TensorRecord(tag, layout, tuple(local.shape), local.dtype, self._at, place)
        self._at += size
        if self._leads:
            self._records.append(record)
        self._write(record, local)
        return True

    def note(self, tag: Any) -> None:
        """Count a tensor that goes another way: all ranks must have come by the same."""
        self._crc = crc32(str(tag).encode(), self._crc)
        self.count += 1

    def _write(self, record: TensorRecord, local: Tensor) -> None:
        if self._segment is None or not local.numel():
            return
        if not self._here:
            parts = locate_node_shards(record, self._near, self.sizes, self._sent)
            self._sent = parts.end
            at = parts.at.get(self.members[self.me].rank)
            if at is None:
                return
            whole = self._segment.tensor(at, local.shape, local.dtype)
            pairs = [(whole, local)]
        elif record.place.writes:
            shape = (record.place.planes, *record.place.shape)
            planes = self._segment.tensor(record.at, shape, record.dtype)
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

    def settle(self, gathers: bool) -> list[tuple[Any, Tensor]]:
        """The step is over. The leader gets what was put; the others get nothing, and do not wait.

        Args:
            gathers: whether the caller will gather something else now: then all wait, so that no rank enters
                a collective that another one never will.

        Raises:
            FlexError: a rank is gone, or the ranks recorded different things.
        """
        if self._copies is not None:
            self._copies.finish()
        if self._answer_pending:
            self._read_answer()
        mine = {"count": self.count, "crc": self._crc, "skip": self._skip}
        if self._ring is None:
            (line,) = self._lines.values()
            line.send(mine)
            self._answer_pending = True
            self._begin(skip=False)
            if gathers:
                self._read_answer()
            return []
        wrong = self._differing(mine)
        out: list[tuple[Any, Tensor]] = []
        records, need, sent, before = self._records, self._need, self._sent, self._segment
        self._begin(skip=False)
        if self._across is not None:
            wrong = self._across.first_of(wrong)
            if not wrong and before is not None:
                self._across.bring(records, before, sent, self.members, self.sizes)
        if wrong:
            self._fail(wrong)
        out = self._collect_tensors(records if self._leads else [], need)
        capacity = self._agreed_capacity()
        if need > capacity:
            self._warn_if_lacking(need)
        self._answer(capacity)
        return out

    def drop(self) -> None:
        """The step failed, perhaps not everywhere at the same place: what comes next is gathered.

        Another rank may still be writing what it has of that step, and the slot is not to be used before all
        have met at the end of a step.
        """
        if self._copies is not None:
            self._copies.finish()
        self._begin(skip=True)

    def close(self) -> None:
        """Hang up, and give the memory back; tensors that somebody has stay as they are."""
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        for line in self._lines.values():
            line.close()
        self._lines, self._answer_pending = {}, False
        self._slot = self._segment = None
        self._segments.clear()
        self._records.clear()
        self._capacity = 0
        if self._ring is not None:
            self._ring.close()

    # -- inside ------------------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return self.me == 0

    @property
    def _here(self) -> bool:
        """Whether wholes are put together on this node."""
        return self.members[self.me].node == self.members[0].node

    def _begin(self, skip: bool) -> None:
        self._records = []
        self.count = self._crc = self._at = self._need = self._sent = 0
        self._skip = skip

    def _differing(self, mine: dict[str, Any]) -> str:
        """Wait for the notes of the node's other ranks; what is wrong with them, empty if nothing."""
        wrong = []
        for number, line in self._lines.items():
            try:
                theirs, _ = line.receive()
            except FlexError as error:
                wrong.append(str(error))
                continue
            if theirs != mine:
                rank = self.members[number].rank
                wrong.append(
                    f"rank {rank} recorded {theirs['count']} tensors in a step in which rank "
                    f"{self.members[self.me].rank} recorded {mine['count']}, or tensors of other sites or "
                    "shapes; all ranks of a stage must read the same, in the same order"
                )
        return "; ".join(wrong)

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
                sum_planes(segment.tensor(record.at, shape, record.dtype))
        wanted = [(r.at, r.place.shape, r.dtype) for r in records]
        after = ring.take(need, besides=slot)
        if after is None:  # so many are kept that the slot is needed again: it is copied out
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

    def _answer(self, capacity: int, wrong: str = "") -> None:
        """Tell the node's other ranks where to write next."""
        ring, slot = self._ring, self._slot
        assert ring is not None
        self._capacity = capacity
        number = None if slot is None else slot.number
        size = 0 if slot is None else slot.segment.size
        note = {"slot": number, "size": size, "capacity": capacity, "kept": ring.numbers, "wrong": wrong}
        new = slot is not None and slot.number not in self._told
        for line in self._lines.values():
            with suppress(FlexError):  # who has ended since does not need it; who should not have is missed
                line.send(note, slot.fd if new and slot is not None else None)  # at the next step's end
        if slot is not None:
            self._told.add(slot.number)

    def _read_answer(self) -> None:
        """Read the answer of the node's first rank, waiting for it if need be."""
        if self._broken:
            raise FlexError(self._broken)
        (line,) = self._lines.values()
        note, fd = line.receive()
        if fd is not None and note["slot"] is not None:
            self._segments[note["slot"]] = Segment(fd, note["size"])
        elif fd is not None:
            os.close(fd)
        self._answer_pending = False
        self._segments = {n: s for n, s in self._segments.items() if n in note["kept"]}
        self._segment, self._capacity = self._segments.get(note["slot"]), note["capacity"]
        if self._copies is not None:
            self._copies.keep(self._segments.values())
        if note["wrong"]:
            self._answer_pending, self._broken = True, note["wrong"]
            raise FlexError(self._broken)

    def _fail(self, wrong: str) -> None:
        """Raise, here now and on the others when they next write."""
        self._slot = self._segment = None
        self._answer_pending, self._broken = True, wrong
        for number, line in list(self._lines.items()):
            try:
                line.send({"slot": None, "size": 0, "capacity": 0, "kept": [], "wrong": wrong})
            except FlexError:  # it is the one that is gone
                del self._lines[number]
        raise FlexError(wrong)

    def _warn_if_lacking(self, need: int) -> None:
        ring = self._ring
        assert ring is not None
        if self._warned or not ring.lacking:
            return
        self._warned = True
        warnings.warn(
            f"what is read in a step needs {need} bytes of shared memory, and {ring.lacking}; what does not "
            "fit is gathered, which is right but slower: give it room (docker run --shm-size="
            f"{-(-4 * need // (1 << 30))}g, FLEX_SHARED_BYTES={2 * need}), name another folder in memory "
            "(FLEX_SHARED_FOLDER), or read less",
            FlexWarning,
            stacklevel=2,
        )
