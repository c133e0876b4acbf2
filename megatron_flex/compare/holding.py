"""Who held an entry of a whole tensor: from its layout, the mesh, and how samples were dealt out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_flex.compare.aligning import Pair
from megatron_flex.compare.patterns import Shares, shares
from megatron_flex.compare.source import SAMPLE, TOKEN, Source
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Dim, Layout, spans

LAYOUT_NAMES = {SAMPLE: "b", TOKEN: "s"}


def dims_of(layout: Layout, dims: Sequence[str]) -> dict[int, Dim]:
    """The layout's dim behind each dim of an array, as far as it has one."""
    order = layout.permute or tuple(range(len(layout.dims)))
    left = [layout.dims[i] for i in order]
    out: dict[int, Dim] = {}
    for place, name in enumerate(dims):
        if name in LAYOUT_NAMES:
            match = next((d for d in left if d.name == LAYOUT_NAMES[name]), None)
            if match is not None:
                out[place] = match
                left.remove(match)
    rest = [p for p, name in enumerate(dims) if name not in LAYOUT_NAMES]
    if len(rest) == len(left):
        out.update(zip(rest, left, strict=True))
    return out


def held(source: Source, pair: Pair) -> dict[int, list[Shares]]:
    """Who holds what of the dims of a tensor, by the index of the dim."""
    layout = source.layout(pair.item)
    out: dict[int, list[Shares]] = {}
    for place, dim in dims_of(layout, pair.dims).items() if layout is not None else ():
        if pair.dims[place] == SAMPLE:
            found = _dealt(source, pair, pair.numbers[place])
        else:
            found = _cut(source, dim, _length(pair, place))
        if found:
            out[place] = found
    return out


def _cut(source: Source, dim: Dim, length: int) -> list[Shares]:
    if dim.keep is not None:
        return []  # how long it is with its padding is not known here
    try:
        return shares(source.label, dim, length, source.sizes)
    except LayoutError:
        return []


def _dealt(source: Source, pair: Pair, numbers: Sequence[int]) -> list[Shares]:
    replicas = source.dealt(pair.item, pair.iteration)
    if not replicas:
        return []
    size = source.sizes["dp"]
    parts = tuple(tuple(n for n in numbers if replicas.get(n) == r) for r in range(size))
    return [Shares(source.label, "dp", size, parts)]


def _length(pair: Pair, place: int) -> int:
    """The length of a whole dim; at least what was seen of it, where only some tokens are there."""
    return max(pair.numbers[place], default=-1) + 1


def holders(source: Source, pair: Pair, at: Sequence[int]) -> tuple[str, ...]:
    """The ranks that held an entry, with their coordinates.

    Args:
        source: the dump.
        pair: what of the tensor was compared.
        at: the entry, among what was compared.
    """
    layout, stage = source.layout(pair.item), source.stage(pair.item)
    if layout is None:
        return ()
    cut = {p: d for p, d in dims_of(layout, pair.dims).items() if pair.dims[p] != SAMPLE}
    numbers = [known[i] for known, i in zip(pair.numbers, at, strict=True)]
    samples = [n for n, d in zip(numbers, pair.dims, strict=True) if d == SAMPLE]
    replica = source.dealt(pair.item, pair.iteration).get(samples[0]) if samples else None
    out = []
    for rank, coords in source.ranks:
        if stage not in (None, coords.get("pp", 0)) or replica not in (None, coords.get("dp", 0)):
            continue
        if all(_holds(source, d, _length(pair, p), coords, numbers[p]) for p, d in cut.items()):
            live = ", ".join(f"{a} {c}" for a, c in coords.items() if a in source.told)
            out.append(f"rank {rank}" + (f" ({live})" if live else ""))
    return tuple(out)


def _holds(source: Source, dim: Dim, length: int, coords: Mapping[str, int], number: int) -> bool:
    if dim.uneven or dim.keep is not None or not dim.cuts:
        return True
    try:
        return any(a <= number < b for a, b in spans(dim, length, coords, source.sizes))
    except LayoutError:
        return True
