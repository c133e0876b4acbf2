"""Positions of the entries of a dim: spans of the full tensor for each rank, and the shapes that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from megatron_flex.errors import LayoutError
from megatron_flex.layout.algebra import Coords, Cut, Dim, Layout, Lengths, Sizes, Span


def spans(
    dim: Dim, length: int, coords: Coords, sizes: Sizes, lengths: Sequence[int] | None = None
) -> list[Span]:
    """The intervals of a full dim that the rank at `coords` holds, in its local order.

    Args:
        dim: the dim.
        length: the number of entries of the full dim, padding included.
        coords: this rank's coordinates.
        sizes: the sizes of the mesh axes.
        lengths: the lengths of all shards, which an uneven dim needs.

    Raises:
        LayoutError: the dim does not divide evenly, or is uneven and `lengths` is missing.
    """
    if dim.uneven and not (lengths is None and count_parts(dim, sizes) == 1):
        if lengths is None or len(lengths) != count_parts(dim, sizes) or sum(lengths) != length:
            raise LayoutError(
                f"dim {dim.name!r} of {length} is uneven: its parts cannot have lengths {lengths}",
                dim=dim.name,
            )
        at = _part_number(dim, coords, sizes)
        return [(sum(lengths[:at]), sum(lengths[: at + 1]))]
    total = sum(dim.segments)
    if length % total:
        raise LayoutError(
            f"dim {dim.name!r} of {length} does not divide into segments {dim.segments}", dim=dim.name
        )
    out: list[Span] = []
    start = 0
    for weight in dim.segments:
        stop = start + length // total * weight
        piece: list[Span] = [(start, stop)]
        for cut in dim.cuts:
            piece = _cut_spans(piece, cut, coords.get(cut.axis, 0), sizes.get(cut.axis, 1), dim.name)
        out += piece
        start = stop
    return _merge_adjacent(out)


def _cut_spans(piece: list[Span], cut: Cut, coord: int, size: int, name: str) -> list[Span]:
    """The part of coordinate `coord` in a list of concatenated spans."""
    if size == 1:
        return piece
    if len(cut.segments) > 1:
        plain_cut, out = replace(cut, segments=(1,)), list[Span]()
        for first, last in _list_segments(piece, cut, name):
            out += _cut_spans(list(_clip_window(piece, first, last)), plain_cut, coord, size, name)
        return out
    count, at = size // cut.copies, coord // cut.copies
    if count * cut.copies != size:
        raise LayoutError(f"axis {cut.axis!r} of {size} does not divide into runs of {cut.copies} copies")
    chunks = count * (2 if cut.order == "zigzag" else 1)
    length = sum(stop - start for start, stop in piece)
    if length % chunks:
        raise LayoutError(
            f"dim {name!r}: {length} entries do not divide by {chunks} over {cut.axis!r}", dim=name
        )
    step = length // chunks
    chunk_numbers = (at, chunks - 1 - at) if cut.order == "zigzag" else (at,)
    return [span for c in chunk_numbers for span in _clip_window(piece, c * step, (c + 1) * step)]


def _list_segments(piece: list[Span], cut: Cut, name: str) -> Iterator[Span]:
    """The parts of concatenated spans that a cut shards separately."""
    length, total = sum(stop - start for start, stop in piece), sum(cut.segments)
    if length % total:
        raise LayoutError(
            f"dim {name!r} of {length} does not divide into the {len(cut.segments)} sequences that axis "
            f"{cut.axis!r} shards, of {total} tokens in all",
            dim=name,
        )
    at = 0
    for weight in cut.segments:
        yield at, at + length // total * weight
        at += length // total * weight


def _clip_window(piece: list[Span], first: int, last: int) -> Iterator[Span]:
    """The spans that positions `first` to `last` of the concatenated `piece` cover."""
    offset = 0
    for start, stop in piece:
        low, high = max(first - offset, 0), min(last - offset, stop - start)
        if low < high:
            yield start + low, start + high
        offset += stop - start


def _merge_adjacent(piece: list[Span]) -> list[Span]:
    out: list[Span] = []
    for start, stop in piece:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


# -- shapes ------------------------------------------------------------------------------------------


def count_parts(dim: Dim, sizes: Sizes) -> int:
    """The number of different shards of a dim."""
    out = 1
    for c in dim.cuts:
        size = sizes.get(c.axis, 1)
        out *= size // c.copies if size > 1 else 1
    return out


def _part_number(dim: Dim, coords: Coords, sizes: Sizes) -> int:
    """The number of a rank's shard of an uneven dim, whose axes have no copies."""
    at = 0
    for cut in dim.cuts:
        at = at * sizes.get(cut.axis, 1) + coords.get(cut.axis, 0)
    return at


def smallest_part(dim: Dim) -> int:
    """A length of a shard of the dim that any number of ranks can have."""
    # zigzag has two pieces of each segment
    return 2 * sum(dim.segments) * prod(sum(c.segments) for c in dim.cuts)


def padded_shape(
    layout: Layout, local: Sequence[int], sizes: Sizes, lengths: Lengths | None = None
) -> tuple[int, ...]:
    """The full tensor's shape with its padding, dims in the local order, from one rank's local shape.

    Raises:
        LayoutError: the tensor has another number of dims than the layout, or an uneven dim has no `lengths`.
    """
    if len(local) != len(layout.dims):
        raise LayoutError(
            f"a tensor of shape {tuple(local)} has {len(local)} dims; layout {layout.describe()} wants "
            f"{len(layout.dims)}: the site's rule does not fit this module"
        )
    out = []
    for index, dim in enumerate(layout.dims):
        if dim.uneven and count_parts(dim, sizes) > 1:
            if lengths is None or index not in lengths:
                raise LayoutError(
                    f"dim {dim.name!r} is uneven: its length follows from all shards", dim=dim.name
                )
            out.append(sum(lengths[index]))
        else:
            out.append(local[index] * count_parts(dim, sizes))
    return tuple(out)


def shard_shape(
    layout: Layout, padded: Sequence[int], coords: Coords, sizes: Sizes, lengths: Lengths | None = None
) -> tuple[int, ...]:
    """The shape of the shard of the rank at `coords`; the inverse of `padded_shape`."""
    return tuple(
        [
            lengths[i][_part_number(d, coords, sizes)]
            if d.uneven and lengths and i in lengths
            else n // count_parts(d, sizes)
            for i, (n, d) in enumerate(zip(padded, layout.dims, strict=True))
        ]
    )


def full_order(layout: Layout) -> tuple[int, ...]:
    """The full tensor's dims, in their order, as indices of the shards' dims."""
    return layout.permute or tuple(range(len(layout.dims)))


def inverse_order(order: Sequence[int]) -> tuple[int, ...]:
    """The inverse of a permutation; of `Layout.permute`, the full tensor's dims in the shard's order."""
    return tuple([order.index(i) for i in range(len(order))])


def full_shape(
    layout: Layout, local: Sequence[int], sizes: Sizes, lengths: Lengths | None = None
) -> tuple[int, ...]:
    """The shape of the tensor that one device would have held, from one rank's local shape."""
    full = padded_shape(layout, local, sizes, lengths)
    unpadded = [n if d.keep is None else min(n, d.keep) for n, d in zip(full, layout.dims, strict=True)]
    return tuple(unpadded) if layout.permute is None else tuple(unpadded[i] for i in layout.permute)


def coordinates(layout: Layout, sizes: Sizes) -> list[dict[str, int]]:
    """Every combination of coordinates on `layout.axes`, the last axis counting fastest."""
    axes = layout.axes
    return [dict(zip(axes, c, strict=True)) for c in product(*(range(sizes.get(a, 1)) for a in axes))]


def uneven_lengths(layout: Layout, shapes: Sequence[Sequence[int]], sizes: Sizes) -> dict[int, list[int]]:
    """The lengths of the shards of each uneven dim, from the shapes of all shards.

    Args:
        layout: the layout of the shards.
        shapes: the shards' shapes in the order of `coordinates(layout, sizes)`.
        sizes: the sizes of the mesh axes.
    """
    out: dict[int, list[int]] = {}
    for index, dim in enumerate(layout.dims):
        if dim.uneven:
            by_coords: dict[tuple[int, ...], int] = {}
            for shape, coords in zip(shapes, coordinates(layout, sizes), strict=True):
                by_coords.setdefault(tuple(coords[c.axis] for c in dim.cuts), shape[index])
            out[index] = [by_coords[at] for at in sorted(by_coords)]
    return out
