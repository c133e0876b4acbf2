"""The estimate of a run: every hook at every tensor, every rank's bytes by link, and its memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from megatron_flex.document import Document, Note, Renderable, Row, Table
from megatron_flex.dump import Dump
from megatron_flex.errors import FlexError
from megatron_flex.estimate.dump_estimate import estimate_dump_size
from megatron_flex.estimate.hook_estimate import (
    NO_TRAFFIC,
    RANK_ORDER,
    RING_SHARES,
    AddedCollective,
    Links,
    PassEstimate,
    Placement,
    Traffic,
    estimate_pass,
    traffic_between,
)
from megatron_flex.estimate.hook_notation import HookSpec
from megatron_flex.estimate.tensor_sizes import EstimatedTensor
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.progress import format_bytes
from megatron_flex.sites import Site, fold_numbers, strip_numbers

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
    moved: Traffic = NO_TRAFFIC
    seconds: float = 0
    collectives: int = 0
    device: int = 0
    host: int = 0

    def plus(self, moved: Traffic, host: int = 0, collectives: int = 0, device: int = 0) -> RankEstimate:
        """The estimate with one more hook, whose tensor the rank holds during its own call only."""
        return replace(
            self,
            moved=self.moved + moved,
            collectives=self.collectives + collectives,
            device=max(self.device, device),
            host=self.host + host,
        )


@dataclass(frozen=True, slots=True)
class RunEstimate(Renderable):
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
            first, each = alike[0], alike[0].each
            busy = max((each.rank, each.leader), key=lambda t: t.seconds(self.links))
            out.append(
                (
                    _name_row(alike, rows[first.hook] == 1),
                    each.action,
                    first.layout,
                    format_bytes(each.full),
                    format_bytes(each.shard),
                    ", ".join(c.describe() for c in each.collectives) or "none",
                    *(format_bytes(getattr(busy, n)) for n in ("nvlink", "network", "pcie", "disk")),
                    format_bytes(each.device),
                )
            )
        return out

    def to_document(self) -> Document:
        """Return the hooks, and what ranks send and hold for all of them in a step, as tables."""
        uncounted = {strip_numbers(name): why for name, why in self.uncounted.items()}
        flags = f"and {self.flags} collectives of a few bytes, which compare flags at the end of a step"
        return Document(
            "RunEstimate",
            [
                _nonzero_columns("each call of a hook:", TENSOR_COLUMNS, self.rows()),
                _nonzero_columns("each rank in a step:", RANK_COLUMNS, self.summary()),
                *([Note(flags)] if self.flags else []),
                Note(f"slowest: {self.slowest.role}, {format_duration(self.slowest.seconds)}"),
                *(Note(f"not counted: {name}: {why}") for name, why in uncounted.items()),
            ],
        )

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


def _nonzero_columns(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without columns of numbers in which each row has zero."""
    shown = [
        n
        for n, column in enumerate(columns)
        if not column.startswith(">") or any(row[n] not in ("0", "0 B") for row in rows)
    ]
    cells = [Row([row[n] for n in shown]) for row in rows]
    return Table([columns[n] for n in shown], cells, title=title)


def format_duration(seconds: float) -> str:
    """Seconds, or milliseconds of less than one."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _name_row(alike: Sequence[HookEstimate], alone: bool) -> str:
    """The name of a row: the request, if that is this row alone; else the sites, with the selection.

    Args:
        alike: the hook at the tensors of the row.
        alone: whether the hook has no other row.
    """
    first = alike[0]
    pattern, at, part = first.asked.partition("@")
    name = (pattern if alone and pattern else fold_numbers([hook.name for hook in alike])) + at + part
    if first.kind == "gradient" and "gradient" not in part.split("@"):
        name += " gradient"
    return name + (f" ({len(alike)})" if len(alike) > 1 else "")


def estimate_run(
    mesh: Mesh,
    hooks: Sequence[tuple[HookSpec, Site, EstimatedTensor]],
    links: Links,
    uncounted: Mapping[str, str],
    heads: int = 0,
    sinks: Sequence[HookEstimate] = (),
) -> RunEstimate:
    """Sum the estimates of hooks.

    Args:
        mesh: the run's mesh; only its sizes are used.
        hooks: each hook at each tensor, in model order.
        links: between ranks.
        uncounted: sites that cannot be estimated, and why.
        heads: the number of attention heads of a layer.
        sinks: the estimates of dumps and statistics.

    Raises:
        FlexError: there is no hook, or one cannot be registered at its site.
    """
    placement = Placement(mesh.sizes, links.gpus_per_node)
    layouts: dict[Layout, str] = {}
    passes: dict[Any, PassEstimate] = {}
    rows = []
    for hook, site, tensor in hooks:
        # Layers differ only in their names, and in whether captures travel to the first stage.
        same = (
            tensor.layout,
            tensor.shape,
            tensor.local,
            tensor.dtype,
            tensor.stage > 0,
            site.read_only_reason,
        )
        key = (id(hook), *same)
        if key not in passes:
            passes[key] = estimate_pass(hook, tensor, site, mesh, placement, heads)
        if tensor.layout not in layouts:
            layouts[tensor.layout] = tensor.layout.describe(mesh.sizes)
        rows.append(_hook_estimate(hook.describe(), tensor, layouts[tensor.layout], passes[key], hook.asked))
    rows += sinks
    if not rows:
        raise FlexError("nothing to estimate: name hooks, such as --read 'decoder.layers.*'")
    flags = sum(1 for a in mesh if a.size > 1) if hooks else 0
    return RunEstimate(
        dict(mesh.sizes),
        prod(axis.size for axis in mesh),
        links,
        tuple(rows),
        _estimate_ranks(mesh, rows, links, placement),
        flags,
        dict(uncounted),
    )


def _hook_estimate(
    hook: str, tensor: EstimatedTensor, layout: str, each: PassEstimate, asked: str = ""
) -> HookEstimate:
    return HookEstimate(
        hook, tensor.name, tensor.kind, layout, tensor.shape, tensor.stage, tensor.times, each, asked
    )


def estimate_dump_rows(dump: Dump, tensors: Sequence[EstimatedTensor], mesh: Mesh) -> list[HookEstimate]:
    """The estimate of a dump: nothing is sent; each rank of a stage writes its part of the stage's tensors.

    Args:
        dump: its settings; samples that it omits are counted, too.
        tensors: the tensors of each microbatch.
        mesh: the run's mesh.
    """
    estimate = estimate_dump_size(mesh, tensors, dump)
    ranks = estimate.ranks // mesh["pp"].size
    rows = []
    for site, tensor in zip(estimate.sites, tensors, strict=True):
        share, part = round(site.bytes / (ranks * tensor.times)), tensor.shard_bytes
        moved = Traffic(pcie=share, disk=share)
        each = PassEstimate(
            "dump", (), tensor.full_bytes, part, moved, moved, device=part, host=share, leader_host=share
        )
        rows.append(_hook_estimate(f"dump to {dump.path}", tensor, site.layout, each))
    return rows


def estimate_statistics(path: Any, nbytes: Sequence[int], mesh: Mesh, links: Links) -> HookEstimate:
    """The estimate of statistics: one all-reduce over all ranks in a step that is measured.

    Args:
        path: of their files.
        nbytes: of each all-reduce.
        mesh: the run's mesh.
        links: between ranks.
    """
    ranks = prod(a.size for a in mesh)
    sent = tuple(AddedCollective("all_reduce", "all", ranks, n) for n in nbytes if ranks > 1)
    near = Placement(mesh.sizes, links.gpus_per_node).within(RANK_ORDER)
    moved = traffic_between(sum(RING_SHARES[s.op](s.ranks) * s.nbytes for s in sent), near)
    total = sum(nbytes)
    each = PassEstimate("statistics", sent, total, total, moved, moved, host=total)
    return HookEstimate(f"statistics in {path}", "all that is measured", "value", "", (), -1, 1, each)


def _estimate_ranks(
    mesh: Mesh, rows: Sequence[HookEstimate], links: Links, placement: Placement
) -> tuple[RankEstimate, ...]:
    """The estimates of ranks, by stage and role; equal stages are listed once."""
    stages = mesh["pp"].size
    nodes = placement.nodes(("pp",)) if stages > 1 else (0,)
    alone = mesh["tp"].size * mesh["cp"].size == 1  # every rank is the leader of its stage's replica
    roles = ("leader",) if alone else ("leader", "any other rank")
    totals = {(stage, role): RankEstimate(role, stage) for stage in range(stages) for role in roles}
    for row in rows:
        each, n = row.each, row.times
        for stage in range(stages) if row.stage < 0 else (row.stage,):
            for role in roles:
                leads = role == "leader"
                totals[stage, role] = totals[stage, role].plus(
                    (each.leader if leads else each.rank).times(n),
                    (each.leader_host if leads else each.host) * n,
                    len(each.collectives) * n,
                    each.device,
                )
        if up := each.sent_to_first_stage * n:
            hop = traffic_between(up, nodes[row.stage] == nodes[0]) + Traffic(pcie=up)
            totals[row.stage, "leader"] = totals[row.stage, "leader"].plus(hop)
            totals[0, "leader"] = totals[0, "leader"].plus(hop, up)
    alike: dict[RankEstimate, list[RankEstimate]] = {}
    for total in totals.values():
        rank = replace(total, seconds=total.moved.seconds(links))
        alike.setdefault(replace(rank, stage=0), []).append(rank)
    return tuple(_name_role(ranks, stages) for ranks in alike.values())


def _name_role(ranks: Sequence[RankEstimate], stages: int) -> RankEstimate:
    """One estimate for the ranks of several stages that have the same: `leader of stages 1-14`."""
    first, last = ranks[0], ranks[-1]
    numbers = ", ".join(str(rank.stage) for rank in ranks)
    if len(ranks) > 2 and last.stage - first.stage == len(ranks) - 1:
        numbers = f"{first.stage}-{last.stage}"
    word = "stage" if len(ranks) == 1 else "stages"
    return replace(first, role=f"{first.role} of {word} {numbers}") if stages > 1 else first
