"""Mesh: the named axes of a run. An adapter reads it once from the framework; no state is global."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megatron_flex.errors import FlexError


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh, as this rank sees it.

    Attributes:
        name: `tp`, `cp`, `dp`, `pp`, `ep`, `etp` or `edp`.
        size: number of ranks along the axis.
        coord: this rank's coordinate, from 0.
        group: the framework's process group over those ranks; None where the axis has one rank.
        ranks: their global ranks in the order of their coordinates.

    Raises:
        FlexError: coordinate, size and ranks do not fit each other.

    Examples:
        >>> axis = flex.session.mesh["tp"]
        >>> axis.size, axis.coord, axis.ranks
        (1, 0, (0,))
    """

    name: str
    size: int = 1
    coord: int = 0
    group: Any = field(default=None, compare=False)
    ranks: tuple[int, ...] = (0,)

    def __repr__(self) -> str:
        return f"<Axis {self.name}: coordinate {self.coord} of {self.size}>"

    def __post_init__(self) -> None:
        if not 0 <= self.coord < self.size or len(self.ranks) != self.size:
            raise FlexError(
                f"axis {self.name!r}: coordinate {self.coord} and ranks {self.ranks} need size {self.size}"
            )


def select_shown_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes that texts name: those longer than 1 that do not follow from the others.

    Megatron divides the ranks of a stage among experts in every model. `edp` follows from the other axes, and
    `etp` is `tp` unless the user sets it.
    """
    return {
        axis: size
        for axis, size in sizes.items()
        if size > 1 and axis != "edp" and not (axis == "etp" and size == sizes.get("tp"))
    }


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """The axes as text, such as `tp=2 x pp=2`."""
    return " x ".join(f"{a}={n}" for a, n in select_shown_axes(sizes).items()) or "one rank"


@lru_cache(maxsize=64)
def _absent_axis(name: str) -> Axis:
    return Axis(name)


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of a run, from the outermost to the innermost.

    Attributes:
        axes: the coordinates on these identify a rank; iteration yields these.
        experts: the same ranks of a stage, as expert layers divide them (`edp`, `ep`, `etp`).
        ranks: the global ranks of the mesh; empty if it has all ranks of the job.

    Examples:
        >>> mesh = flex.session.mesh
        >>> mesh.sizes
        {'pp': 1, 'dp': 1, 'cp': 1, 'tp': 1, 'edp': 1, 'ep': 1, 'etp': 1}
    """

    axes: tuple[Axis, ...] = ()
    experts: tuple[Axis, ...] = ()
    ranks: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> Axis:
        """The axis of that name; an axis of one rank if the framework has none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        for axis in self.experts:
            if axis.name == name:
                return axis
        return _absent_axis(name)

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of ranks of each axis."""
        return {a.name: a.size for a in (*self.axes, *self.experts)}

    @property
    def coords(self) -> Mapping[str, int]:
        """This rank's coordinate on each axis."""
        return {a.name: a.coord for a in (*self.axes, *self.experts)}

    def replica(self) -> Mesh:
        """Return the ranks of one model replica: the mesh without data parallelism.

        Examples:
            >>> [axis.name for axis in flex.session.mesh.replica()]
            ['pp', 'cp', 'tp']
        """
        return Mesh(tuple(a for a in self.axes if a.name != "dp"), self.experts)

    def is_first(self, names: Iterable[str]) -> bool:
        """Return whether this rank has coordinate 0 on all of these axes.

        Examples:
            >>> flex.session.mesh.is_first(["tp", "cp"])
            True
        """
        return all(self[n].coord == 0 for n in names)

    def __repr__(self) -> str:
        coords = ", ".join(f"{name} {self[name].coord}" for name in select_shown_axes(self.sizes))
        return f"<Mesh {self.describe()}{coords and ' at ' + coords}>"

    def describe(self) -> str:
        """Return the mesh as text, such as `tp=2 x pp=2`.

        Examples:
            >>> flex.session.mesh.describe()
            'one rank'
        """
        return describe_sizes(self.sizes)

    def check_sizes(self, given: Mapping[str, int | None]) -> None:
        """Compare sizes given by the user with those that were detected.

        Raises:
            FlexError: they differ; the message lists all differences.

        Examples:
            >>> flex.session.mesh.check_sizes({"tp": 1, "pp": None})
        """
        wrong = [
            f"{n}={v} (found {self[n].size})" for n, v in given.items() if v is not None and v != self[n].size
        ]
        if wrong:
            raise FlexError(
                f"sizes given contradict the framework's mesh ({self.describe()}): {', '.join(wrong)}; "
                "leave them out, they are found"
            )


def mesh_of_sizes(axes: Mapping[str, int], experts: Mapping[str, int]) -> Mesh:
    """A mesh of these sizes as its first rank sees it, without groups: for what holds on all ranks."""
    dense, routed = (
        tuple(Axis(name, size, 0, None, tuple(range(size))) for name, size in sizes.items())
        for sizes in (axes, experts)
    )
    return Mesh(dense, routed)
