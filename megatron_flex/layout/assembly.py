"""Shards to whole and back: `assemble` and `extract`, inverse to each other for every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout.spans import coordinates, padded_shape, part_lengths, parts, spans
from megatron_flex.layout.types import Coords, Layout, Lengths, Sizes, Span


def assemble(layout: Layout, shards: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Make the whole from all shards.

    Args:
        layout: how the shards relate.
        shards: the local tensors in the order of `coordinates(layout, sizes)`.
        sizes: the mesh.

    Returns:
        The whole as one device would hold it: padding stripped, dims in the single-device order. It shares
        memory with the shard where one shard is the whole.

    Raises:
        LayoutError: a wrong number of shards, or shapes that do not fit the layout.
    """
    places = coordinates(layout, sizes)
    if len(shards) != len(places):
        raise LayoutError(f"{len(shards)} shards for layout {layout.describe()}, which needs {len(places)}")
    for index, dim in enumerate(layout.dims):
        found = {s.shape[index] for s in shards if s.ndim == len(layout.dims)}
        if not dim.uneven and len(found) > 1:
            raise LayoutError(
                f"shards have {sorted(found)} entries in dim {dim.name!r}; they must fit one length"
            )
    lengths = part_lengths(layout, [s.shape for s in shards], sizes)
    full = padded_shape(layout, shards[0].shape, sizes, lengths)
    if len(shards) == 1:
        return _single_device_view(layout, shards[0])
    whole = torch.empty(full, dtype=shards[0].dtype, device=shards[0].device)
    written: set[tuple[Span, ...]] = set()
    for shard, coords in zip(shards, places, strict=True):
        if _is_spare_copy(layout, coords, sizes):
            continue
        for block, source in _blocks(layout, full, coords, sizes, lengths):
            target = tuple(slice(a, b) for a, b in block)
            whole[target] = whole[target] + shard[source] if block in written else shard[source]
            written.add(block)
    return _single_device_view(layout, whole)


def extract(
    layout: Layout,
    whole: Tensor,
    coords: Coords,
    sizes: Sizes,
    local: Tensor | Sequence[int] | None = None,
    lengths: Lengths | None = None,
) -> Tensor:
    """Take the shard of the rank at `coords` out of the whole; the inverse of `assemble`.

    Of a sum, the first coordinate of each summed axis gets the value and the others zeros.

    Args:
        layout: how the shards relate.
        whole: the tensor that one device would hold.
        coords: this rank's coordinates.
        sizes: the mesh.
        local: where the layout strips padding, the shard as it was (its padding is put back), or its
            shape (the padding becomes zeros).
        lengths: the lengths of the parts of uneven dims.

    Returns:
        A contiguous tensor that shares no memory with `whole`.
    """
    shard = whole if layout.permute is None else whole.permute(_inverse(layout.permute))
    old = local if isinstance(local, Tensor) else None
    shape = shard.shape if local is None else (old.shape if old is not None else tuple(local))
    holes: list[tuple[int, slice]] = []
    for index, dim in enumerate(layout.dims):
        count = parts(dim, sizes)
        full = shard.shape[index] if dim.keep is None or local is None else shape[index] * count
        pieces = spans(dim, full, coords, sizes, None if lengths is None else lengths.get(index))
        if full > shard.shape[index]:
            holes += [(index, hole) for hole in _beyond(pieces, shard.shape[index])]
            shard = _lengthened(shard, index, full)
        if pieces != [(0, shard.shape[index])]:
            taken = [shard.narrow(index, a, b - a) for a, b in pieces]
            shard = taken[0] if len(taken) == 1 else torch.cat(taken, index)
    if _holds_nothing(layout, coords, sizes):
        return torch.zeros_like(shard, memory_format=torch.contiguous_format)
    if not shard.is_contiguous() or shard.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
        shard = shard.clone(memory_format=torch.contiguous_format)
    for index, hole in holes:
        if old is not None:
            shard.narrow(index, hole.start, hole.stop - hole.start).copy_(
                old.narrow(index, hole.start, hole.stop - hole.start)
            )
    return shard


def _is_spare_copy(layout: Layout, coords: Coords, sizes: Sizes) -> bool:
    """Whether this rank holds a second copy of what another one holds."""
    cuts = [c for d in layout.dims for c in d.cuts if c.copies > 1 and not c.partial]
    return any(coords[c.axis] % c.copies for c in cuts if sizes.get(c.axis, 1) > 1)


def _holds_nothing(layout: Layout, coords: Coords, sizes: Sizes) -> bool:
    """Whether this rank is one of those that get zeros of a sum."""
    if any(coords.get(a, 0) for a in layout.partial if sizes.get(a, 1) > 1):
        return True
    cuts = [c for d in layout.dims for c in d.cuts if c.partial]
    return any(coords.get(c.axis, 0) % c.copies for c in cuts if sizes.get(c.axis, 1) > 1)


def _beyond(pieces: list[Span], kept: int) -> Iterator[slice]:
    """The places of a shard that lie beyond the first `kept` entries of the whole."""
    offset = 0
    for start, stop in pieces:
        if stop > kept:
            yield slice(offset + max(kept - start, 0), offset + stop - start)
        offset += stop - start


def _lengthened(tensor: Tensor, index: int, length: int) -> Tensor:
    shape = list(tensor.shape)
    shape[index] = length - shape[index]
    return torch.cat([tensor, tensor.new_zeros(shape)], index)


def _blocks(
    layout: Layout, full: Sequence[int], coords: Coords, sizes: Sizes, lengths: Lengths
) -> Iterator[tuple[tuple[Span, ...], tuple[slice, ...]]]:
    """The blocks of a shard: which part of the whole each is, and where it lies in the shard."""
    rows: list[list[tuple[Span, slice]]] = []
    for index, dim in enumerate(layout.dims):
        offset, row = 0, []
        for start, stop in spans(dim, full[index], coords, sizes, lengths.get(index)):
            row.append(((start, stop), slice(offset, offset + stop - start)))
            offset += stop - start
        rows.append(row)
    for combo in product(*rows):
        yield tuple(span for span, _ in combo), tuple(where for _, where in combo)


def _single_device_view(layout: Layout, whole: Tensor) -> Tensor:
    for index, dim in enumerate(layout.dims):
        if dim.keep is not None and dim.keep < whole.shape[index]:
            whole = whole.narrow(index, 0, dim.keep)
    return whole if layout.permute is None else whole.permute(layout.permute)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))
