"""The ranks of a run without listing them: the stride of each axis in rank numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_flex.mesh import Mesh, mesh_of_sizes


@dataclass(frozen=True, slots=True)
class GridAxis:
    """An axis.

    Attributes:
        name: `tp`, `pp` and so on.
        size: ranks along it.
        stride: difference between the numbers of neighbouring ranks on it.
    """

    name: str
    size: int
    stride: int

    def coord(self, number: int) -> int:
        """The coordinate of a rank with that number, counted from the first."""
        return number // self.stride % self.size


@dataclass(frozen=True, slots=True)
class RankGrid:
    """A mesh: rank = first + the sum of coordinates times strides.

    Attributes:
        axes: from the outermost to the innermost.
        experts: the ranks of a stage, as expert layers divide them.
        first: the number of the first rank.
        sure: whether the run numbers its ranks like this; else they are numbered here by coordinates.
    """

    axes: tuple[GridAxis, ...]
    experts: tuple[GridAxis, ...] = ()
    first: int = 0
    sure: bool = True

    @property
    def ranks(self) -> int:
        return prod(a.size for a in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return {a.name: a.size for a in (*self.axes, *self.experts)}

    def coords(self, rank: int) -> dict[str, int]:
        return {a.name: a.coord(rank - self.first) for a in (*self.axes, *self.experts)}

    def mesh(self) -> Mesh:
        """The mesh as seen by its first rank, without groups."""
        return mesh_of_sizes({a.name: a.size for a in self.axes}, {a.name: a.size for a in self.experts})

    def to_json(self) -> dict[str, Any]:
        lines = [
            [{"name": a.name, "size": a.size, "stride": a.stride} for a in axes]
            for axes in (self.axes, self.experts)
        ]
        return {"axes": lines[0], "experts": lines[1], "ranks": self.ranks, "first": self.first}


def grid_of_sizes(
    axes: Mapping[str, int], experts: Mapping[str, int] | None = None, sure: bool = True
) -> RankGrid:
    """Ranks counted along the innermost axis first; a stage's experts divide its ranks likewise."""
    return RankGrid(_count_along(axes), _count_along(experts or {}), sure=sure)


def grid_of_mesh(mesh: Mesh) -> RankGrid:
    """The ranks of a live run, whose axes list their ranks."""
    lines = [
        tuple(GridAxis(a.name, a.size, a.ranks[1] - a.ranks[0] if a.size > 1 else 1) for a in axes)
        for axes in (mesh.axes, mesh.experts)
    ]
    coords = [(a.ranks[a.coord], a.coord) for a in mesh if a.size > 1]
    steps = {line.name: line.stride for line in lines[0]}
    if coords:
        first = coords[0][0] - sum(a.coord * steps[a.name] for a in mesh if a.size > 1)
    else:
        first = mesh.ranks[0] if mesh.ranks else 0
    even = all(
        b - a == line.stride
        for axes, row in ((mesh.axes, lines[0]), (mesh.experts, lines[1]))
        for axis, line in zip(axes, row, strict=True)
        for a, b in zip(axis.ranks, axis.ranks[1:], strict=False)
    )
    pp = [line for line in lines[0] if line.name == "pp"]
    if even and _covers_all_ranks(lines[0]) and (not lines[1] or _covers_all_ranks([*pp, *lines[1]])):
        return RankGrid(lines[0], lines[1], first)
    dense, experts = ({a.name: a.size for a in axes} for axes in (mesh.axes, mesh.experts))
    return grid_of_sizes(dense, experts, sure=False)


def grid_of_ranks(
    axes: Mapping[str, int], experts: Mapping[str, int], ranks: Sequence[tuple[int, Mapping[str, int]]]
) -> RankGrid:
    """The ranks of a dump, which stores each rank's coordinates."""
    first = min(number for number, _ in ranks)
    steps = [{a: _axis_stride(a, names, ranks, first) for a in names} for names in (axes, experts)]
    dense = tuple(GridAxis(a, n, steps[0][a]) for a, n in axes.items())
    routed = tuple(GridAxis(a, n, steps[1][a]) for a, n in experts.items())
    grid = RankGrid(dense, routed, first)
    consistent = all(
        grid.coords(number).get(a) == at for number, coords in ranks for a, at in coords.items() if a in axes
    )
    return grid if consistent and grid.ranks == len(ranks) else grid_of_sizes(axes, experts, sure=False)


def _count_along(axes: Mapping[str, int]) -> tuple[GridAxis, ...]:
    out: list[GridAxis] = []
    stride = 1
    for name, size in reversed(list(axes.items())):
        out.append(GridAxis(name, size, stride))
        stride *= size
    return tuple(reversed(out))


def _covers_all_ranks(lines: Iterable[GridAxis]) -> bool:
    """Whether every number up to the product of the sizes belongs to one coordinate tuple."""
    covered = 1
    for line in sorted((a for a in lines if a.size > 1), key=lambda a: a.stride):
        if line.stride != covered:
            return False
        covered *= line.size
    return True


def _axis_stride(
    axis: str, beside: Mapping[str, int], ranks: Sequence[tuple[int, Mapping[str, int]]], first: int
) -> int:
    """The difference between the numbers of neighbouring ranks along an axis."""
    for number, coords in ranks:
        others = any(coords.get(a, 0) for a in (*beside, "pp") if a != axis)
        if coords.get(axis, 0) == 1 and not others:
            return max(1, number - first)
    return 1
