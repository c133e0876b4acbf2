"""Which memory the next step's reads are written to: a ring of slots that the leader of a node rules."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

from megatron_flex.collectives.shared.segment import Segment, create_segment_file, free_bytes

FIRST = 16 << 20  # bytes of the first slot, before it is known what a step reads
SLOT_ROUNDING = 1 << 16  # bytes; slots are multiples of it


@dataclass(eq=False)
class Slot:
    """One piece of shared memory, known to the ranks of the node by its number."""

    number: int
    segment: Segment
    fd: int  # for ranks that do not have it yet
    retired: bool = False  # a forked process may look at it: it is given back, not written again


class SlotRing:
    """The slots of one leader.

    Tensors in a slot are handed out as they lie. A slot is written again once nobody has any of them, and
    given back to the system where it no longer fits.

    Attributes:
        folder: where the files lie.
        most: bytes that all slots together may have.
        lacking: why there is no slot that fits, for the person to read; empty if there is one.
    """

    def __init__(self, folder: str, most: int) -> None:
        self.folder, self.most, self.lacking = folder, most, ""
        self.slots: list[Slot] = []
        self._made = 0
        _rings.add(self)

    def take(self, need: int, besides: Slot | None = None) -> Slot | None:
        """A slot of at least `need` bytes that nobody looks at, not `besides`; None if there is no room."""
        self.lacking = ""
        for slot in list(self.slots):
            if slot is not besides and not slot.segment.held and (slot.retired or not _fits(slot, need)):
                self.slots.remove(slot)
        for slot in self.slots:
            if slot is not besides and not slot.segment.held:
                return slot
        least = 0 if self._made else min(FIRST, self.most)
        return self._make(max(-(-need // SLOT_ROUNDING) * SLOT_ROUNDING, least))

    def taken(self, slot: Slot, need: int) -> Slot | None:
        """What to write to next instead of a slot whose tensors were copied out: the same, if it fits."""
        if slot.segment.held or slot.retired:
            return None
        if slot.segment.size >= need:
            return slot
        self.slots.remove(slot)  # so that its room counts as free
        larger = self._make(-(-need // SLOT_ROUNDING) * SLOT_ROUNDING)
        if larger is None:
            self.slots.append(slot)
            return slot
        return larger

    @property
    def numbers(self) -> list[int]:
        """The slots there are."""
        return [s.number for s in self.slots]

    def spoil(self) -> None:
        """Write no slot again that somebody looks at now."""
        for slot in self.slots:
            slot.retired = slot.retired or slot.segment.held

    def close(self) -> None:
        """Give everything back; tensors that somebody has stay as they are."""
        self.slots.clear()

    def _make(self, size: int) -> Slot | None:
        used, room = sum(s.segment.size for s in self.slots), free_bytes(self.folder)
        if used + size > self.most:
            self.lacking = f"FLEX_SHARED_BYTES allows {self.most}, of which {used} are in use"
            return None
        if size > room // 2:  # others need it too: collectives, workers that load data
            self.lacking = f"{self.folder} has {room} bytes free, of which at most half are taken"
            return None
        try:
            fd = create_segment_file(self.folder, size)
        except OSError as error:
            self.lacking = f"{self.folder}: {error.strerror}"
            return None
        slot = Slot(self._made, Segment(os.dup(fd), size), fd)
        weakref.finalize(slot, os.close, fd)
        self._made += 1
        self.slots.append(slot)
        return slot


def _fits(slot: Slot, need: int) -> bool:
    return slot.segment.size >= need


_rings: weakref.WeakSet[SlotRing] = weakref.WeakSet()


def _retire_before_fork() -> None:
    # The child sees the same memory: what it got must not change under its hands.
    for ring in _rings:
        ring.spoil()


os.register_at_fork(before=_retire_before_fork)
