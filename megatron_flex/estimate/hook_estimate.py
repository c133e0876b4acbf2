"""The estimate of a hook at one tensor in one pass: collectives, bytes by link (NVLink, network, PCIe), and
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives import (
    TRANSPORTS,
    PlannedCollective,
    Shard,
    ShardSum,
    plan_full_gather,
    plan_read,
    plan_result_broadcast,
)
from megatron_flex.errors import HookError
from megatron_flex.estimate.hook_notation import HookSpec
from megatron_flex.estimate.tensor_sizes import (
    ROUTED_ROWS,
    EstimatedTensor,
    make_unknown_size_error,
)
from megatron_flex.layout import Layout, full_order, full_shape
from megatron_flex.layout.gradient_layout import conjugate_layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.ranges import check_count, check_positive
from megatron_flex.runtime.hooks import for_site
from megatron_flex.runtime.local_edits import on_shard
from megatron_flex.runtime.selection import CaptureSelection, plan_selection
from megatron_flex.sites import Site

RANK_ORDER = ("pp", "dp", "cp", "tp")  # Megatron's, the fastest last; `ep` divides what `dp` and `cp` count
# The bytes that each rank sends in a ring, as a share of the collective's result on one rank.
RING_SHARES = {
    "all_gather": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
}


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth of one GPU's links in bytes per second, one way. `docs/estimate.md` has the sources.

    Attributes:
        gpus_per_node: ranks fill nodes of this many GPUs in order.
        nvlink: to the other GPUs of its node.
        network: to other nodes.
        pcie: to its host.

    Raises:
        FlexError: a number is not above 0.

    Examples:
        >>> from megatron_flex.estimate import Links
        >>> links = Links(gpus_per_node=4, network=25e9)
        >>> handle = flex.register_forward_hook(HookFunction("decoder.layers.*"))
        >>> seconds = flex.estimate(sequence_length=16, micro_batch_size=2, links=links).slowest.seconds
    """

    gpus_per_node: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    pcie: float = 55e9

    def __post_init__(self) -> None:
        check_count("gpus_per_node", self.gpus_per_node)
        for name in ("nvlink", "network", "pcie"):
            check_positive(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank by link: the larger of sent and received.

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
        """The sum of this many."""
        return Traffic(*(getattr(self, f.name) * count for f in fields(self)))

    def seconds(self, links: Links) -> float:
        """The time of all links in seconds, one after the other, without latencies."""
        return self.nvlink / links.nvlink + self.network / links.network + self.pcie / links.pcie


class Placement:
    """The nodes of the ranks of a group.

    Args:
        sizes: of the mesh's axes.
        gpus_per_node: ranks fill nodes of this many GPUs in order.
    """

    def __init__(self, sizes: Mapping[str, int], gpus_per_node: int) -> None:
        shape = tuple(sizes.get(a, 1) for a in RANK_ORDER)
        self._nodes = torch.arange(prod(shape), device="cpu").reshape(shape) // gpus_per_node
        self.nodes = cache(self._group)

    def _group(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The nodes of the ranks along these axes, in order; for the group that spans the most nodes."""
        groups = self._along(axes)
        spread = groups.sort(1).values.diff(dim=1).ne(0).sum(1)
        first = int((spread == spread.max()).nonzero()[0])
        return tuple(int(n) for n in groups[first])

    def _along(self, axes: Sequence[str]) -> Tensor:
        rest = [a for a in RANK_ORDER if a not in axes]
        turned = self._nodes.permute([RANK_ORDER.index(a) for a in (*rest, *axes)])
        return turned.reshape(-1, prod(turned.shape[len(rest) :]))

    def within(self, axes: tuple[str, ...]) -> bool:
        """Whether every group along these axes is within one node."""
        return len(set(self.nodes(axes))) == 1


def traffic_between(nbytes: float, inside: bool) -> Traffic:
    """Bytes between ranks of one node, or of two."""
    return Traffic(nvlink=nbytes) if inside else Traffic(network=nbytes)


NO_TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True)
class AddedCollective:
    """One collective that a hook adds.

    Attributes:
        op: its name.
        axis: the mesh axis.
        ranks: the number of ranks on it.
        nbytes: of its result on one rank.
        backward: whether it runs in the backward pass.
    """

    op: str
    axis: str
    ranks: int
    nbytes: int
    backward: bool = False

    def describe(self) -> str:
        """As text: `all_gather tp`, `all_reduce tp backward`."""
        return f"{self.op} {self.axis}" + (" backward" if self.backward else "")


@dataclass(frozen=True, slots=True)
class PassEstimate:
    """One hook at one tensor, for each call.

    Attributes:
        action: what the hook does there: `read`, `gathered edit`, `edit of a replicated tensor`, `local
            edit`, `edit with a reduction`, `dump`, `statistics`; `read of a gathered tensor` after an edit
            has gathered it.
        collectives: in order; the leader takes part in each, and so does every rank of the stage, except for
            broadcasts of the rank's result that ran the edit: ranks get those along one axis after another.
        full: bytes of the full tensor to read or edit.
        shard: bytes of one rank's shard.
        rank: traffic of the busiest rank other than the leader.
        leader: traffic of the rank that receives the stage's captures.
        sent_to_first_stage: bytes that the stage's leader sends to the first stage's.
        device: maximum bytes that a rank holds on its device during the call.
        host: bytes in host memory of a rank other than the leader.
        leader_host: bytes in host memory of the leader, until the captures are taken.
    """

    action: str
    collectives: tuple[AddedCollective, ...] = ()
    full: int = 0
    shard: int = 0
    rank: Traffic = NO_TRAFFIC
    leader: Traffic = NO_TRAFFIC
    sent_to_first_stage: int = 0
    device: int = 0
    host: int = 0
    leader_host: int = 0


def estimate_pass(
    hook: HookSpec, tensor: EstimatedTensor, site: Site, mesh: Mesh, placement: Placement, heads: int = 0
) -> PassEstimate:
    """The estimate of a hook at one tensor.

    Args:
        hook: the hook.
        tensor: the tensor, or its gradient.
        site: its site.
        mesh: the run's mesh, as its first rank has it.
        placement: the placement of its ranks.
        heads: the number of attention heads of a layer.

    Raises:
        HookError: the hook cannot be registered there, or the site lacks a dim that it selects.
        UnknownSizeError: the tensor has rows of experts, which the router decides.
    """
    if tensor.expected:
        raise make_unknown_size_error(tensor.name, ROUTED_ROWS)
    if hook.kind == "read":
        return _estimate_read(hook, tensor, site, mesh, placement, heads)
    return _estimate_edit(hook, tensor, site, mesh, placement)


# -- reading -------------------------------------------------------------------------------------------


def _estimate_read(
    hook: HookSpec, tensor: EstimatedTensor, site: Site, mesh: Mesh, placement: Placement, heads: int
) -> PassEstimate:
    """Every rank with a shard writes it to shared memory of its node; other nodes send theirs once."""
    layout, part, size = tensor.layout, tensor.shard_bytes, tensor.full_bytes
    if hook.selection is not None:
        layout, part, size = _estimate_selection(hook.selection, tensor, site, mesh, heads)
    up = size if tensor.stage else 0
    if hook.gathered:  # every rank has it, and the leader keeps it
        on_leader = Traffic(pcie=size)
        return PassEstimate(
            "read of a gathered tensor",
            (),
            size,
            part,
            NO_TRAFFIC,
            on_leader,
            up,
            device=size,
            leader_host=size,
        )
    axes = layout.active_axes(mesh.sizes)
    nodes = Counter(placement.nodes(axes)) if axes else Counter([0])
    moved = TRANSPORTS[0].estimate(part, tuple(nodes.values()))
    to_host = Traffic(pcie=moved.host, shared=moved.host)
    rank = (to_host if plan_read(layout, mesh) else NO_TRAFFIC) + Traffic(network=moved.sent)
    leader = to_host + Traffic(network=moved.received)
    landed = size if not layout.partial else part * sum(nodes.values())
    return PassEstimate(
        "read",
        (),
        size,
        part,
        rank,
        leader,
        up,
        device=part,
        host=moved.sent,
        leader_host=landed,
    )


def _estimate_selection(
    selection: CaptureSelection, tensor: EstimatedTensor, site: Site, mesh: Mesh, heads: int
) -> tuple[Layout, int, int]:
    """A rank's reduced shard: its layout, its bytes, and those of the result on the leader.

    Of each packed sequence if the selection asks for that; the bytes are those of all.
    """
    selection.check(site)
    if selection.each_sequence and (count := max(len(d.sequences) for d in tensor.layout.dims)):
        apart = [
            _estimate_selection(selection.in_sequence(n), tensor, site, mesh, heads) for n in range(count)
        ]
        return (
            apart[0][0],
            sum(part for _, part, _ in apart),
            sum(size for _, _, size in apart),
        )
    shape, dtype = tensor.local_shape, tensor.dtype
    none, sizes = torch.device("meta"), mesh.sizes
    plan = plan_selection(
        selection, tensor.layout, shape, dtype, torch.device("cpu"), sizes, mesh.coords, heads
    )
    picks = tuple((d, t.to(none)) for d, t in plan.picks)
    reduced = replace(plan, picks=picks).local(torch.empty(shape, dtype=dtype, device=none))
    lengths = list(full_shape(plan.layout, reduced.shape, sizes))
    for dim, entries in plan.arrange:  # ranks that hold fewer of them send padding
        lengths[dim] = len(entries)
    return plan.layout, reduced.nbytes, prod(lengths) * reduced.element_size()


# -- editing -------------------------------------------------------------------------------------------


def _estimate_edit(
    hook: HookSpec, tensor: EstimatedTensor, site: Site, mesh: Mesh, placement: Placement
) -> PassEstimate:
    if site.read_only_reason:
        raise HookError(f"{site.name} can be read and not edited: {site.read_only_reason}")
    # Of the full tensor with its padding, which is gathered too; copies of key and value heads once.
    cuts = [c for d in tensor.layout.dims for c in d.cuts if mesh[c.axis].size > 1]
    part = tensor.shard_bytes
    full = part * prod(mesh[c.axis].size for c in cuts) // prod(c.copies for c in cuts)
    sums = _requested_sums(hook, tensor, site, mesh)
    if sums is None:
        sent = [] if hook.gathered else _gather_collectives(hook, tensor, mesh)
        action = "gathered edit" if sent else "edit of a replicated tensor"
        action = "edit of a gathered tensor" if hook.gathered else action
        sent += _broadcast_collectives(hook, tensor, mesh) if hook.once else []
        device = (2 * full if sent or hook.gathered else full) + part
    else:
        both = (False,) if hook.gradient else (False, True)
        sent = [
            AddedCollective("all_reduce", a.name, a.size, n, hook.gradient or back)
            for back in both
            for axes, n in sums
            for a in axes
        ]
        action, device = "edit with a reduction" if sent else "local edit", part + sum(n for _, n in sums)
    moved = sum((_ring_traffic(s, placement) for s in sent), NO_TRAFFIC)
    return PassEstimate(action, tuple(sent), full, part, moved, moved, device=device)


def _gather_collectives(hook: HookSpec, tensor: EstimatedTensor, mesh: Mesh) -> list[AddedCollective]:
    """The collectives that gather the full tensor, and its gradient."""
    layouts = [(tensor.layout, hook.gradient)]
    if not hook.gradient:
        layouts.append((conjugate_layout(tensor.layout), True))
    return [
        _added(planned, mesh, backward)
        for layout, backward in layouts
        for planned in plan_full_gather(layout, tensor.shape, tensor.dtype.itemsize, mesh)
    ]


def _broadcast_collectives(hook: HookSpec, tensor: EstimatedTensor, mesh: Mesh) -> list[AddedCollective]:
    """The collectives that broadcast the result of the rank that ran the edit, and return its gradient."""
    return [
        _added(planned, mesh, backward)
        for backward in ((True,) if hook.gradient else (False, True))
        for planned in plan_result_broadcast(tensor.layout, tensor.shape, tensor.dtype.itemsize, mesh)
    ]


def _added(planned: PlannedCollective, mesh: Mesh, backward: bool) -> AddedCollective:
    axis = mesh[planned.axis]
    return AddedCollective(planned.op, axis.name, axis.size, round(planned.nbytes({})), backward)


def _ring_traffic(sent: AddedCollective, placement: Placement) -> Traffic:
    return traffic_between(RING_SHARES[sent.op](sent.ranks) * sent.nbytes, placement.within((sent.axis,)))


class _SumRecorder(Shard):
    """A shard that records which sums are requested, and adds nothing."""

    __slots__ = ("requested",)
    requested: list[tuple[list[Axis], int]]

    def sum(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        axes = [self.mesh[c.axis] for c in self._cuts(dims)]
        if axes:
            self.requested.append((axes, tensor.nbytes))
        return tensor

    def add_low_rank(
        self, tensor: Tensor, down: Tensor, up: Tensor, factor: float, total: ShardSum
    ) -> Tensor:
        return tensor + factor * (self.sum(tensor @ down, [-1]) @ up)


def _requested_sums(
    hook: HookSpec, tensor: EstimatedTensor, site: Site, mesh: Mesh
) -> list[tuple[list[Axis], int]] | None:
    """The sums over ranks that an edit requests on its shard, with their bytes; None: the full tensor."""
    if hook.edit == "general":
        return None
    if hook.edit == "local":
        return []
    shape = tensor.local_shape
    if hook.edit == "linear":
        cuts = tensor.layout.dims[-1].cuts
        axes = [mesh[c.axis] for c in cuts if mesh[c.axis].size > 1]
        return [(axes, prod(shape[:-1]) * hook.entries * tensor.dtype.itemsize)] if axes else []
    # Those of a preset are found by running it once on a meta tensor.
    local = torch.empty(shape, dtype=tensor.dtype, device="meta")
    plain = Shard.from_local(local, tensor.layout, mesh)
    shard = _SumRecorder(**{name: getattr(plain, name) for name in SHARD_FIELDS})
    object.__setattr__(shard, "requested", [])
    edit: Any = on_shard(for_site(hook.edit, site), shard)
    if edit is None:
        return None
    order = full_order(tensor.layout)
    edit(None, local.permute(order), None, None)
    return list(shard.requested)


SHARD_FIELDS = ("layout", "mesh", "shape", "full_size")
