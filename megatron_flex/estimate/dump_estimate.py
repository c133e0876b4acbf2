"""An estimate of a dump before a run: bytes of each tensor, of each rank, and in total."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_flex.document import Document, Note, Part, Renderable, Row, Table
from megatron_flex.dump import Dump, list_replica_axes
from megatron_flex.dump.part_format import compute_part_limit
from megatron_flex.dump.token_selection import (
    TOKEN_DIM,
    RandomTokens,
    TokenSelection,
    find_dim,
    select_positions,
)
from megatron_flex.dump.writer.ownership import ReplicaTurns
from megatron_flex.errors import FlexError
from megatron_flex.estimate.tensor_sizes import EstimatedTensor
from megatron_flex.layout import Dim, Layout, count_parts, spans
from megatron_flex.mesh import Mesh, describe_sizes
from megatron_flex.progress import format_bytes, track
from megatron_flex.sites import fold_numbers, strip_numbers

MAX_STAGES_SHOWN = 8  # of more stages only the lightest and the heaviest are shown
DUMP_COLUMNS = ("tensor", "stage", "shape", "layout", ">per rank", ">total")  # of `DumpEstimate.rows()`
ReplicaAxes = tuple[tuple[str, int], ...]  # along which ranks hold the same, and how many of them do
MAX_TURNS = 400_000  # of replicated tensors to replicas; beyond it what was dealt is treated as typical


@dataclass(slots=True)
class WriteTask:
    """A tensor that a stage writes.

    Attributes:
        size: bytes of a rank's shard at each pass, as written; or of each rank's.
        times: passes in an iteration.
        present: for each rank 1 if it has the tensor, else 0.
        replicas: the axes along which ranks hold the same.
        load: bytes of a shard, as they are weighed when replicas are dealt out.
    """

    size: int | Tensor
    times: int
    present: Tensor
    replicas: ReplicaAxes
    load: int


class StageLoad:
    """The bytes that the ranks of one pipeline stage write. Tensors have one entry for each rank.

    Attributes:
        sizes: of the mesh's axes.
        count: ranks.
        coords: axis name to the coordinate of each rank, in the order of their numbers.
        bytes: that each rank writes in one iteration, once `deal` was called.
        tasks: in the order in which they are written.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, dict(mesh.sizes)
        dense = [a for a in mesh.axes if a.name != "pp"]
        self.count = prod(a.size for a in dense)
        self.coords: dict[str, Tensor] = {}
        for axes in (dense, mesh.experts):
            step = 1
            for axis in reversed(axes):
                self.coords[axis.name] = torch.arange(self.count) // step % axis.size
                step *= axis.size
        self.bytes = torch.zeros(self.count, dtype=torch.int64)
        self.tasks: list[WriteTask] = []
        self._numbers: dict[ReplicaAxes, Tensor] = {}
        self._present: dict[tuple[tuple[str, int], ...], Tensor] = {}

    def add(
        self,
        layout: Layout,
        size: int | Tensor,
        times: int,
        replicated: Sequence[str],
        where: tuple[tuple[str, int], ...] = (),
        load: int | None = None,
    ) -> int:
        """Add a tensor; each of its shards is written once, a partial sum by each rank that has one.

        Args:
            layout: of the tensor.
            size: bytes of a rank's shard, as written; or of each rank's.
            times: passes in an iteration.
            replicated: the axes over which ranks hold the same tensor, unless `layout` shards it over them.
            where: the coordinates of the ranks that have the tensor at all.
            load: bytes of a shard before anything is selected or cast; `size` if None.

        Returns:
            The bytes that all ranks together write of it in an iteration.
        """
        if where not in self._present:
            present = torch.ones(self.count, dtype=torch.int64)
            for axis, coord in where:
                present *= self.coords[axis] == coord
            self._present[where] = present
        over = [a for a in (*self.mesh.axes, *self.mesh.experts) if a.name in replicated]
        replicas = tuple((name, n) for name, n, _ in list_replica_axes(self.mesh, layout, over=over))
        weight = load if load is not None else int(torch.as_tensor(size).max())
        task = WriteTask(size, times, self._present[where], replicas, weight)
        self.tasks.append(task)
        first = self.number_along(replicas) == 0  # whichever replica writes, together they hold the same
        return int((task.size * (task.present * first)).sum()) * times

    def deal(self) -> None:
        """Let the replicas take turns, tensor by tensor, as the writers of a run do.

        The mean would be simpler, and wrong for the rank with the most: few large tensors do not divide.
        """
        shared = [t for t in self.tasks if t.replicas]
        most = max((t.times for t in shared), default=1)
        rounds = max(1, min(most, MAX_TURNS // max(1, len(shared))))
        turns = {t.replicas: ReplicaTurns(prod(n for _, n in t.replicas)) for t in shared}
        counts = [[0] * prod(n for _, n in t.replicas) for t in shared]
        for turn in range(rounds):
            for task, count in zip(shared, counts, strict=True):
                if turn < task.times:
                    count[turns[task.replicas].next(task.load)] += 1
        for task in self.tasks:
            if not task.replicas:
                self.bytes += task.present * (task.size * task.times)
        for task, count in zip(shared, counts, strict=True):
            turns_of = torch.tensor(count, dtype=torch.float64) * (task.times / min(rounds, task.times))
            written = task.present * task.size * turns_of[self.number_along(task.replicas)]
            self.bytes += written.round().long()

    def number_along(self, axes: ReplicaAxes) -> Tensor:
        """The number of each rank among those along these axes, of which so many hold something different."""
        if axes not in self._numbers:
            number = torch.zeros(self.count, dtype=torch.int64)
            for axis, size in axes:
                number = number * size + self.coords[axis] % size
            self._numbers[axes] = number
        return self._numbers[axes]


@dataclass(frozen=True, slots=True)
class SiteDumpEstimate:
    """The estimate of one tensor.

    Attributes:
        name: of the hook point or parameter.
        kind: `value`, `gradient`, `parameter` or `parameter_gradient`.
        layout: a description of the layout.
        shape: of the full tensor in one microbatch; a name for a dim whose length depends on the data.
        local: the shape of one rank's shard before tokens are selected; expected rows if `expected`.
        stage: the pipeline stage that has the tensor.
        chunk: the virtual chunk of that stage.
        rank_bytes: the maximum, over ranks, of the bytes that a rank writes for each capture.
        bytes: of all ranks in one iteration.
        expected: whether the size depends on the routing of experts, which the estimate assumes to be even.
    """

    name: str
    kind: str
    layout: str
    shape: tuple[int | str, ...]
    local: tuple[float, ...]
    stage: int
    chunk: int
    rank_bytes: int
    bytes: int
    expected: bool


KEPT_FIELDS = ("name", "kind", "shape", "local", "stage", "chunk", "expected")  # as in EstimatedTensor


@dataclass(frozen=True, slots=True)
class RankDumpEstimate:
    """A rank of an estimate: its number, its coordinates and the bytes that it writes in one iteration."""

    rank: int
    coords: Mapping[str, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class DumpEstimate(Renderable):
    """The estimated size of a dump, without the files' headers, some hundred bytes for each tensor.

    Attributes:
        mesh: number of ranks by axis name.
        ranks: the number of ranks.
        sites: every tensor, in model order.
        hidden: requested hook points that are unavailable, with the reasons.
        least: the rank with the fewest bytes in one iteration.
        most: the rank with the most bytes in one iteration.
        mean: the mean bytes of a rank in one iteration.
        stages: for each pipeline stage, the bytes of all of its ranks in one iteration.
        bytes: of all ranks in one iteration that is dumped.
        files: the number of files of one such iteration.
        iterations: the number of iterations that are dumped.
        settings: the settings of the dump, as its manifest has them.
        seconds: to write one iteration at the disk's rate, if that rate was given.
    """

    mesh: Mapping[str, int]
    ranks: int
    sites: tuple[SiteDumpEstimate, ...]
    least: RankDumpEstimate
    most: RankDumpEstimate
    mean: float
    stages: tuple[int, ...]
    bytes: int
    files: int
    iterations: int
    settings: Mapping[str, Any]
    hidden: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def total_bytes(self) -> int:
        """The bytes of all iterations that are dumped."""
        return self.bytes * self.iterations

    @property
    def bytes_per_iteration(self) -> float:
        """The mean bytes over all iterations, dumped or not."""
        return self.bytes / int(self.settings["every"])

    def to_json(self) -> dict[str, Any]:
        """Return the estimate in plain values, with the derived ones."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**plain, "total_bytes": self.total_bytes, "bytes_per_iteration": self.bytes_per_iteration}

    def rows(self, most: int | None = None) -> list[tuple[str, str, str, str, str, str]]:
        """Rows for a table: tensor, stage, full shape, layout, bytes of a rank's shard, bytes in all.

        Tensors that are alike but for their layer are one row. Strings, to be printed as they are.

        Args:
            most: so many rows, the largest first; all of them in model order if None.
        """
        groups: dict[tuple[Any, ...], list[SiteDumpEstimate]] = {}
        for site in self.sites:
            key = (strip_numbers(site.name), site.kind, site.shape, site.layout, site.rank_bytes)
            groups.setdefault(key, []).append(site)
        alike = list(groups.values())
        if most is not None:
            alike = sorted(alike, key=lambda g: -sum(s.bytes for s in g))[:most]
        return [_format_site_row(group) for group in alike]

    def to_document(self) -> Document:
        """Return tensors, stages and the sums as tables."""
        parts: list[Part] = [Table(DUMP_COLUMNS, [Row(cells) for cells in self.rows()])]
        stages = list(enumerate(self.stages))
        if len(stages) > MAX_STAGES_SHOWN:
            ends = {min(stages, key=lambda s: s[1])[0], max(stages, key=lambda s: s[1])[0]}
            stages = [s for s in stages if s[0] in ends]
        if len(stages) > 1:
            rows = [Row((str(stage), format_bytes(nbytes))) for stage, nbytes in stages]
            parts.append(Table((">stage", ">bytes in an iteration"), rows))
        if len(stages) < len(self.stages):
            parts.append(Note(f"the lightest and the heaviest of {len(self.stages)} stages"))
        parts.append(Table(("", ""), [Row(cells) for cells in self.summary()], header=False))
        return Document("DumpEstimate", parts)

    def summary(self) -> list[tuple[str, str]]:
        """Return the last lines of the table: names and values, as strings."""
        out = [
            ("ranks", f"{self.ranks} ({describe_sizes(self.mesh)})" if self.ranks > 1 else "1"),
            ("tensors", str(len(self.sites))),
            ("bytes in an iteration", format_bytes(self.bytes)),
            ("mean of a rank", format_bytes(self.mean)),
            ("smallest rank", _format_rank(self.least)),
            ("largest rank", _format_rank(self.most)),
            ("files in an iteration", str(self.files)),
        ]
        if self.seconds is not None:
            out.append(("seconds for an iteration", f"{self.seconds:.2f}"))
        if self.iterations > 1:
            out.append((f"{self.iterations} iterations", format_bytes(self.total_bytes)))
        hidden = {strip_numbers(name): why for name, why in self.hidden.items()}
        return out + [("not available", f"{name}: {why}") for name, why in hidden.items()]


def estimate_dump_size(
    mesh: Mesh,
    tensors: Iterable[EstimatedTensor],
    dump: Dump,
    *,
    share: float | None = None,
    iterations: int = 1,
    disk: float | None = None,
    hidden: Mapping[str, str] | None = None,
) -> DumpEstimate:
    """Estimate the bytes that each rank writes.

    Args:
        mesh: of the run; only the sizes are used.
        tensors: in the order in which a stage writes them.
        dump: its settings; samples that it omits are counted, too.
        share: the fraction of the positions that is kept, instead of the dump's `tokens`. A fraction, and
            random positions, are assumed to be evenly distributed.
        iterations: the number of iterations that are dumped.
        disk: bytes that the disk, or all disks together, write in a second.
        hidden: hook points that are unavailable.

    Raises:
        FlexError: nothing is dumped, or the size of a tensor is unknown.
    """
    stages = [StageLoad(mesh) for _ in range(mesh["pp"].size)]
    tokens = dump.tokens if share is None else share
    layouts: dict[Layout, str] = {}
    sites = []
    for tensor in track(tensors, "laying tensors over ranks", unit="tensors"):
        stage = stages[tensor.stage]
        size = _compute_written_bytes(tensor, stage, tokens, dump)
        most = size if isinstance(size, int) else int(size.max())
        total = stage.add(
            tensor.layout, size, tensor.times, tensor.replicated, tensor.where, tensor.shard_bytes
        )
        if tensor.layout not in layouts:
            layouts[tensor.layout] = tensor.layout.describe(stage.sizes)
        fields_of_tensor = {name: getattr(tensor, name) for name in KEPT_FIELDS}
        sites.append(
            SiteDumpEstimate(**fields_of_tensor, layout=layouts[tensor.layout], rank_bytes=most, bytes=total)
        )
    if not sites:
        raise FlexError("nothing to estimate: name sites, such as 'decoder.layers.*', or parameters")
    for stage in track(stages, "dealing out", unit="stages"):
        stage.deal()
    loads = torch.cat([s.bytes for s in stages])
    total = sum(site.bytes for site in sites)
    first = compute_part_limit(0, dump.part_bytes)
    later = (loads - first).clamp(min=0)  # bytes beyond a rank's first file
    files = 1 + (later + dump.part_bytes - 1) // dump.part_bytes
    return DumpEstimate(
        dict(mesh.sizes),
        loads.numel(),
        tuple(sites),
        _make_rank_estimate(stages, loads, int(loads.argmin())),
        _make_rank_estimate(stages, loads, int(loads.argmax())),
        total / loads.numel(),
        tuple(int(s.bytes.sum()) for s in stages),
        total,
        int(files.sum()),
        iterations,
        dump.to_json(),
        dict(hidden or {}),
        None if disk is None else total / disk,
    )


def _compute_written_bytes(
    tensor: EstimatedTensor, stage: StageLoad, tokens: TokenSelection | float, dump: Dump
) -> int | Tensor:
    """The bytes of one pass, of each rank's shard, as they are written."""
    cast = dump.dtype if isinstance(dump.dtype, torch.dtype) and tensor.dtype.is_floating_point else None
    itemsize = (cast or tensor.dtype).itemsize
    token = find_dim(tensor.layout, TOKEN_DIM)
    activation = tensor.kind in ("value", "gradient")
    if token is None or not activation or (tokens is None and dump.reduce is None):
        return round(prod(tensor.local) * itemsize)
    rest = prod(n for i, n in enumerate(tensor.local) if i != token)
    if dump.reduce is not None:  # each rank has its part of the mean, in fp32
        return round(rest * 4)
    dim, local = tensor.layout.dims[token], round(tensor.local[token])
    return (_count_kept_positions(dim, local, stage, tokens) * rest * itemsize).round().long()


def _count_kept_positions(dim: Dim, local: int, stage: StageLoad, tokens: TokenSelection | float) -> Tensor:
    """How many of the selected positions each rank holds."""
    length = local * count_parts(dim, stage.sizes)
    if isinstance(tokens, (float, RandomTokens)):
        share = tokens if isinstance(tokens, float) else min(tokens.count, length) / length
        return torch.full((stage.count,), local * share, dtype=torch.float64)
    chosen = torch.zeros(length + 1, dtype=torch.float64)
    chosen[torch.tensor(select_positions(tokens, length, 0, 0), dtype=torch.int64) + 1] = 1
    before = chosen.cumsum(0)  # the number of selected positions before each
    axes = tuple((c.axis, stage.sizes[c.axis]) for c in dim.cuts)
    counts = []
    for place in product(*(range(size) for _, size in axes)):
        coords = {axis: coord for (axis, _), coord in zip(axes, place, strict=True)}
        on_rank = spans(dim, length, coords, stage.sizes)
        counts.append(sum(before[stop] - before[start] for start, stop in on_rank))
    return torch.tensor(counts, dtype=torch.float64)[stage.number_along(axes)]


def _make_rank_estimate(stages: Sequence[StageLoad], load: Tensor, rank: int) -> RankDumpEstimate:
    stage, place = divmod(rank, stages[0].count)
    coords = {name: int(c[place]) for name, c in stages[stage].coords.items()}
    return RankDumpEstimate(rank, {"pp": stage, **coords}, int(load[rank]))


def _format_rank(rank: RankDumpEstimate) -> str:
    """Its bytes, and which it is."""
    coords = ", ".join(f"{a} {n}" for a, n in rank.coords.items() if a in ("pp", "dp", "cp", "tp"))
    return f"{format_bytes(rank.bytes)} (rank {rank.rank}: {coords})"


def _format_site_row(group: list[SiteDumpEstimate]) -> tuple[str, str, str, str, str, str]:
    """A row of a table for tensors that are alike."""
    first = group[0]
    stages = sorted({s.stage for s in group})
    stage_text = f"{stages[0]}-{stages[-1]}" if len(stages) > 1 else str(stages[0])
    about = "~" if first.expected else ""
    kind = "" if first.kind in ("value", "parameter") else ".grad"
    count = f" ({len(group)})" if len(group) > 1 else ""
    return (
        fold_numbers([site.name for site in group]) + kind + count,
        stage_text,
        "x".join(map(str, first.shape)) or "1",
        first.layout,
        about + format_bytes(first.rank_bytes),
        about + format_bytes(sum(s.bytes for s in group)),
    )
