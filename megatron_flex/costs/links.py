"""Where ranks stand, and what lies between: NVLink in a node, a network between nodes, PCIe to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import prod

import torch
from torch import Tensor

from megatron_flex.errors import FlexError

RANK_ORDER = ("pp", "dp", "cp", "tp")  # Megatron's, the fastest last; `ep` divides what `dp` and `cp` count
# What a ring hands on from each rank, as a share of the collective's result on one rank.
RING_SHARES = {
    "all_gather": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
}


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second that one GPU gets, one way. `docs/costs.md` says where the defaults are from.

    Attributes:
        gpus_per_node: ranks fill nodes of so many in order.
        nvlink: to the other GPUs of its node.
        network: to other nodes.
        pcie: to its host.
    """

    gpus_per_node: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    pcie: float = 55e9

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise FlexError(f"{field.name}={getattr(self, field.name)}: links need a number above 0")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank by the link they pass: of what it sends and what it receives, the larger.

    Attributes:
        nvlink: to and from ranks of its node.
        network: to and from other nodes.
        pcie: between device and host.
        shared: written into shared memory of the host, which is where PCIe's bytes go.
        disk: written to disk, in the background.
    """

    nvlink: float = 0
    network: float = 0
    pcie: float = 0
    shared: float = 0
    disk: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, count: float) -> Traffic:
        """So often."""
        return Traffic(*(getattr(self, f.name) * count for f in fields(self)))

    def seconds(self, links: Links) -> float:
        """How long the links take, one after the other; latencies are not counted."""
        return self.nvlink / links.nvlink + self.network / links.network + self.pcie / links.pcie


class Placement:
    """Which ranks of a group share a node.

    Args:
        sizes: of the mesh's axes.
        gpus_per_node: ranks fill nodes of so many in order.
    """

    def __init__(self, sizes: Mapping[str, int], gpus_per_node: int) -> None:
        shape = tuple(sizes.get(a, 1) for a in RANK_ORDER)
        self._nodes = torch.arange(prod(shape), device="cpu").reshape(shape) // gpus_per_node
        self.nodes = cache(self._group)

    def _group(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The nodes of the ranks along these axes, in order; of all such groups the most spread one."""
        groups = self._along(axes)
        spread = groups.sort(1).values.diff(dim=1).ne(0).sum(1)
        first = int((spread == spread.max()).nonzero()[0])
        return tuple(int(n) for n in groups[first])

    def _along(self, axes: Sequence[str]) -> Tensor:
        rest = [a for a in RANK_ORDER if a not in axes]
        turned = self._nodes.permute([RANK_ORDER.index(a) for a in (*rest, *axes)])
        return turned.reshape(-1, prod(turned.shape[len(rest) :]))

    def within(self, axes: tuple[str, ...]) -> bool:
        """Whether every group along these axes lies in one node."""
        return len(set(self.nodes(axes))) == 1


def traffic_between(nbytes: float, inside: bool) -> Traffic:
    """Bytes that pass between ranks of one node, or of two."""
    return Traffic(nvlink=nbytes) if inside else Traffic(network=nbytes)
