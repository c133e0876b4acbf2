"""What hooks would cost in a run: every tensor that they are at, every rank's bytes by link, its memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_flex.costs.charging import PassEstimate, AddedCollective, estimate_pass
from megatron_flex.costs.hook_notation import PlannedHook
from megatron_flex.costs.links import Links, Placement, Traffic, traffic_between
from megatron_flex.dump.plan import EstimatedTensor
from megatron_flex.dump.words import format_bytes, strip_numbers
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.hooks import for_site
from megatron_flex.sites import Site

FLAG_BYTES = 8  # bytes: two flags that ranks compare along every axis after a step with an edit that can fail


@dataclass(frozen=True, slots=True)
class HookEstimate:
    """One hook at one tensor.

    Attributes:
        hook: in words.
        name: of the site.
        kind: `value` or `gradient`.
        layout: in words.
        shape: of the whole.
        stage: the pipeline stage that has it; -1 where all stages take part.
        times: how often it passes in a step, on each data parallel rank.
        each: what one pass costs.
    """

    hook: str
    name: str
    kind: str
    layout: str
    shape: tuple[int | str, ...]
    stage: int
    times: int
    each: PassEstimate


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """What all hooks cost one rank in one step.

    Attributes:
        role: which rank it is, in words.
        stage: its pipeline stage.
        moved: its bytes by link.
        seconds: that the links need for them, one after the other.
        collectives: how many it takes part in for tensors; `flags` come on top.
        device: bytes of memory on its device, at most: each tensor is there for its own pass only, what is
            read until it is copied to the host.
        host: bytes of its host's memory, until what was read is taken.
    """

    role: str
    stage: int
    moved: Traffic
    seconds: float
    collectives: int
    device: int
    host: int


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """What hooks would cost.

    Attributes:
        mesh: axis name to number of ranks.
        ranks: how many there are.
        links: between them.
        hooks: every hook at every tensor, in model order.
        roles: what the ranks of a stage pay that differ by what they do; of stages that are alike the first.
        flags: collectives of some bytes that a step has more, on each rank, if some edit can fail.
        uncounted: sites that were meant and cannot be told of, and why.
    """

    mesh: Mapping[str, int]
    ranks: int
    links: Links
    hooks: tuple[HookEstimate, ...]
    roles: tuple[RankEstimate, ...]
    flags: int = 0
    uncounted: Mapping[str, str] = field(default_factory=dict)

    @property
    def slowest(self) -> RankEstimate:
        """The rank whose links need longest."""
        return max(self.roles, key=lambda r: r.seconds)

    def to_json(self) -> dict[str, Any]:
        """In plain values, with the slowest rank."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**fields, "slowest": json.loads(json.dumps(asdict(self.slowest)))}

    def rows(self) -> list[tuple[str, ...]]:
        """Rows for a table, one for alike tensors: site, what the hook does there, layout, whole, a rank's
        part, and of a microbatch: collectives, NVLink, network, PCIe and disk of the busiest rank, device
        memory.
        """
        groups: dict[tuple[Any, ...], list[HookEstimate]] = {}
        for cost in self.hooks:
            each = replace(cost.each, up=0)  # which differs only between the first stage and the others
            key = (cost.hook, strip_numbers(cost.name), cost.kind, cost.shape, cost.layout, each)
            groups.setdefault(key, []).append(cost)
        out = []
        for alike in groups.values():
            one, each = alike[0], alike[0].each
            count = f" ({len(alike)})" if len(alike) > 1 else ""
            busy = max((each.rank, each.leader), key=lambda t: t.seconds(self.links))
            name = strip_numbers(one.name) + (" gradient" if one.kind == "gradient" else "")
            out.append(
                (
                    name + count,
                    each.way,
                    one.layout,
                    format_bytes(each.whole),
                    format_bytes(each.part),
                    _describe_collectives(each.collectives),
                    *(format_bytes(getattr(busy, n)) for n in ("nvlink", "network", "pcie", "disk")),
                    format_bytes(each.device),
                )
            )
        return out

    def summary(self) -> list[tuple[str, ...]]:
        """Rows for a table of ranks: which, collectives in a step, bytes by link, seconds, memory."""
        return [
            (
                r.role,
                str(r.collectives),
                *(format_bytes(getattr(r.moved, n)) for n in ("nvlink", "network", "pcie", "shared", "disk")),
                f"{r.seconds * 1e3:.3f} ms",
                format_bytes(r.device),
                format_bytes(r.host),
            )
            for r in self.roles
        ]


def _describe_collectives(sent: Sequence[AddedCollective]) -> str:
    return ", ".join(s.describe() for s in sent) or "none"


@dataclass(slots=True)
class _RankTotal:
    moved: Traffic = field(default_factory=Traffic)
    collectives: int = 0
    device: int = 0
    host: int = 0


def estimate_run(
    mesh: Mesh,
    wanted: Iterable[tuple[PlannedHook, Site, EstimatedTensor]],
    links: Links,
    uncounted: Mapping[str, str],
    heads: int = 0,
    more: Sequence[HookEstimate] = (),
) -> RunEstimate:
    """Add up what hooks cost.

    Args:
        mesh: of the run; only its sizes count.
        wanted: each hook at each tensor, in model order.
        links: between ranks.
        uncounted: sites that cannot be told of, and why.
        heads: how many attention heads a layer has.
        more: what dumps and statistics cost beside hooks.

    Raises:
        FlexError: no hook at all, or one that cannot stand where it is meant to.
    """
    wanted = list(wanted)
    placement = Placement(mesh.sizes, links.gpus_per_node)
    words: dict[Any, str] = {}
    known: dict[Any, PassEstimate] = {}
    found = []
    for hook, site, held in wanted:
        key = (id(hook), held.layout, held.shape, held.local, held.weight, held.stage > 0, site.fixed)
        if key not in known:
            known[key] = estimate_pass(hook, held, site, mesh, placement, heads)
        if held.layout not in words:
            words[held.layout] = held.layout.describe(mesh.sizes)
        found.append(
            HookEstimate(
                hook.describe(),
                held.name,
                held.kind,
                words[held.layout],
                held.shape,
                held.stage,
                held.times,
                known[key],
            )
        )
    found += more
    if not found:
        raise FlexError("costs of nothing: say hooks, such as --read 'decoder.layers.*'")
    ranks = 1
    for axis in mesh:
        ranks *= axis.size
    asks = any(_can_fail(hook, site) for hook, site, _ in wanted)
    flags = sum(1 for a in mesh if a.size > 1) if asks else 0
    roles = _estimate_ranks(mesh, found, links, placement)
    return RunEstimate(dict(mesh.sizes), ranks, links, tuple(found), roles, flags, dict(uncounted))


def _can_fail(hook: PlannedHook, site: Site) -> bool:
    """Whether a hook has an edit after which ranks ask each other."""
    if hook.asks is not None or not hook.edit or hook.edit == "local":
        return bool(hook.asks)
    return not getattr(for_site(hook.edit, site), "sure", False)


def _estimate_ranks(mesh: Mesh, found: Sequence[HookEstimate], links: Links, placement: Placement) -> tuple[RankEstimate, ...]:
    """What ranks pay, by stage and by what they do there; stages that pay the same are told of once."""
    stages = mesh["pp"].size
    led, others, arrivals = [_RankTotal() for _ in range(stages)], [_RankTotal() for _ in range(stages)], _RankTotal()
    nodes = placement.nodes(("pp",)) if stages > 1 else (0,)
    for cost in found:
        each, n = cost.each, cost.times
        here = range(stages) if cost.stage < 0 else (cost.stage,)
        for one, moved, host in (
            *((led[stage], each.leader, each.leader_host) for stage in here),
            *((others[stage], each.rank, each.host) for stage in here),
        ):
            one.moved += moved.times(n)
            one.collectives += len(each.collectives) * n
            one.device = max(one.device, each.device)
            one.host += host * n
        if each.up:
            near = nodes[cost.stage] == nodes[0]
            hop = traffic_between(each.up * n, near) + Traffic(pcie=each.up * n)
            led[cost.stage].moved += hop
            arrivals.moved += hop
            arrivals.host += each.up * n
    out: dict[tuple[Any, ...], RankEstimate] = {}
    alone = mesh["tp"].size * mesh["cp"].size == 1
    for stage in range(stages):
        for role, one in (("leader", led[stage]), ("any other rank", others[stage])):
            if role != "leader" and alone:
                continue
            moved, host = one.moved, one.host
            if role == "leader" and stage == 0:
                moved, host = moved + arrivals.moved, host + arrivals.host
            where = f"{role} of stage {stage}" if stages > 1 else role
            key = (role, moved, one.collectives, one.device, host)
            out.setdefault(
                key,
                RankEstimate(where, stage, moved, moved.seconds(links), one.collectives, one.device, host),
            )
    return tuple(out.values())
