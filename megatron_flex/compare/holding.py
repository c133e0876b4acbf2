"""Who held an entry of a whole tensor: from its layout, the mesh, and how samples were dealt out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_flex.compare.aligning import TensorPair
from megatron_flex.compare.patterns import DimShares, compute_shares
from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS, ComparedDump
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Dim, Layout, spans

LAYOUT_DIM_NAMES = {SAMPLE_AXIS: "b", TOKEN_AXIS: "s"}


def match_dims(layout: Layout, dims: Sequence[str]) -> dict[int, Dim]:
    """The layout's dim behind each dim of an array, as far as it has one."""
    order = layout.permute or tuple(range(len(layout.dims)))
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


def find_dim_shares(source: ComparedDump, pair: TensorPair) -> dict[int, list[DimShares]]:
    """Who holds what of the dims of a tensor, by the index of the dim."""
    layout = source.layout(pair.item)
    out: dict[int, list[DimShares]] = {}
    for place, dim in match_dims(layout, pair.dims).items() if layout is not None else ():
        if pair.dims[place] == SAMPLE_AXIS:
            found = _find_sample_shares(source, pair, pair.numbers[place])
        else:
            found = _find_axis_shares(source, dim, _get_full_length(pair, place))
        if found:
            out[place] = found
    return out


def _find_axis_shares(source: ComparedDump, dim: Dim, length: int) -> list[DimShares]:
    if dim.keep is not None:
        return []  # how long it is with its padding is not known here
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
    """The length of a whole dim; at least what was seen of it, where only some tokens are there."""
    return max(pair.numbers[place], default=-1) + 1


def find_holders(source: ComparedDump, pair: TensorPair, at: Sequence[int]) -> tuple[str, ...]:
    """The ranks that held an entry, with their coordinates.

    Args:
        source: the dump.
        pair: what of the tensor was compared.
        at: the entry, among what was compared.
    """
    layout, stage = source.layout(pair.item), source.stage(pair.item)
    if layout is None:
        return ()
    cut = {p: d for p, d in match_dims(layout, pair.dims).items() if pair.dims[p] != SAMPLE_AXIS}
    numbers = [known[i] for known, i in zip(pair.numbers, at, strict=True)]
    samples = [n for n, d in zip(numbers, pair.dims, strict=True) if d == SAMPLE_AXIS]
    replica = source.map_samples_to_replicas(pair.item, pair.iteration).get(samples[0]) if samples else None
    out = []
    for rank, coords in source.ranks:
        if stage not in (None, coords.get("pp", 0)) or replica not in (None, coords.get("dp", 0)):
            continue
        if all(_is_holder(source, d, _get_full_length(pair, p), coords, numbers[p]) for p, d in cut.items()):
            live = ", ".join(f"{a} {c}" for a, c in coords.items() if a in source.told)
            out.append(f"rank {rank}" + (f" ({live})" if live else ""))
    return tuple(out)


def _is_holder(source: ComparedDump, dim: Dim, length: int, coords: Mapping[str, int], number: int) -> bool:
    if dim.uneven or dim.keep is not None or not dim.cuts:
        return True
    try:
        return any(a <= number < b for a, b in spans(dim, length, coords, source.sizes))
    except LayoutError:
        return True
