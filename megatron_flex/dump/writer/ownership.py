"""Who writes a tensor that several ranks hold: one of them, and each of them equally much."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from math import prod

from megatron_flex.layout import Layout
from megatron_flex.mesh import Axis, Mesh

DISTINCT_AXES = ("pp", "dp", "edp")


class ReplicaTurns:
    """Whose turn it is, of ranks that hold the same tensors: the one that has had the least to write.

    Args:
        replicas: their number.
    """

    def __init__(self, replicas: int) -> None:
        self._loads = [(0, n) for n in range(replicas)]  # a heap: bytes so far, and the replica

    def next(self, nbytes: int) -> int:
        """The replica that writes a tensor of so many bytes."""
        load, chosen = self._loads[0]
        heapreplace(self._loads, (load + nbytes, chosen))
        return chosen


class Ownership:
    """Deals replicated tensors out to the ranks that hold them; nothing is communicated.

    Ranks with equal coordinates on all but the replicated axes see the same tensors in the same order, so
    that they come to the same answer.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._turns: dict[tuple[tuple[str, int], ...], ReplicaTurns] = {}

    def mine(
        self,
        layout: Layout,
        nbytes: int,
        apart: tuple[str, ...] = DISTINCT_AXES,
        over: Sequence[Axis] | None = None,
    ) -> bool:
        """Whether this rank writes a tensor.

        Args:
            layout: of the local tensor.
            nbytes: of it.
            apart: axes along which ranks hold other tensors, though the layout does not name them.
            over: the axes along which ranks may hold the same; None for all but `apart` of the mesh's, or,
                where the layout names one of them, of those that experts are divided over.
        """
        places = list_replica_axes(self.mesh, layout, apart, over)
        if not places:
            return True
        position = 0
        for _, size, coord in places:
            position = position * size + coord
        key = tuple((name, size) for name, size, _ in places)
        if key not in self._turns:
            self._turns[key] = ReplicaTurns(prod(size for _, size in key))
        return self._turns[key].next(nbytes) == position


def list_replica_axes(
    mesh: Mesh, layout: Layout, apart: tuple[str, ...] = DISTINCT_AXES, over: Sequence[Axis] | None = None
) -> list[tuple[str, int, int]]:
    """The axes along which ranks hold the same of a tensor; arguments as for `Ownership.mine`.

    Returns:
        For each its name, how many of its ranks hold the same, and this rank's place among them.
    """
    expert = any(a.name in layout.axes for a in mesh.experts)
    among = mesh.experts if expert else mesh.axes
    copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial}
    places: list[tuple[str, int, int]] = []
    for axis in among if over is None else over:
        if axis.size == 1 or (over is None and axis.name in apart):
            continue
        if axis.name not in layout.axes:
            places.append((axis.name, axis.size, axis.coord))
        elif axis.name in copies:
            places.append((axis.name, copies[axis.name], axis.coord % copies[axis.name]))
    return places
