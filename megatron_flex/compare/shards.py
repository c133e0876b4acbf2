"""Which entries of a tensor the ranks of each run hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS, ComparedDump
from megatron_flex.compare.difference_profile import DifferenceProfile
from megatron_flex.compare.structural_tests import Block
from megatron_flex.compare.tensor_pairs import TensorPair
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Dim, Layout, Sizes, full_order, spans


@dataclass(frozen=True, slots=True)
class DimShares:
    """The shards of a dim along one axis, in one of the two runs.

    Attributes:
        run: `A` or `B`.
        axis: the mesh axis.
        size: its size.
        parts: for each coordinate, its entries of the dim.
    """

    run: str
    axis: str
    size: int
    parts: tuple[tuple[int, ...], ...]


def compute_shares(run: str, dim: Dim, length: int, sizes: Sizes) -> list[DimShares]:
    """The shards of a dim: one item for each axis that shards it, over all coordinates of the others."""
    live = [c.axis for c in dim.cuts if sizes.get(c.axis, 1) > 1 and not c.partial]
    if dim.uneven:
        return []
    out = []
    for axis in live:
        entries_by_coord: list[tuple[int, ...]] = []
        for coord in range(sizes[axis]):
            entries: set[int] = set()
            for others in _list_coordinates({a: sizes[a] for a in live if a != axis}):
                for start, stop in spans(dim, length, {**others, axis: coord}, sizes):
                    entries |= set(range(start, stop))
            entries_by_coord.append(tuple(sorted(entries)))
        out.append(DimShares(run, axis, sizes[axis], tuple(entries_by_coord)))
    return out


def _list_coordinates(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    out: list[dict[str, int]] = [{}]
    for axis, size in sizes.items():
        out = [{**o, axis: c} for o in out for c in range(size)]
    return out


LAYOUT_DIM_NAMES = {SAMPLE_AXIS: "b", TOKEN_AXIS: "s"}


def match_dims(layout: Layout, dims: Sequence[str]) -> dict[int, Dim]:
    """The layout's dim for each dim of an array, where the layout has one."""
    order = full_order(layout)
    left = [layout.dims[i] for i in order]
    out: dict[int, Dim] = {}
    for place, name in enumerate(dims):
        if name in LAYOUT_DIM_NAMES:
            match = next((d for d in left if d.name == LAYOUT_DIM_NAMES[name]), None)
            if match is not None:
                out[place] = match
                left.remove(match)
    rest = [p for p, name in enumerate(dims) if name not in LAYOUT_DIM_NAMES]
    if len(rest) == len(left):
        out.update(zip(rest, left, strict=True))
    return out


def find_dim_shares(runs: Sequence[ComparedDump], pair: TensorPair) -> dict[int, list[DimShares]]:
    """The shards of the dims of a tensor in both runs, by the index of the dim."""
    out: dict[int, list[DimShares]] = {}
    for source in runs:
        layout = source.layout(pair.item)
        for place, dim in match_dims(layout, pair.dims).items() if layout is not None else ():
            if pair.packed and pair.dims[place] in (SAMPLE_AXIS, TOKEN_AXIS):
                continue  # the manifest's layout is of rows that are not packed
            if pair.dims[place] == SAMPLE_AXIS:
                shares = _find_sample_shares(source, pair, pair.numbers[place])
            else:
                shares = _find_axis_shares(source, dim, _get_full_length(pair, place))
            if shares:
                out.setdefault(place, []).extend(shares)
    return out


def list_shard_blocks(
    runs: Sequence[ComparedDump], pair: TensorPair, profile: DifferenceProfile
) -> list[Block]:
    """The shards of each rank of both runs along each axis, as blocks of a tensor's sums by dim."""
    offset, out = len(profile.dims) - len(pair.dims), []
    for place, shares in find_dim_shares(runs, pair).items():
        index = {n: i for i, n in enumerate(profile.numbers[place + offset])}
        for share in shares:
            for coord, part in enumerate(share.parts):
                entries = tuple(index[n] for n in part if n in index)
                if entries and len(entries) < len(index):
                    text = f"what {share.axis} rank {coord} of {share.size} holds in {share.run}"
                    out.append(Block(place + offset, entries, text, share.axis))
    return out


def _find_axis_shares(source: ComparedDump, dim: Dim, length: int) -> list[DimShares]:
    if dim.keep is not None:
        return []  # its length with padding is not known here
    try:
        return compute_shares(source.label, dim, length, source.sizes)
    except LayoutError:
        return []


def _find_sample_shares(source: ComparedDump, pair: TensorPair, numbers: Sequence[int]) -> list[DimShares]:
    replicas = source.map_samples_to_replicas(pair.item, pair.iteration)
    if not replicas:
        return []
    size = source.sizes["dp"]
    parts = tuple(tuple(n for n in numbers if replicas.get(n) == r) for r in range(size))
    return [DimShares(source.label, "dp", size, parts)]


def _get_full_length(pair: TensorPair, place: int) -> int:
    """The length of a full dim; a lower bound if only some tokens were dumped."""
    return max(pair.numbers[place], default=-1) + 1


def find_holders(source: ComparedDump, pair: TensorPair, at: Sequence[int]) -> tuple[str, ...]:
    """The ranks that held an entry, with their coordinates.

    Args:
        source: the dump.
        pair: the compared part of the tensor.
        at: the entry's index in the compared part.
    """
    layout, stage = source.layout(pair.item), source.stage(pair.item)
    if layout is None:
        return ()
    other = (SAMPLE_AXIS, TOKEN_AXIS) if pair.packed else (SAMPLE_AXIS,)
    cut = {p: d for p, d in match_dims(layout, pair.dims).items() if pair.dims[p] not in other}
    numbers = [known[i] for known, i in zip(pair.numbers, at, strict=True)]
    samples = [n for n, d in zip(numbers, pair.dims, strict=True) if d == SAMPLE_AXIS and not pair.packed]
    replica = source.map_samples_to_replicas(pair.item, pair.iteration).get(samples[0]) if samples else None
    out = []
    for rank, coords in source.ranks:
        if stage not in (None, coords.get("pp", 0)) or replica not in (None, coords.get("dp", 0)):
            continue
        if all(_is_holder(source, d, _get_full_length(pair, p), coords, numbers[p]) for p, d in cut.items()):
            live = ", ".join(f"{a} {c}" for a, c in coords.items() if a in source.axis_sizes)
            out.append(f"rank {rank}" + (f" ({live})" if live else ""))
    return tuple(out)


def _is_holder(source: ComparedDump, dim: Dim, length: int, coords: Mapping[str, int], number: int) -> bool:
    if dim.uneven or dim.keep is not None or not dim.cuts:
        return True
    try:
        return any(a <= number < b for a, b in spans(dim, length, coords, source.sizes))
    except LayoutError:
        return True
