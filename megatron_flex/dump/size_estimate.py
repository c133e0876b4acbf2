"""An estimate of a dump before a run: bytes of each tensor, of each rank, and in total.

The estimate computes from layouts and sizes, for all ranks of a pipeline stage at once; `Ownership` makes the
same decisions for one rank of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import heapify, heapreplace
from math import prod
from typing import Any

from megatron_flex.dump.dump_settings import Dump
from megatron_flex.dump.part_format import compute_part_limit
from megatron_flex.dump.token_selection import (
    TOKEN_DIM,
    RandomTokens,
    TokenSelection,
    find_dim,
    select_positions,
)
from megatron_flex.errors import FlexError
from megatron_flex.layout import Dim, Layout, count_parts, spans
from megatron_flex.mesh import Mesh
from megatron_flex.progress import format_bytes, track
from megatron_flex.sites import fold_numbers, strip_numbers
from megatron_flex.text_table import format_table

try:
    import numpy as np
    from numpy.typing import NDArray
except ModuleNotFoundError as error:
    raise FlexError(
        f"sizes are estimated with numpy ({error}): pip install numpy, which megatron-flex[cli] has"
    ) from error

DUMP_COLUMNS = ("tensor", "stage", "shape", "layout", ">per rank", ">total")  # of `DumpEstimate.rows()`
RankArray = NDArray[np.int64]  # one entry for each rank of a pipeline stage
ReplicaSlots = tuple[RankArray, int]  # which of the replicas a rank is, and how many there are
MOST_TURNS = 400_000  # of replicated tensors to replicas; beyond it what was dealt is treated as typical


@dataclass(slots=True)
class WriteTask:
    """A tensor that a stage writes.

    Attributes:
        size: bytes of a rank's shard at each pass, as written; or of each rank's.
        times: passes in an iteration.
        here: which ranks own it; 1 or 0.
        slots: which replica each rank is; None where no two ranks hold the same.
        load: bytes of a shard, as they are weighed when replicas are dealt out.
    """

    size: int | RankArray
    times: int
    here: RankArray
    slots: tuple[object, ...] | None
    load: int


class StageLoad:
    """The ranks of one pipeline stage.

    Attributes:
        mesh: of the run.
        sizes: of its axes.
        count: ranks.
        coords: axis name to the coordinate of each rank, in the order of their numbers.
        bytes: that each rank writes in one iteration, once `deal` was called.
        tasks: in the order in which they are written.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, dict(mesh.sizes)
        dense = [a for a in mesh.axes if a.name != "pp"]
        self.count = prod(a.size for a in dense)
        self.coords: dict[str, RankArray] = {}
        for axes in (dense, mesh.experts):
            step = 1
            for axis in reversed(axes):
                self.coords[axis.name] = np.arange(self.count) // step % axis.size
                step *= axis.size
        self.bytes: RankArray = np.zeros(self.count, dtype=np.int64)
        self.tasks: list[WriteTask] = []
        self._slots: dict[tuple[object, ...], ReplicaSlots] = {}
        self._keys: dict[tuple[Layout, tuple[str, ...]], tuple[object, ...]] = {}
        self._here: dict[tuple[tuple[str, int], ...], tuple[RankArray, int]] = {(): self._all()}

    def _all(self) -> tuple[RankArray, int]:
        return np.ones(self.count, dtype=np.int64), self.count

    def add(
        self,
        layout: Layout,
        size: int | RankArray,
        times: int,
        replicated: Sequence[str],
        where: Sequence[tuple[str, int]] = (),
        load: int | None = None,
    ) -> int:
        """Add a tensor; each of its shards is written once, a summand by each rank that has one.

        Args:
            layout: of the tensor.
            size: bytes of a rank's shard, as written; or of each rank's.
            times: passes in an iteration.
            replicated: the axes over which ranks hold the same tensor, unless `layout` shards it over them.
            where: the coordinates of the ranks that have the tensor at all.
            load: bytes of a shard before anything is picked or cast; `size` if None.

        Returns:
            The bytes that all ranks together write of it in an iteration.
        """
        here, number = self._present(tuple(where))
        key = self._key(layout, tuple(replicated))
        slots = self._slots[key]
        weight = load if load is not None else int(np.max(size))
        self.tasks.append(WriteTask(size, times, here, key if slots[1] > 1 else None, weight))
        if isinstance(size, int):
            return number * size * times // slots[1]
        chosen = slots[0] == 0  # whichever replica writes, together they hold the same
        return int((size * (here * chosen)).sum()) * times

    def deal(self) -> None:
        """Let the replicas take turns: who has had the least to write of what they share is next."""
        shared = [t for t in self.tasks if t.slots is not None]
        most = max((t.times for t in shared), default=1)
        rounds = max(1, min(most, MOST_TURNS // max(1, len(shared))))
        counts = {id(t): [0] * self._slots[t.slots][1] for t in shared if t.slots is not None}
        heaps: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for turn in range(rounds):
            for task in shared:
                assert task.slots is not None
                if turn >= task.times:
                    continue
                heap = heaps.get(task.slots)
                if heap is None:
                    heap = heaps[task.slots] = [(0, n) for n in range(self._slots[task.slots][1])]
                    heapify(heap)
                load, chosen = heap[0]
                heapreplace(heap, (load + task.load, chosen))
                counts[id(task)][chosen] += 1
        for task in self.tasks:
            if task.slots is None:
                self.bytes += task.here * (task.size * task.times)
                continue
            slots, _ = self._slots[task.slots]
            turns = np.array(counts[id(task)]) * (task.times / min(rounds, task.times))
            self.bytes += np.rint(task.here * task.size * turns[slots]).astype(np.int64)

    def _present(self, where: tuple[tuple[str, int], ...]) -> tuple[RankArray, int]:
        if where not in self._here:
            here, _ = self._all()
            for axis, coord in where:
                here *= self.coords[axis] == coord
            self._here[where] = here, int(here.sum())
        return self._here[where]

    def _key(self, layout: Layout, replicated: tuple[str, ...]) -> tuple[object, ...]:
        """What tensors have in common whose replicas take turns with each other."""
        if (layout, replicated) not in self._keys:
            copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial}
            places = []
            for axis in (*self.mesh.axes, *self.mesh.experts):
                if axis.size > 1 and axis.name in copies:
                    places.append((axis.name, min(copies[axis.name], axis.size)))
                elif axis.size > 1 and axis.name in replicated and axis.name not in layout.axes:
                    places.append((axis.name, axis.size))
            key = tuple(places)
            self._keys[layout, replicated] = key
            self._slots.setdefault(key, self._replicas(key))
        return self._keys[layout, replicated]

    def _replicas(self, places: Sequence[tuple[str, int]]) -> ReplicaSlots:
        slots, count = np.zeros(self.count, dtype=np.int64), 1
        for axis, size in places:
            slots = slots * size + self.coords[axis] % size
            count *= size
        return slots, count


def get_stage_coordinates(stage: StageLoad, rank: int) -> Mapping[str, int]:
    """The coordinates of a rank within its stage."""
    return {name: int(c[rank]) for name, c in stage.coords.items()}


@dataclass(frozen=True, slots=True)
class EstimatedTensor:
    """A tensor that a dump would write.

    Attributes:
        name: of the hook point or parameter.
        kind: `value`, `gradient`, `parameter` or `parameter_gradient`.
        layout: the layout of the shards.
        shape: of the full tensor, without padding; a name for a dim whose length depends on the data.
        local: the shape of a rank's shard; the expected number of rows if `expected`.
        itemsize: bytes of an entry, as written.
        weight: bytes of an entry, in the run.
        stage: the pipeline stage that has the tensor.
        chunk: the virtual chunk of that stage.
        times: captures in an iteration, on each data parallel rank.
        replicated: the axes over which the tensor is replicated, in addition to those of the layout.
        where: coordinates of the ranks that have the tensor; empty for all ranks of the stage.
        expected: whether the number of rows depends on the data, and is that of even routing.
    """

    name: str
    kind: str
    layout: Layout
    shape: tuple[int | str, ...]
    local: tuple[float, ...]
    itemsize: int
    weight: int
    stage: int = 0
    chunk: int = 0
    times: int = 1
    replicated: tuple[str, ...] = ("cp", "tp")
    where: tuple[tuple[str, int], ...] = ()
    expected: bool = False


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


@dataclass(frozen=True, slots=True)
class RankDumpEstimate:
    """A rank of an estimate: its number, its coordinates and the bytes that it writes in one iteration."""

    rank: int
    coords: Mapping[str, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class DumpEstimate:
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
        found = list(groups.values())
        if most is not None:
            found = sorted(found, key=lambda g: -sum(s.bytes for s in g))[:most]
        return [_format_site_row(group) for group in found]

    def __str__(self) -> str:
        """Tensors, and below them the sums, as tables."""
        return "\n".join([*format_table(self.rows(), DUMP_COLUMNS), "", *format_table(self.summary())])

    def summary(self) -> list[tuple[str, str]]:
        """Return the last lines of the table: names and values, as strings."""
        mesh = " x ".join(f"{a}={n}" for a, n in self.mesh.items() if n > 1)
        out = [
            ("ranks", f"{self.ranks} ({mesh})" if mesh else str(self.ranks)),
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
        FlexError: there is no tensor, or the size of a tensor is unknown.
    """
    stages, out = _assign_tensors(mesh, tensors, dump.tokens if share is None else share, dump.reduce)
    for stage in track(stages, "dealing out", unit="stages"):
        stage.deal()
    loads = np.concatenate([s.bytes for s in stages])
    total = sum(site.bytes for site in out)
    return DumpEstimate(
        dict(mesh.sizes),
        loads.size,
        tuple(out),
        _make_rank_estimate(stages, loads, int(loads.argmin())),
        _make_rank_estimate(stages, loads, int(loads.argmax())),
        total / loads.size,
        tuple(int(s.bytes.sum()) for s in stages),
        total,
        int(_count_files(loads, dump.part_bytes).sum()),
        iterations,
        dump.to_json(),
        dict(hidden or {}),
        None if disk is None else total / disk,
    )


def _count_files(loads: RankArray, part_bytes: int) -> RankArray:
    """The files of each rank, by the bytes that it writes."""
    later = np.maximum(0, loads - compute_part_limit(0, part_bytes))
    return 1 - -later // part_bytes


def _assign_tensors(
    mesh: Mesh, tensors: Iterable[EstimatedTensor], tokens: TokenSelection | float, reduce: str | None
) -> tuple[list[StageLoad], list[SiteDumpEstimate]]:
    """Give each stage what it has to write."""
    stages = [StageLoad(mesh) for _ in range(mesh["pp"].size)]
    words: dict[Layout, str] = {}
    out = []
    for held in track(tensors, "laying tensors over ranks", unit="tensors"):
        stage = stages[held.stage]
        size = _compute_sizes(held, stage, tokens, reduce)
        load = round(prod(held.local) * held.weight)
        total = stage.add(held.layout, size, held.times, held.replicated, held.where, load)
        if held.layout not in words:
            words[held.layout] = held.layout.describe(stage.sizes)
        most = size if isinstance(size, int) else int(size.max())
        out.append(_make_site_estimate(held, words[held.layout], most, total))
    if not out:
        raise FlexError("nothing to estimate: name sites, such as 'decoder.layers.*', or parameters")
    return stages, out


def compute_local_shape(
    layout: Layout, full_shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """A rank's shape, dims in the local order, from the full shape with its padding.

    Raises:
        FlexError: a dim does not divide.
    """
    order = range(len(full_shape)) if layout.permute is None else layout.permute
    padded = [0] * len(full_shape)
    for place, index in enumerate(order):
        padded[index] = full_shape[place]
    out = []
    for dim, length in zip(layout.dims, padded, strict=True):
        even = replace(dim, uneven=False)
        out.append(sum(b - a for a, b in spans(even, length, {}, sizes)))
    return tuple(out)


def _compute_sizes(
    held: EstimatedTensor, stage: StageLoad, tokens: TokenSelection | float, reduce: str | None
) -> Any:
    """The bytes of one pass, of each rank's shard."""
    token = find_dim(held.layout, TOKEN_DIM)
    activation = held.kind in ("value", "gradient")
    if token is None or not activation or (tokens is None and reduce is None):
        return round(prod(held.local) * held.itemsize)
    rest = prod(n for i, n in enumerate(held.local) if i != token)
    if reduce is not None:  # each rank has its summand of the mean
        return round(rest * 4)
    kept = _count_kept_positions(held.layout.dims[token], round(held.local[token]), stage, tokens)
    return np.rint(kept * rest * held.itemsize).astype(np.int64)


def _count_kept_positions(dim: Dim, local: int, stage: StageLoad, tokens: TokenSelection | float) -> Any:
    """How many of the kept positions each rank holds."""
    sizes = stage.sizes
    length = local * count_parts(dim, sizes)
    if isinstance(tokens, (float, RandomTokens)):
        share = tokens if isinstance(tokens, float) else min(tokens.count, length) / length
        return np.full(stage.count, local * share)
    chosen = select_positions(tokens, length, 0, 0)
    marks = np.zeros(length, dtype=np.int64)
    marks[chosen] = 1
    before = np.concatenate([[0], np.cumsum(marks)])
    axes = [c.axis for c in dim.cuts]
    places = np.stack([stage.coords[a] for a in axes], 1) if axes else np.zeros((stage.count, 0), dtype=int)
    different, which = np.unique(places, axis=0, return_inverse=True)
    counts = [
        sum(
            int(before[b] - before[a])
            for a, b in spans(dim, length, dict(zip(axes, map(int, at), strict=True)), sizes)
        )
        for at in different
    ]
    return np.array(counts)[which.reshape(-1)]


def _make_site_estimate(held: EstimatedTensor, words: str, rank_bytes: int, total: int) -> SiteDumpEstimate:
    return SiteDumpEstimate(
        held.name,
        held.kind,
        words,
        held.shape,
        held.local,
        held.stage,
        held.chunk,
        rank_bytes,
        total,
        held.expected,
    )


def _make_rank_estimate(stages: Sequence[StageLoad], load: RankArray, rank: int) -> RankDumpEstimate:
    stage, place = divmod(rank, stages[0].count)
    return RankDumpEstimate(
        rank, {"pp": stage, **get_stage_coordinates(stages[stage], place)}, int(load[rank])
    )


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
