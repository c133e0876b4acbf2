"""From shards to the full tensor and back: `assemble` and `extract`, inverse to each other for every layout.

Each entry is copied once, directly to its destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout.algebra import Coords, Dim, Layout, Lengths, Sizes, Span
from megatron_flex.layout.spans import (
    coordinates,
    count_parts,
    full_shape,
    padded_shape,
    spans,
    uneven_lengths,
)

Slices = tuple[slice, ...]
MAX_REMEMBERED_BLOCKS = 1024  # cached plans


class ShardBlock(NamedTuple):
    """A block of a shard and its position in the full tensor, dims in the shard's order.

    Attributes:
        shard: the index of the shard, in the order of `coordinates`.
        source: the block's entries in the shard.
        target: the block's entries in the full tensor, padding stripped.
        add: whether to add to a summand that is already there.
    """

    shard: int
    source: Slices
    target: Slices
    add: bool


def assemble(layout: Layout, shards: Sequence[Tensor], sizes: Sizes, out: Tensor | None = None) -> Tensor:
    """Build the full tensor from all shards.

    Args:
        layout: the layout of the shards.
        shards: the local tensors in the order of `coordinates(layout, sizes)`.
        sizes: the sizes of the mesh axes.
        out: the tensor to write to, of the shards' dtype and any strides; a new tensor if None.

    Returns:
        The full tensor as one device would hold it: padding stripped, dims in the single-device order.
        Without `out` it may share memory with a shard that is the full tensor; otherwise it is contiguous.

    Raises:
        LayoutError: a wrong number of shards, or shapes that do not fit the layout.
    """
    count = len(coordinates(layout, sizes))
    if len(shards) != count:
        raise LayoutError(f"{len(shards)} shards for layout {layout.describe()}, which needs {count}")
    for index, dim in enumerate(layout.dims):
        found = {s.shape[index] for s in shards if s.ndim == len(layout.dims)}
        if not dim.uneven and len(found) > 1:
            raise LayoutError(
                f"shards have {sorted(found)} entries in dim {dim.name!r}; they must fit one length",
                dim=dim.name,
            )
    lengths = uneven_lengths(layout, [s.shape for s in shards], sizes)
    first = shards[0]
    full = padded_shape(layout, first.shape, sizes, lengths)
    if count == 1:
        full_tensor = _single_device_view(layout, first)
        return full_tensor if out is None else out.copy_(full_tensor)
    shape = full_shape(layout, first.shape, sizes, lengths)
    if out is None:
        out = torch.empty(shape, dtype=first.dtype, device=first.device)
    elif out.shape != shape:
        raise LayoutError(f"a full tensor of shape {shape} does not fit into a tensor of {tuple(out.shape)}")
    return copy_blocks(
        _plan_blocks_cached(layout, full, _layout_sizes(layout, sizes), _freeze_lengths(lengths)),
        layout,
        shards,
        out,
    )


def plan_blocks(layout: Layout, shape: Sequence[int], sizes: Sizes) -> tuple[ShardBlock, ...]:
    """The blocks to copy, for shards that all have this shape.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    return _plan_blocks_cached(layout, padded_shape(layout, shape, sizes), _layout_sizes(layout, sizes), ())


def copy_blocks(
    blocks: Sequence[ShardBlock], layout: Layout, shards: Sequence[Tensor], out: Tensor
) -> Tensor:
    """Copy the blocks of shards to their positions in `out`, a full tensor."""
    inner = out if layout.permute is None else out.permute(_inverse(layout.permute))
    for number, source, target, add in blocks:
        block = shards[number][source]
        _ = inner[target].add_(block) if add else inner[target].copy_(block)
    return out


def extract(
    layout: Layout,
    full: Tensor,
    coords: Coords,
    sizes: Sizes,
    local: Tensor | Sequence[int] | None = None,
    lengths: Lengths | None = None,
    alias: bool = False,
) -> Tensor:
    """Extract the shard of the rank at `coords` from the full tensor; the inverse of `assemble`.

    Of a partial sum, the first coordinate of each summed axis gets the value and the others zeros.

    Args:
        layout: the layout of the shards; trailing dims that it does not describe are not sharded.
        full: the full tensor.
        coords: this rank's coordinates.
        sizes: the sizes of the mesh axes.
        local: where the layout strips padding, the previous shard (its padding is restored), or its shape
            (the padding becomes zeros).
        lengths: the lengths of the shards of uneven dims.
        alias: whether the shard may be a view of `full` where it is contiguous there.

    Returns:
        A contiguous tensor, which shares no memory with `full` unless `alias` is set.
    """
    given = local.shape if isinstance(local, Tensor) else local
    part = locate_shard(layout, full.shape, coords, sizes, given, lengths)
    return copy_shard(part, full, local if isinstance(local, Tensor) else None, alias)


class ShardPosition(NamedTuple):
    """The position of a rank's shard in a full tensor of one shape.

    Attributes:
        order: the shard's dims in terms of the full tensor's; None for the same order.
        shape: the shard's shape.
        pieces: entries of the shard, and the same in the full tensor; empty where it has zeros of a sum.
        gaps: the padding: dim, first and last index.
    """

    order: tuple[int, ...] | None
    shape: tuple[int, ...]
    pieces: tuple[tuple[Slices, Slices], ...]
    gaps: tuple[tuple[int, int, int], ...]


def locate_shard(
    layout: Layout,
    full: Sequence[int],
    coords: Coords,
    sizes: Sizes,
    local: Sequence[int] | None = None,
    lengths: Lengths | None = None,
) -> ShardPosition:
    """The position of the shard of the rank at `coords`; arguments as for `extract`, with shapes."""
    order = None if layout.permute is None else _inverse(layout.permute)
    inner = tuple(full) if order is None else tuple(full[i] for i in order)
    if len(inner) > len(layout.dims):  # trailing dims without a description are not sharded
        layout = replace(layout, dims=layout.dims + (Dim(),) * (len(inner) - len(layout.dims)))
    padded = tuple(
        n if d.keep is None or local is None else max(n, local[i] * count_parts(d, sizes))
        for i, (n, d) in enumerate(zip(inner, layout.dims, strict=True))
    )
    rows = [_span_row(layout, i, n, coords, sizes, lengths) for i, n in enumerate(padded)]
    shape = tuple(sum(stop - start for (start, stop), _ in row) for row in rows)
    if _holds_nothing(layout, coords, sizes):
        return ShardPosition(order, shape, (), ())
    rows = [_clip_row(row, n) for row, n in zip(rows, inner, strict=True)]
    pieces = tuple(
        (tuple(at for _, at in combo), tuple(slice(*span) for span, _ in combo)) for combo in product(*rows)
    )
    gaps = [
        (index, start, stop)
        for index, row in enumerate(rows)
        for start, stop in _find_gaps([at for _, at in row], shape[index])
    ]
    return ShardPosition(order, shape, pieces, tuple(gaps))


def copy_shard(part: ShardPosition, full: Tensor, old: Tensor | None = None, alias: bool = False) -> Tensor:
    """Extract a shard from a full tensor; arguments as for `extract`."""
    inner = full if part.order is None else full.permute(part.order)
    if not part.pieces and not part.gaps:
        return inner.new_zeros(part.shape)
    if not part.gaps and len(part.pieces) == 1:
        shard = inner[part.pieces[0][1]]
        return (
            shard if alias and shard.is_contiguous() else shard.clone(memory_format=torch.contiguous_format)
        )
    shard = inner.new_empty(part.shape)
    for at, span in part.pieces:
        shard[at].copy_(inner[span])
    for index, start, stop in part.gaps:
        hole = shard.narrow(index, start, stop - start)
        _ = hole.zero_() if old is None else hole.copy_(old.narrow(index, start, stop - start))
    return shard


@lru_cache(maxsize=MAX_REMEMBERED_BLOCKS)
def _plan_blocks_cached(
    layout: Layout,
    full: tuple[int, ...],
    sizes: tuple[tuple[str, int], ...],
    lengths: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[ShardBlock, ...]:
    """The blocks to copy; the same for every tensor of these shapes."""
    mesh, uneven = dict(sizes), dict(lengths)
    out, written = [], set()
    for number, coords in enumerate(coordinates(layout, mesh)):
        if _is_spare_copy(layout, coords, mesh):
            continue
        rows = [
            _clip_row(_span_row(layout, i, n, coords, mesh, uneven), n if d.keep is None else min(n, d.keep))
            for i, (n, d) in enumerate(zip(full, layout.dims, strict=True))
        ]
        for combo in product(*rows):
            block = tuple(span for span, _ in combo)
            target = tuple(slice(*span) for span in block)
            out.append(ShardBlock(number, tuple(at for _, at in combo), target, block in written))
            written.add(block)
    return tuple(out)


def _span_row(
    layout: Layout, index: int, length: int, coords: Coords, sizes: Sizes, lengths: Lengths | None
) -> list[tuple[Span, slice]]:
    """For one dim, the spans of the full tensor that a shard has, and their positions in the shard."""
    own = None if lengths is None else lengths.get(index)
    offset, row = 0, []
    for start, stop in spans(layout.dims[index], length, coords, sizes, own):
        row.append(((start, stop), slice(offset, offset + stop - start)))
        offset += stop - start
    return row or [((0, 0), slice(0, 0))]


def _clip_row(row: list[tuple[Span, slice]], length: int) -> list[tuple[Span, slice]]:
    """The part of a row within the first `length` entries of the full tensor."""
    return [
        ((start, min(stop, length)), slice(at.start, at.start + min(stop, length) - start))
        for (start, stop), at in row
        if start < length or start == stop
    ]


def _find_gaps(pieces: list[slice], length: int) -> Iterator[Span]:
    """The ranges of a shard's dim that no piece covers."""
    offset = 0
    for piece in pieces:
        if offset < piece.start:
            yield offset, piece.start
        offset = piece.stop
    if offset < length:
        yield offset, length


def _is_spare_copy(layout: Layout, coords: Coords, sizes: Sizes) -> bool:
    """Whether this rank holds a further copy of another rank's shard."""
    cuts = [c for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial]
    return any(coords[c.axis] % c.copies for c in cuts if sizes.get(c.axis, 1) > 1)


def _holds_nothing(layout: Layout, coords: Coords, sizes: Sizes) -> bool:
    """Whether this rank is one of those that get zeros of a partial sum."""
    if any(coords.get(a, 0) for a in layout.partial if sizes.get(a, 1) > 1):
        return True
    cuts = [c for d in layout.dims for c in d.cuts if c.partial]
    return any(coords.get(c.axis, 0) % c.copies for c in cuts if sizes.get(c.axis, 1) > 1)


def _layout_sizes(layout: Layout, sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return tuple((a, sizes.get(a, 1)) for a in layout.axes)


def _freeze_lengths(lengths: Lengths) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((i, tuple(n)) for i, n in lengths.items())


def _single_device_view(layout: Layout, full: Tensor) -> Tensor:
    for index, dim in enumerate(layout.dims):
        if dim.keep is not None and dim.keep < full.shape[index]:
            full = full.narrow(index, 0, dim.keep)
    return full if layout.permute is None else full.permute(layout.permute)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))
