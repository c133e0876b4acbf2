"""What a hook moves and holds at one tensor, each time that it passes: collectives, bytes by link, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives import Shard, plan_result_broadcast, plan_read, plan_full_gather
from megatron_flex.costs.hook_notation import PlannedHook
from megatron_flex.costs.links import RING_SHARES, Placement, Traffic, traffic_between
from megatron_flex.dump.plan import EstimatedTensor
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout, full_shape
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.runtime.hooks import for_site
from megatron_flex.runtime.selection import CaptureSelection, plan_selection
from megatron_flex.sites import Site

NO_TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True)
class AddedCollective:
    """One collective that a hook adds.

    Attributes:
        op: its name.
        axis: along which axis.
        ranks: how many it has.
        nbytes: of its result on one rank.
        backward: whether it goes with the backward pass.
    """

    op: str
    axis: str
    ranks: int
    nbytes: int
    backward: bool = False

    def describe(self) -> str:
        """In words: `all_gather tp`, `all_reduce tp backward`."""
        return f"{self.op} {self.axis}" + (" backward" if self.backward else "")


@dataclass(frozen=True, slots=True)
class PassEstimate:
    """One hook at one tensor, each time that it passes.

    Attributes:
        way: what the hook does there: `read`, `edit of the whole`, `edit of the part`, `edit by sums`,
            `dump`, `statistics`; `... of what is gathered` behind another edit's gathering.
        collectives: in order, of which the leader takes part in each, and so does every rank of the stage,
            but for broadcasts of what a leader made: ranks get those along one axis after another.
        whole: bytes of what one device would read or edit.
        part: bytes of what one rank has of it.
        rank: what the busiest rank moves that does not lead.
        leader: what the rank moves that receives what the stage reads.
        up: bytes that the stage's leader hands to the first stage's.
        device: bytes that a rank holds on its device while the tensor passes, at most.
        host: bytes in its host's memory that a rank other than the leader has to hold for it.
        leader_host: bytes there for the leader, until they are taken.
    """

    way: str
    collectives: tuple[AddedCollective, ...] = ()
    whole: int = 0
    part: int = 0
    rank: Traffic = NO_TRAFFIC
    leader: Traffic = NO_TRAFFIC
    up: int = 0
    device: int = 0
    host: int = 0
    leader_host: int = 0


def estimate_pass(
    hook: PlannedHook, held: EstimatedTensor, site: Site, mesh: Mesh, placement: Placement, heads: int = 0
) -> PassEstimate:
    """What a hook costs at one tensor.

    Args:
        hook: the hook.
        held: the tensor, or its gradient.
        site: where it passes.
        mesh: of the run, as its first rank sees it.
        placement: of its ranks.
        heads: how many attention heads a layer has.

    Raises:
        HookError: the hook cannot stand there, or the site has no such dim as it selects.
    """
    if hook.kind == "read":
        return _estimate_read(hook, held, site, mesh, placement, heads)
    return _estimate_edit(hook, held, site, mesh, placement)


def _padded_bytes(held: EstimatedTensor, mesh: Mesh) -> int:
    """Bytes of the whole, its padding included, as it is gathered."""
    parts = prod(c.size for c in _cutting_axes(held.layout, mesh))
    copies = prod(c.copies for d in held.layout.dims for c in d.cuts if mesh[c.axis].size > 1)
    return round(prod(held.local) * held.weight * parts / copies)


def _cutting_axes(layout: Layout, mesh: Mesh) -> list[Axis]:
    return [mesh[c.axis] for d in layout.dims for c in d.cuts if mesh[c.axis].size > 1]


# -- reading -------------------------------------------------------------------------------------------


def _estimate_read(hook: PlannedHook, held: EstimatedTensor, site: Site, mesh: Mesh, placement: Placement, heads: int) -> PassEstimate:
    """Every rank that has a part writes it into shared memory of its node; other nodes send theirs once."""
    if any(isinstance(n, str) for n in held.shape):
        raise HookError(f"{held.name}: only the data tell how long it is; leave it out")
    layout, part = held.layout, round(prod(held.local)) * held.weight
    size = prod(n for n in held.shape if isinstance(n, int)) * held.weight
    if hook.wanted is not None:
        layout, part, size = _estimate_selection(hook.wanted, held, site, mesh, heads)
    up = size if held.stage else 0
    if hook.gathered:  # every rank has it, and the leader keeps it
        kept = Traffic(pcie=size)
        return PassEstimate(
            "read of what is gathered", (), size, part, NO_TRAFFIC, kept, up, device=size, leader_host=size
        )
    axes = layout.live(mesh.sizes)
    nodes = Counter(placement.nodes(axes)) if axes else Counter([0])
    _, *others = nodes.values()
    mine = Traffic(pcie=part, shared=part)
    rank = mine if plan_read(layout, mesh) else NO_TRAFFIC
    if others:
        rank += Traffic(network=max(others) * part)
    leader = mine + Traffic(network=sum(others) * part)
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
        host=max(others, default=0) * part,
        leader_host=landed,
    )


def _estimate_selection(wanted: CaptureSelection, held: EstimatedTensor, site: Site, mesh: Mesh, heads: int) -> tuple[Layout, int, int]:
    """What a rank makes of its part: how these relate, their bytes, and those of what the leader keeps."""
    wanted.check(site)
    shape = tuple(round(n) for n in held.local)
    none, sizes, dtype = torch.device("meta"), mesh.sizes, DTYPE_BY_WIDTH[held.weight]
    plan = plan_selection(wanted, held.layout, shape, dtype, torch.device("cpu"), sizes, mesh.coords, heads)
    one = tuple((d, t.to(none)) for d, t in plan.picks)
    made = replace(plan, picks=one).local(torch.empty(shape, dtype=dtype, device=none))
    kept = prod(full_shape(plan.layout, made.shape, sizes)) * made.element_size()
    return plan.layout, made.nbytes, kept


# -- editing -------------------------------------------------------------------------------------------


def _estimate_edit(hook: PlannedHook, held: EstimatedTensor, site: Site, mesh: Mesh, placement: Placement) -> PassEstimate:
    if site.fixed:
        raise HookError(f"{site.name} can be read and not edited: {site.fixed}")
    whole = _padded_bytes(held, mesh)
    part = round(prod(held.local) * held.weight)
    sums = _requested_sums(hook, held, site, mesh)
    if sums is None:
        sent = [] if hook.gathered else _gather_collectives(hook, held, mesh)
        way = "edit of the whole" if sent else "edit of what each rank has whole"
        way = "edit of what is gathered" if hook.gathered else way
        sent += _broadcast_collectives(hook, held, mesh) if hook.leads else []
        device = (2 * whole if sent or hook.gathered else whole) + part
    else:
        both = (False,) if hook.gradient else (False, True)
        sent = [
            AddedCollective("all_reduce", a.name, a.size, n, hook.gradient or back)
            for back in both
            for axes, n in sums
            for a in axes
        ]
        way, device = "edit by sums" if sent else "edit of the part", part + sum(n for _, n in sums)
    moved = sum((_ring_traffic(s, placement) for s in sent), NO_TRAFFIC)
    return PassEstimate(way, tuple(sent), whole, part, moved, moved, device=device)


def _gather_collectives(hook: PlannedHook, held: EstimatedTensor, mesh: Mesh) -> list[AddedCollective]:
    """What putting the whole together takes, and its gradient behind it."""
    passes = [(held.layout, hook.gradient)] + ([] if hook.gradient else [(held.layout.gradient(), True)])
    return [
        AddedCollective(p.op, p.axis, mesh[p.axis].size, round(p.nbytes({})), backward)
        for layout, backward in passes
        for p in plan_full_gather(layout, held.shape, held.weight, mesh)
    ]


def _broadcast_collectives(hook: PlannedHook, held: EstimatedTensor, mesh: Mesh) -> list[AddedCollective]:
    """What giving all ranks the leader's result takes, and the leader its gradient back."""
    return [
        AddedCollective(p.op, p.axis, mesh[p.axis].size, round(p.nbytes({})), backward)
        for backward in ((True,) if hook.gradient else (False, True))
        for p in plan_result_broadcast(held.layout, held.shape, held.weight, mesh)
    ]


def _ring_traffic(sent: AddedCollective, placement: Placement) -> Traffic:
    return traffic_between(RING_SHARES[sent.op](sent.ranks) * sent.nbytes, placement.within((sent.axis,)))


class _SumRecorder(Shard):
    """A part that notes which sums are asked of it, and adds up nothing."""

    __slots__ = ("heard",)
    heard: list[tuple[list[Axis], int]]

    def sum(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        axes = [self.mesh[c.axis] for c in self._cuts(dims)]
        if axes:
            self.heard.append((axes, tensor.nbytes))
        return tensor

    def onto(self, tensor: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
        return tensor + factor * (self.sum(tensor @ down, [-1]) @ up)


def _requested_sums(hook: PlannedHook, held: EstimatedTensor, site: Site, mesh: Mesh) -> list[tuple[list[Axis], int]] | None:
    """The sums over ranks that an edit asks for on its part, with their bytes; None if it needs the whole."""
    if hook.edit == "general":
        return None
    if hook.edit == "local":
        return []
    shape = tuple(round(n) for n in held.local)
    if hook.edit == "linear":
        cuts = held.layout.dims[-1].cuts
        axes = [mesh[c.axis] for c in cuts if mesh[c.axis].size > 1]
        return [(axes, prod(shape[:-1]) * hook.entries * held.weight)] if axes else []
    return record_preset_sums(hook.edit, shape, held, site, mesh)


def record_preset_sums(
    edit: Any, shape: tuple[int, ...], held: EstimatedTensor, site: Site, mesh: Mesh
) -> list[tuple[list[Axis], int]] | None:
    """What a preset asks for, by running it once on a part without memory."""
    bound = for_site(edit, site)
    local = torch.empty(shape, dtype=DTYPE_BY_WIDTH[held.weight], device="meta")
    shard = _SumRecorder(**{n: getattr(s, n) for s in [Shard.of(local, held.layout, mesh)] for n in SHARD_FIELDS})
    object.__setattr__(shard, "heard", [])
    ready = getattr(bound, "on_shard", lambda _: None)(shard)
    if ready is None:
        return None
    order = held.layout.permute or tuple(range(len(shape)))
    ready(None, local.permute(order), None, None)
    return list(shard.heard)


SHARD_FIELDS = ("layout", "mesh", "shape", "whole")
DTYPE_BY_WIDTH = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
