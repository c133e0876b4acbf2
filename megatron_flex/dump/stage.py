"""All ranks of a pipeline stage at once, and which of them write what: as `Ownership` has it for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import prod

import numpy as np
from numpy.typing import NDArray

from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh

RankArray = NDArray[np.int64]  # one entry for each rank of a pipeline stage
ReplicaSlots = tuple[RankArray, int]  # which of the replicas a rank is, and how many there are
MOST_TURNS = 400_000  # of replicated tensors to replicas; beyond it what was dealt is taken as typical


@dataclass(slots=True)
class WriteTask:
    """A tensor that a stage writes.

    Attributes:
        size: bytes of a rank's shard at each pass, as written; or of each rank's.
        times: passes in an iteration.
        here: which ranks have it; 1 or 0.
        slots: which replica each rank is; None where no two ranks hold the same.
        load: bytes of a shard, as they are weighed when replicas are dealt out.
    """

    size: int | RankArray
    times: int
    here: RankArray
    slots: tuple[object, ...] | None
    load: int


class StageLoad:
    """The ranks of one pipeline stage.

    Attributes:
        mesh: of the run.
        sizes: of its axes.
        count: ranks.
        coords: axis name to the coordinate of each rank, in the order of their numbers.
        bytes: that each rank writes in one iteration, once `deal` was called.
        tasks: in the order in which they are written.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, dict(mesh.sizes)
        dense = [a for a in mesh.axes if a.name != "pp"]
        self.count = prod(a.size for a in dense)
        self.coords: dict[str, RankArray] = {}
        for axes in (dense, mesh.experts):
            step = 1
            for axis in reversed(axes):
                self.coords[axis.name] = np.arange(self.count) // step % axis.size
                step *= axis.size
        self.bytes: RankArray = np.zeros(self.count, dtype=np.int64)
        self.tasks: list[WriteTask] = []
        self._slots: dict[tuple[object, ...], ReplicaSlots] = {}
        self._keys: dict[tuple[Layout, tuple[str, ...]], tuple[object, ...]] = {}
        self._here: dict[tuple[tuple[str, int], ...], tuple[RankArray, int]] = {(): self._all()}

    def _all(self) -> tuple[RankArray, int]:
        return np.ones(self.count, dtype=np.int64), self.count

    def add(
        self,
        layout: Layout,
        size: int | RankArray,
        times: int,
        replicated: Sequence[str],
        where: Sequence[tuple[str, int]] = (),
        load: int | None = None,
    ) -> int:
        """Add a tensor; each of its shards is written once, a summand by each rank that has one.

        Args:
            layout: of the tensor.
            size: bytes of a rank's shard, as written; or of each rank's.
            times: passes in an iteration.
            replicated: the axes over which ranks hold the same, where `layout` does not say otherwise.
            where: the coordinates of the ranks that have the tensor at all.
            load: bytes of a shard before anything is picked or cast; `size` if None.

        Returns:
            The bytes that all ranks together write of it in an iteration.
        """
        here, number = self._present(tuple(where))
        key = self._key(layout, tuple(replicated))
        slots = self._slots[key]
        weight = load if load is not None else int(np.max(size))
        self.tasks.append(WriteTask(size, times, here, key if slots[1] > 1 else None, weight))
        if isinstance(size, int):
            return number * size * times // slots[1]
        chosen = slots[0] == 0  # whichever replica writes, together they hold the same
        return int((size * (here * chosen)).sum()) * times

    def deal(self) -> None:
        """Let the replicas take turns: who has had the least to write of what they share is next."""
        shared = [t for t in self.tasks if t.slots is not None]
        most = max((t.times for t in shared), default=1)
        rounds = max(1, min(most, MOST_TURNS // max(1, len(shared))))
        counts = {id(t): [0] * self._slots[t.slots][1] for t in shared if t.slots is not None}
        heaps: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for turn in range(rounds):
            for task in shared:
                assert task.slots is not None
                if turn >= task.times:
                    continue
                heap = heaps.get(task.slots)
                if heap is None:
                    heap = heaps[task.slots] = [(0, n) for n in range(self._slots[task.slots][1])]
                    heapify(heap)
                load, chosen = heap[0]
                heapreplace(heap, (load + task.load, chosen))
                counts[id(task)][chosen] += 1
        for task in self.tasks:
            if task.slots is None:
                self.bytes += task.here * (task.size * task.times)
                continue
            slots, _ = self._slots[task.slots]
            turns = np.array(counts[id(task)]) * (task.times / min(rounds, task.times))
            self.bytes += np.rint(task.here * task.size * turns[slots]).astype(np.int64)

    def _present(self, where: tuple[tuple[str, int], ...]) -> tuple[RankArray, int]:
        if where not in self._here:
            here, _ = self._all()
            for axis, coord in where:
                here *= self.coords[axis] == coord
            self._here[where] = here, int(here.sum())
        return self._here[where]

    def _key(self, layout: Layout, replicated: tuple[str, ...]) -> tuple[object, ...]:
        """What tensors have in common whose replicas take turns with each other."""
        if (layout, replicated) not in self._keys:
            copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial}
            places = []
            for axis in (*self.mesh.axes, *self.mesh.experts):
                if axis.size > 1 and axis.name in copies:
                    places.append((axis.name, min(copies[axis.name], axis.size)))
                elif axis.size > 1 and axis.name in replicated and axis.name not in layout.axes:
                    places.append((axis.name, axis.size))
            key = tuple(places)
            self._keys[layout, replicated] = key
            self._slots.setdefault(key, self._replicas(key))
        return self._keys[layout, replicated]

    def _replicas(self, places: Sequence[tuple[str, int]]) -> ReplicaSlots:
        slots, count = np.zeros(self.count, dtype=np.int64), 1
        for axis, size in places:
            slots = slots * size + self.coords[axis] % size
            count *= size
        return slots, count


def get_stage_coordinates(stage: StageLoad, rank: int) -> Mapping[str, int]:
    """The coordinates of a rank within its stage."""
    return {name: int(c[rank]) for name, c in stage.coords.items()}
