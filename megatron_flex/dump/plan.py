"""What a dump would cost: bytes of every tensor, of every rank, in all. Arithmetic over layouts and sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from megatron_flex.dump.selection import TOKEN_DIM, RandomTokens, TokenSelection, find_dim, select_positions
from megatron_flex.dump.stage import RankArray, StageLoad, get_stage_coordinates
from megatron_flex.dump.words import format_bytes, format_rank, format_site_row, strip_numbers
from megatron_flex.errors import FlexError
from megatron_flex.layout import Dim, Layout, count_parts, spans
from megatron_flex.mesh import Mesh
from megatron_flex.progress import track


@dataclass(frozen=True, slots=True)
class EstimatedTensor:
    """A tensor that a dump would write.

    Attributes:
        name: of the site or parameter.
        kind: `value`, `gradient`, `parameter` or `parameter_gradient`.
        layout: how the shards make the whole.
        shape: of the whole, without padding; a name where only the data tell.
        local: of a rank's shard; expected rows where `expected`.
        itemsize: bytes of an entry, as written.
        weight: bytes of an entry, as it passes.
        stage: the pipeline stage that has it.
        chunk: which of that stage's virtual chunks.
        times: how often it passes in an iteration, on each data parallel rank.
        replicated: the axes over which ranks hold the same, where the layout does not say otherwise.
        where: coordinates of the ranks that have it; empty for all of the stage.
        expected: whether the number of rows depends on the data, and is what even routing makes.
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
    """One tensor of a plan.

    Attributes:
        name: of the site or parameter.
        kind: `value`, `gradient`, `parameter` or `parameter_gradient`.
        layout: in words.
        shape: of the whole in one microbatch; a name where only the data tell.
        local: of one rank's shard before tokens are picked; expected rows where `expected`.
        stage: the pipeline stage that has it.
        chunk: which of that stage's virtual chunks.
        rank_bytes: what a rank that writes it writes at each pass; the most of them.
        bytes: of all ranks in one iteration.
        expected: whether it depends on how experts are chosen; evenly, here.
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
    """A rank of a plan: its number, its coordinates and the bytes that it writes in one iteration."""

    rank: int
    coords: Mapping[str, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class DumpEstimate:
    """What a dump would cost. Nothing here counts the files' headers, some hundred bytes for each tensor.

    Attributes:
        mesh: axis name to number of ranks.
        ranks: how many there are.
        sites: every tensor, in model order.
        hidden: sites that were asked for and cannot be had, and why.
        least: the rank with the fewest bytes in one iteration.
        most: the one with the most.
        mean: bytes of a rank in one iteration.
        stages: of each pipeline stage the bytes of all of its ranks in one iteration.
        bytes: of all ranks in one iteration that is dumped.
        files: that one such iteration has.
        iterations: that would be dumped.
        every: of how many iterations one is dumped.
        seconds: to write one iteration at the disk's rate, if that was given.
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
    every: int
    hidden: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def total_bytes(self) -> int:
        """Of all iterations that would be dumped."""
        return self.bytes * self.iterations

    @property
    def bytes_per_iteration(self) -> float:
        """Averaged over all iterations, dumped or not."""
        return self.bytes / self.every

    def to_json(self) -> dict[str, Any]:
        """In plain values, with the derived ones."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**plain, "total_bytes": self.total_bytes, "bytes_per_iteration": self.bytes_per_iteration}

    def rows(self, most: int | None = None) -> list[tuple[str, str, str, str, str, str]]:
        """Rows for a table: tensor, stage, whole shape, layout, bytes of a rank's shard, bytes in all.

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
        return [format_site_row(group) for group in found]

    def summary(self) -> list[tuple[str, str]]:
        """What a table ends with: names and values, as strings."""
        out = [
            (
                "ranks",
                f"{self.ranks} ({' x '.join(f'{a}={n}' for a, n in self.mesh.items() if n > 1) or 'one'})",
            ),
            ("tensors", str(len(self.sites))),
            ("bytes in an iteration", format_bytes(self.bytes)),
            ("of a rank", f"{format_bytes(self.mean)} on average"),
            ("least", format_rank(self.least)),
            ("most", format_rank(self.most)),
            ("files in an iteration", str(self.files)),
        ]
        if self.seconds is not None:
            out.append(("seconds for an iteration", f"{self.seconds:.2f}"))
        if self.iterations > 1:
            out.append((f"{self.iterations} iterations", format_bytes(self.total_bytes)))
        hidden = {strip_numbers(name): why for name, why in self.hidden.items()}
        return out + [("cannot be had", f"{name}: {why}") for name, why in hidden.items()]


def estimate_dump(
    mesh: Mesh,
    tensors: Iterable[EstimatedTensor],
    *,
    tokens: TokenSelection | float = None,
    reduce: str | None = None,
    every: int = 1,
    iterations: int = 1,
    disk: float | None = None,
    part_bytes: int = 256 << 20,
    hidden: Mapping[str, str] | None = None,
) -> DumpEstimate:
    """Lay tensors over the ranks.

    Args:
        mesh: of the run; only its sizes count.
        tensors: in the order in which a stage writes them.
        tokens: the positions kept of each sample, as for Dump; or a fraction of them. A fraction, and those
            drawn at random, are spread evenly.
        reduce: `mean` for the mean over the positions, in fp32.
        every: dump every so many iterations.
        iterations: how many are dumped.
        disk: bytes that the disk, or all of them together, take in a second.
        part_bytes: of a file.
        hidden: sites that cannot be had.

    Raises:
        FlexError: no tensor at all, or one whose size is not known.
    """
    stages, out = _assign_tensors(mesh, tensors, tokens, reduce)
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
        int(np.maximum(1, -(-loads // part_bytes)).sum()),
        iterations,
        every,
        dict(hidden or {}),
        None if disk is None else total / disk,
    )


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
        raise FlexError("a plan of nothing: name sites, such as 'decoder.layers.*', or parameters")
    return stages, out


def compute_local_shape(layout: Layout, full_shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A rank's shape, dims in the local order, from the whole's shape with its padding.

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


def _compute_sizes(held: EstimatedTensor, stage: StageLoad, tokens: TokenSelection | float, reduce: str | None) -> Any:
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
    return RankDumpEstimate(rank, {"pp": stage, **get_stage_coordinates(stages[stage], place)}, int(load[rank]))
