"""Which block of a shard is which block of the full tensor.

`blocks` answers for one rank. Whatever moves entries between shards and full tensors is a loop over its
result: `assemble`, `extract`, reads of a region, shared memory. They also ask which of
the ranks with equal values is the first (`first_copy`), and which partial sum a rank holds (`partial_plane`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from megatron_flex.layout.algebra import Coords, Layout, Lengths, Sizes
from megatron_flex.layout.spans import coordinates, spans

Slices = tuple[slice, ...]
DimBlocks = list[tuple[slice, slice]]  # of one dim: entries of the full tensor, and the same in the shard
MAX_CACHED_RANKS = 4096  # of all layouts and shapes


class Block(NamedTuple):
    """A block of the full tensor that one rank's shard has; dims in the shard's order.

    Attributes:
        target: the block's entries in the full tensor.
        source: the same entries in the shard.
    """

    target: Slices
    source: Slices


def blocks(
    layout: Layout,
    coords: Coords,
    sizes: Sizes,
    full_shape: Sequence[int],
    lengths: Lengths | None = None,
) -> tuple[Block, ...]:
    """The blocks of the full tensor that the shard of the rank at `coords` has, without padding.

    Together they are the shard, except for its padding. None is empty. Ranks that hold copies or partial
    sums of the same entries have the same blocks.

    Args:
        layout: the layout of the shards.
        coords: the rank's coordinates.
        sizes: the sizes of the mesh axes.
        full_shape: of the full tensor with its padding, dims in the shard's order: `padded_shape`.
        lengths: the lengths of the shards of uneven dims.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    axes = [c.axis for d in layout.dims for c in d.cuts]
    return _find_blocks(
        layout,
        tuple([coords.get(a, 0) for a in axes]),
        tuple([sizes.get(a, 1) for a in axes]),
        tuple(full_shape),
        freeze_lengths(lengths),
    )


@lru_cache(MAX_CACHED_RANKS)
def _find_blocks(
    layout: Layout,
    coords: tuple[int, ...],
    sizes: tuple[int, ...],
    full_shape: tuple[int, ...],
    lengths: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[Block, ...]:
    axes = [c.axis for d in layout.dims for c in d.cuts]
    at, ranks = dict(zip(axes, coords, strict=True)), dict(zip(axes, sizes, strict=True))
    lengths_by_dim = dict(lengths)
    return _combine(
        [_cut_dim(layout, i, n, at, ranks, lengths_by_dim.get(i)) for i, n in enumerate(full_shape)]
    )


class OwnedBlocks(NamedTuple):
    """The blocks of one of the ranks that make up a full tensor.

    Attributes:
        shard: the rank's number in the order of `coordinates`.
        coords: its coordinates on the layout's axes.
        plane: the number of the partial sum that it holds: `partial_plane`.
        dims: its blocks along each dim.
    """

    shard: int
    coords: dict[str, int]
    plane: int
    dims: tuple[DimBlocks, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return _combine(self.dims)


def owned_blocks(
    layout: Layout, sizes: Sizes, full_shape: Sequence[int], lengths: Lengths | None = None
) -> Iterator[OwnedBlocks]:
    """The blocks of all ranks, of those that hold copies the first; arguments as for `blocks`.

    Each entry of the full tensor is in one block of each plane.
    """
    known: dict[tuple[int, tuple[int, ...]], DimBlocks] = {}  # of each dim by the coordinates on its axes
    copied, summed = any(n > 1 for _, n in _list_copies(layout)), is_partial(layout, sizes)
    for shard, coords in enumerate(coordinates(layout, sizes)):
        if copied and first_copy(layout, coords, sizes) != coords:
            continue
        rows = []
        for index, (dim, length) in enumerate(zip(layout.dims, full_shape, strict=True)):
            at = index, tuple([coords[c.axis] for c in dim.cuts])
            if at not in known:
                given = None if lengths is None else lengths.get(index)
                known[at] = _cut_dim(layout, index, length, coords, sizes, given)
            rows.append(known[at])
        plane = partial_plane(layout, coords, sizes)[1] if summed else 0
        yield OwnedBlocks(shard, coords, plane, tuple(rows))


def _cut_dim(
    layout: Layout, index: int, length: int, coords: Coords, sizes: Sizes, lengths: Sequence[int] | None
) -> DimBlocks:
    dim, offset, out = layout.dims[index], 0, []
    unpadded = length if dim.keep is None else min(length, dim.keep)
    for start, stop in spans(dim, length, coords, sizes, lengths):
        real = min(stop, unpadded) - start
        if real > 0:
            out.append((slice(start, start + real), slice(offset, offset + real)))
        offset += stop - start
    return out


def _combine(rows: Sequence[DimBlocks]) -> tuple[Block, ...]:
    return tuple([Block(tuple([t for t, _ in row]), tuple([s for _, s in row])) for row in product(*rows)])


def freeze_lengths(lengths: Lengths | None) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Lengths as a key of a cache."""
    return tuple([(i, tuple(n)) for i, n in lengths.items()]) if lengths else ()


# -- ranks that hold the same, or a part of a sum ----------------------------------------------------------


def first_copy(layout: Layout, coords: Coords, sizes: Sizes) -> dict[str, int]:
    """The first of the ranks that hold the same values as the one at `coords`, on the layout's axes."""
    out = {}
    for axis, count in _list_copies(layout):
        at = coords.get(axis, 0) if sizes.get(axis, 1) > 1 else 0
        out[axis] = at - at % count
    return out


@lru_cache(1024)
def _list_copies(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Each of the layout's axes, and how many neighbouring coordinates on it hold the same values."""
    copies = {c.axis: c.copies for d in layout.dims for c in d.cuts if not c.partial}
    return tuple([(axis, copies.get(axis, 1)) for axis in layout.axes])


def partial_plane(layout: Layout, coords: Coords, sizes: Sizes) -> tuple[int, int]:
    """How many partial sums make up the full tensor, and the number of the one at `coords`, in rank order."""
    count, at = 1, 0
    for axis, copies in _list_partial_axes(layout):
        size = sizes.get(axis, 1)
        if size > 1:
            divisor = copies or size
            count, at = count * divisor, at * divisor + coords.get(axis, 0) % divisor
    return count, at


@lru_cache(1024)
def _list_partial_axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Each axis with partial sums, and of how many neighbouring coordinates; 0 for all."""
    cuts = [(c.axis, c.copies) for d in layout.dims for c in d.cuts if c.partial and c.copies > 1]
    return (*cuts, *[(axis, 0) for axis in layout.partial])


def is_partial(layout: Layout, sizes: Sizes) -> bool:
    """Whether the full tensor is a sum over ranks."""
    return partial_plane(layout, {}, sizes)[0] > 1
