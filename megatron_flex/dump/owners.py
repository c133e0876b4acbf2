"""Who writes what: a tensor that several ranks hold is written by one of them, and the work is spread evenly.

Pure arithmetic over coordinates: every rank comes to the same answer without asking another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh

Ranks = NDArray[np.int64]  # one entry for each rank of a pipeline stage


class Stage:
    """The ranks of one pipeline stage, and how many bytes each has to write so far.

    Attributes:
        mesh: of the run.
        coords: axis name to the coordinate of each rank, in the order of their numbers.
        bytes: of each rank, so far.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        dense = [a for a in mesh.axes if a.name != "pp"]
        experts = list(mesh.experts)
        self.coords: dict[str, Ranks] = {}
        self.count = reduce(lambda n, a: n * a.size, dense, 1)
        for axes in (dense, experts):
            step = 1
            for axis in reversed(axes):
                self.coords[axis.name] = np.arange(self.count) // step % axis.size
                step *= axis.size
        self.bytes: Ranks = np.zeros(self.count, dtype=np.int64)
        self._slots: dict[tuple[object, ...], tuple[Ranks, int]] = {}

    def assign(
        self, layout: Layout, size: int | Ranks, replicated: Sequence[str], where: Mapping[str, int] | None = None
    ) -> Ranks:
        """Let one of the replicas of each shard write it: the one whose ranks have the least to write so far.

        A summand is no replica: each rank of an axis of `layout.partial` writes its own.

        Args:
            layout: of the tensor.
            size: bytes of a rank's shard; or of each rank's.
            replicated: the axes over which ranks hold the same, where `layout` does not say otherwise.
            where: the coordinates of the ranks that have the tensor at all.

        Returns:
            The bytes that each rank writes of it.
        """
        slots, count = self._replicas(layout, tuple(replicated))
        here = np.ones(self.count, dtype=bool)
        for axis, coord in (where or {}).items():
            here &= self.coords[axis] == coord
        if count > 1:
            loads = np.bincount(slots[here], weights=self.bytes[here], minlength=count)
            here &= slots == int(loads.argmin())
        written = np.where(here, size, 0).astype(np.int64)
        self.bytes += written
        return written

    def _replicas(self, layout: Layout, replicated: tuple[str, ...]) -> tuple[Ranks, int]:
        """For each rank, which of the replicas it is; and how many there are."""
        copies = tuple((c.axis, c.copies) for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial)
        free = tuple(a for a in replicated if a not in layout.axes)
        key = (copies, free)
        if key not in self._slots:
            slots, count = np.zeros(self.count, dtype=np.int64), 1
            for axis, times in (*((a, self.mesh[a].size) for a in free), *copies):
                times = min(times, self.mesh[axis].size)
                slots = slots * times + self.coords[axis] % times
                count *= times
            self._slots[key] = slots, count
        return self._slots[key]
