"""What an edit will communicate, known without communicating."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megatron_flex.collectives.edit import replica_mesh
from megatron_flex.layout import Layout, count_parts
from megatron_flex.mesh import Mesh


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective to come.

    Attributes:
        op: its name.
        axis: along which axis.
        number: bytes of its result on one rank, for each combination of the dims in `names`.
        names: dims whose length only the data tell.
    """

    op: str
    axis: str
    number: float
    names: tuple[str, ...]

    def nbytes(self, lengths: Mapping[str, int]) -> float:
        """The bytes for given lengths."""
        return self.number * prod(lengths[n] for n in self.names)

    def describe(self) -> str:
        """In words: `all_gather along tp, 128*s*b bytes`."""
        amount = "*".join([f"{self.number:g}", *self.names])
        return f"{self.op} along {self.axis}, {amount} bytes"


def plan_full_gather(layout: Layout, shape: Sequence[int | str], itemsize: int, mesh: Mesh) -> list[PlannedCollective]:
    """What putting the whole together on every rank takes.

    Args:
        layout: how the shards relate.
        shape: the whole's, dims in its order; names where only the data tell.
        itemsize: bytes of an entry.
        mesh: the run's axes.
    """
    cut = prod(count_parts(d, mesh.sizes) for d in layout.dims)
    number = itemsize * prod(_pad_known_lengths(layout, shape, mesh)) / cut
    names = tuple(n for n in shape if isinstance(n, str))
    live = layout.live(mesh.sizes)
    out = [PlannedCollective("all_reduce", a, number, names) for a in live if a in layout.partial]
    for axis in (a for a in reversed(live) if a not in layout.partial):
        number *= mesh[axis].size
        out.append(PlannedCollective("all_gather", axis, number, names))
    return out


def plan_result_broadcast(layout: Layout, shape: Sequence[int | str], itemsize: int, mesh: Mesh) -> list[PlannedCollective]:
    """What handing one rank's result to the others takes, and likewise its gradient.

    Args:
        layout: how the shards relate.
        shape: the whole's.
        itemsize: bytes of an entry.
        mesh: the run's axes.
    """
    number = float(itemsize * prod(n for n in shape if isinstance(n, int)))
    names = tuple(n for n in shape if isinstance(n, str))
    axes = list(replica_mesh(layout, mesh))
    return [
        PlannedCollective("broadcast", a.name, number, names)
        for i, a in enumerate(axes)
        if a.size > 1 and mesh.is_first(later.name for later in axes[i + 1 :])
    ]


def _pad_known_lengths(layout: Layout, shape: Sequence[int | str], mesh: Mesh) -> list[int]:
    """The lengths that are known, with the least padding that a cut needs."""
    order = layout.permute or tuple(range(len(layout.dims)))
    out = []
    for place, length in zip(order, shape, strict=True):
        dim = layout.dims[place]
        if isinstance(length, int):
            count = count_parts(dim, mesh.sizes) if dim.keep is not None else 1
            out.append(-(-length // count) * count)
    return out
