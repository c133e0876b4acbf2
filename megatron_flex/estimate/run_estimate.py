"""The estimate of a run: every hook at every tensor, every rank's bytes by link, and its memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_flex.collectives import EXCHANGE_BYTES
from megatron_flex.dump.size_estimate import EstimatedTensor
from megatron_flex.errors import FlexError
from megatron_flex.estimate.hook_estimate import (
    AddedCollective,
    Links,
    PassEstimate,
    Placement,
    Traffic,
    estimate_pass,
    traffic_between,
)
from megatron_flex.estimate.hook_notation import HookSpec
from megatron_flex.mesh import Mesh
from megatron_flex.progress import format_bytes
from megatron_flex.sites import Site, fold_numbers, strip_numbers
from megatron_flex.text_table import format_table

LINK_COLUMNS = (">NVLink", ">network", ">PCIe")
TENSOR_COLUMNS = (
    "tensor",
    "hook",
    "layout",
    ">full tensor",
    ">shard",
    "collectives",
    *LINK_COLUMNS,
    ">disk",
    ">device",
)  # the titles of `RunEstimate.rows()`; `>` is a column of numbers
RANK_COLUMNS = ("rank", ">collectives", *LINK_COLUMNS, ">shared", ">disk", ">link time", ">device", ">host")
FLAG_BYTES = EXCHANGE_BYTES  # bytes of the flags that ranks compare along every axis after a step with hooks


@dataclass(frozen=True, slots=True)
class HookEstimate:
    """One hook at one tensor.

    Attributes:
        hook: as text.
        name: the site's name.
        kind: `value` or `gradient`.
        layout: as text.
        shape: of the full tensor.
        stage: the pipeline stage that owns it; -1 where all stages take part.
        times: the number of calls in a step, on each data parallel rank.
        each: the estimate of one call.
        asked: the hook's pattern with what `@` adds, as it was given; without a pattern where that was none.
    """

    hook: str
    name: str
    kind: str
    layout: str
    shape: tuple[int | str, ...]
    stage: int
    times: int
    each: PassEstimate
    asked: str = ""


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """The estimate of all hooks for one rank in one step.

    Attributes:
        role: the rank's role, as text.
        stage: its pipeline stage.
        moved: its bytes by link.
        seconds: the time of its links, one after the other.
        collectives: the number it takes part in for tensors; `flags` are additional.
        device: maximum bytes of memory on its device: each tensor for its own call only, captures until
            they are copied to the host.
        host: bytes of its host's memory, until the captures are taken.
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
    """The estimate of a run.

    Attributes:
        mesh: the number of ranks on each axis.
        ranks: their total number.
        links: between them.
        hooks: every hook at every tensor, in model order.
        roles: for each stage, its ranks with different traffic; of equal stages the first.
        flags: further small collectives of a step with hooks, on each rank.
        uncounted: sites that cannot be estimated, and why.
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
        """The rank with the longest link time."""
        return max(self.roles, key=lambda r: r.seconds)

    def to_json(self) -> dict[str, Any]:
        """As plain values, with the slowest rank."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**fields, "slowest": json.loads(json.dumps(asdict(self.slowest)))}

    def rows(self) -> list[tuple[str, ...]]:
        """Rows for a table, one for equal tensors.

        Site as it was asked for, effect of the hook, layout, full shape, a rank's shard, and per microbatch:
        collectives, NVLink, network, PCIe and disk of the busiest rank, device memory.
        """
        groups: dict[tuple[Any, ...], list[HookEstimate]] = {}
        for hook in self.hooks:
            each = replace(
                hook.each, sent_to_first_stage=0
            )  # which differs only between the first stage and the others
            key = (hook.hook, strip_numbers(hook.name), hook.kind, hook.shape, hook.layout, each)
            groups.setdefault(key, []).append(hook)
        out = []
        rows = Counter(alike[0].hook for alike in groups.values())
        for alike in groups.values():
            one, each = alike[0], alike[0].each
            busy = max((each.rank, each.leader), key=lambda t: t.seconds(self.links))
            out.append(
                (
                    _name_row(alike, rows[one.hook] == 1),
                    each.action,
                    one.layout,
                    format_bytes(each.full),
                    format_bytes(each.shard),
                    _describe_collectives(each.collectives),
                    *(format_bytes(getattr(busy, n)) for n in ("nvlink", "network", "pcie", "disk")),
                    format_bytes(each.device),
                )
            )
        return out

    def __str__(self) -> str:
        """The hooks, the ranks and what was not counted, as tables."""
        slowest = self.slowest
        uncounted = {strip_numbers(name): why for name, why in self.uncounted.items()}
        lines = [
            *format_table(self.rows(), TENSOR_COLUMNS),
            "",
            *format_table(self.summary(), RANK_COLUMNS),
            f"slowest: {slowest.role}, {format_duration(slowest.seconds)}",
            *(f"not counted: {name}: {why}" for name, why in uncounted.items()),
        ]
        return "\n".join(lines)

    def summary(self) -> list[tuple[str, ...]]:
        """Rows for a table of ranks: role, collectives in a step, bytes by link, seconds, memory."""
        return [
            (
                r.role,
                str(r.collectives),
                *(format_bytes(getattr(r.moved, n)) for n in ("nvlink", "network", "pcie", "shared", "disk")),
                format_duration(r.seconds),
                format_bytes(r.device),
                format_bytes(r.host),
            )
            for r in self.roles
        ]


def format_duration(seconds: float) -> str:
    """Seconds, or milliseconds of less than one."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _name_row(alike: Sequence[HookEstimate], alone: bool) -> str:
    """The name of a row: the request, if that is this row alone; else the sites, with the selection.

    Args:
        alike: the hook at the tensors of the row.
        alone: whether the hook has no other row.
    """
    one = alike[0]
    pattern, at, part = one.asked.partition("@")
    name = (pattern if alone and pattern else fold_numbers([hook.name for hook in alike])) + at + part
    if one.kind == "gradient" and "gradient" not in part.split("@"):
        name += " gradient"
    return name + (f" ({len(alike)})" if len(alike) > 1 else "")


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
    wanted: Iterable[tuple[HookSpec, Site, EstimatedTensor]],
    links: Links,
    uncounted: Mapping[str, str],
    heads: int = 0,
    more: Sequence[HookEstimate] = (),
) -> RunEstimate:
    """Sum the estimates of hooks.

    Args:
        mesh: the run's mesh; only its sizes are used.
        wanted: each hook at each tensor, in model order.
        links: between ranks.
        uncounted: sites that cannot be estimated, and why.
        heads: the number of attention heads of a layer.
        more: the estimates of dumps and statistics.

    Raises:
        FlexError: there is no hook, or one cannot be registered at its site.
    """
    wanted = list(wanted)
    placement = Placement(mesh.sizes, links.gpus_per_node)
    words: dict[Any, str] = {}
    known: dict[Any, PassEstimate] = {}
    found = []
    for hook, site, held in wanted:
        key = (
            id(hook),
            held.layout,
            held.shape,
            held.local,
            held.weight,
            held.stage > 0,
            site.read_only_reason,
        )
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
                hook.asked,
            )
        )
    found += more
    if not found:
        raise FlexError("nothing to estimate: name hooks, such as --read 'decoder.layers.*'")
    ranks = 1
    for axis in mesh:
        ranks *= axis.size
    flags = sum(1 for a in mesh if a.size > 1) if wanted else 0
    roles = _estimate_ranks(mesh, found, links, placement)
    return RunEstimate(dict(mesh.sizes), ranks, links, tuple(found), roles, flags, dict(uncounted))


def _estimate_ranks(
    mesh: Mesh, found: Sequence[HookEstimate], links: Links, placement: Placement
) -> tuple[RankEstimate, ...]:
    """The estimates of ranks, by stage and role; equal stages are listed once."""
    stages = mesh["pp"].size
    led, others, arrivals = (
        [_RankTotal() for _ in range(stages)],
        [_RankTotal() for _ in range(stages)],
        _RankTotal(),
    )
    nodes = placement.nodes(("pp",)) if stages > 1 else (0,)
    for estimate in found:
        each, n = estimate.each, estimate.times
        here = range(stages) if estimate.stage < 0 else (estimate.stage,)
        for one, moved, host in (
            *((led[stage], each.leader, each.leader_host) for stage in here),
            *((others[stage], each.rank, each.host) for stage in here),
        ):
            one.moved += moved.times(n)
            one.collectives += len(each.collectives) * n
            one.device = max(one.device, each.device)
            one.host += host * n
        if each.sent_to_first_stage:
            near = nodes[estimate.stage] == nodes[0]
            hop = traffic_between(each.sent_to_first_stage * n, near) + Traffic(
                pcie=each.sent_to_first_stage * n
            )
            led[estimate.stage].moved += hop
            arrivals.moved += hop
            arrivals.host += each.sent_to_first_stage * n
    alike: dict[tuple[Any, ...], list[RankEstimate]] = {}
    alone = mesh["tp"].size * mesh["cp"].size == 1
    for stage in range(stages):
        for role, one in (("leader", led[stage]), ("any other rank", others[stage])):
            if role != "leader" and alone:
                continue
            moved, host = one.moved, one.host
            if role == "leader" and stage == 0:
                moved, host = moved + arrivals.moved, host + arrivals.host
            key = (role, moved, one.collectives, one.device, host)
            alike.setdefault(key, []).append(
                RankEstimate(role, stage, moved, moved.seconds(links), one.collectives, one.device, host)
            )
    return tuple(_name_role(ranks, stages) for ranks in alike.values())


def _name_role(ranks: Sequence[RankEstimate], stages: int) -> RankEstimate:
    """One estimate for the ranks of several stages that have the same: `leader of stages 1-14`."""
    first, last = ranks[0], ranks[-1]
    numbers = ", ".join(str(rank.stage) for rank in ranks)
    if len(ranks) > 2 and last.stage - first.stage == len(ranks) - 1:
        numbers = f"{first.stage}-{last.stage}"
    word = "stage" if len(ranks) == 1 else "stages"
    return replace(first, role=f"{first.role} of {word} {numbers}") if stages > 1 else first
