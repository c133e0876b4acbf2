"""A region of the full tensor from parts of shards: `assemble`, for a caller that needs only some entries.

`region(...) == assemble(...)[wanted]` for every layout; nothing outside of the region is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout.algebra import Coords, Layout, Lengths, Sizes
from megatron_flex.layout.blocks import is_partial, owned_blocks
from megatron_flex.layout.spans import coordinates, full_order, inverse_order

DimIndex = range | list[int]  # entries of a dim, in this order; a range is ascending
RegionIndex = tuple[DimIndex, ...]  # for each dim
MAX_KEPT_RANKS = 256  # of a layout whose plans are kept; 64 plans are


class BlockRead(NamedTuple):
    """A block of one shard, and its position in the region; dims in the shard's order.

    Attributes:
        coords: the rank of the shard, on the layout's axes in their order; the first of several ranks that
            hold copies.
        source: the block's entries in the shard.
        target: the block's entries in the region.
    """

    coords: Coords
    source: RegionIndex
    target: RegionIndex


def plan_reads(
    layout: Layout,
    full: Sequence[int],
    sizes: Sizes,
    indices: Sequence[DimIndex],
    lengths: Lengths | None = None,
) -> Iterator[BlockRead]:
    """The blocks of shards that make up a region. Partial blocks have one target and are added there.

    Args:
        layout: the layout of the shards.
        full: the full tensor's shape, padding included, dims in the shards' order.
        sizes: the sizes of the mesh axes.
        indices: for each dim, in the shards' order, the requested entries.
        lengths: the lengths of the shards of uneven dims.
    """
    axes = tuple((axis, sizes.get(axis, 1)) for axis in layout.axes)
    ranges = tuple(index for index in indices if isinstance(index, range))
    if lengths or len(ranges) < len(indices) or prod(n for _, n in axes) > MAX_KEPT_RANKS:
        return _iterate_reads(layout, full, sizes, indices, lengths)
    return iter(_list_reads(layout, tuple(full), axes, ranges))


@lru_cache(64)
def _list_reads(
    layout: Layout, full: tuple[int, ...], axes: tuple[tuple[str, int], ...], ranges: tuple[range, ...]
) -> tuple[BlockRead, ...]:
    """The plan of a region of ranges: microbatches, and most sites of a model, have the same one."""
    return tuple(_iterate_reads(layout, full, dict(axes), ranges, None))


def _iterate_reads(
    layout: Layout, full: Sequence[int], sizes: Sizes, indices: Sequence[DimIndex], lengths: Lengths | None
) -> Iterator[BlockRead]:
    known: dict[tuple[int, tuple[int, ...]], list[tuple[DimIndex, DimIndex]]] = {}
    for owner in owned_blocks(layout, sizes, full, lengths):
        overlaps = []
        for index, (dim, row) in enumerate(zip(layout.dims, owner.dims, strict=True)):
            at = index, tuple([owner.coords[c.axis] for c in dim.cuts])
            if at not in known:
                pairs = (_overlap_block(target, source, indices[index]) for target, source in row)
                known[at] = [pair for pair in pairs if pair is not None]
            overlaps.append(known[at])
        for combo in product(*overlaps):
            yield BlockRead(owner.coords, tuple(s for s, _ in combo), tuple(t for _, t in combo))


def assemble_region(
    layout: Layout,
    shard: Callable[[Coords, RegionIndex], Tensor],
    full: Sequence[int],
    sizes: Sizes,
    indices: Sequence[DimIndex],
    lengths: Lengths | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Build a region of the full tensor.

    Args:
        layout: the layout of the shards.
        shard: returns entries of the shard of a rank; they are copied at once, and never written to.
        full: the full tensor's shape, padding included, dims in the shards' order (`padded_shape`).
        sizes: the sizes of the mesh axes.
        indices: for each dim of the full tensor, in the single-device order, the requested entries.
        lengths: the lengths of the shards of uneven dims.
        out: the tensor to write to, in any dtype and memory order; a new tensor if None.

    Returns:
        `out`, dims in the single-device order. Summands of half precision are added in fp32, and the sum is
        rounded once.

    Raises:
        LayoutError: the full tensor does not have these entries.
    """
    order, shard_indices = _order_by_shard(layout, full, indices)
    shape = [len(index) for index in shard_indices]
    summed = is_partial(layout, sizes)
    in_order = None if out is None else out.permute(inverse_order(order))
    total, dtype = None if summed else in_order, torch.float32
    for coords, source, target in plan_reads(layout, full, sizes, shard_indices, lengths):
        block = shard(coords, source)
        dtype = block.dtype
        if total is None:
            half = summed and dtype.is_floating_point and dtype.itemsize < 4
            make = torch.zeros if summed else torch.empty
            total = make(shape, dtype=torch.float32 if half else dtype)
        write_entries(total, target, block, summed)
    if total is None:
        # the region is empty, and any shard gives the dtype
        dtype = shard(coordinates(layout, sizes)[0], tuple(range(0) for _ in order)).dtype
        total = torch.empty(shape, dtype=dtype)
    if in_order is None:
        return total.to(dtype).permute(order)
    if summed:
        in_order.copy_(total)
    return in_order.permute(order)


def find_region(
    layout: Layout,
    shard: Callable[[Coords, RegionIndex], Tensor],
    full: Sequence[int],
    sizes: Sizes,
    indices: Sequence[DimIndex],
    lengths: Lengths | None = None,
) -> Tensor | None:
    """Return a region without a copy, if one block of one shard has all of its entries.

    Args:
        layout: as in `assemble_region`.
        shard: likewise; what it returns is not copied.
        full: likewise.
        sizes: likewise.
        indices: likewise.
        lengths: likewise.

    Returns:
        What `shard` returned, dims in the single-device order; None if the region has no entries, entries of
        several shards, or sums over ranks.

    Raises:
        LayoutError: the full tensor does not have these entries.
    """
    order, shard_indices = _order_by_shard(layout, full, indices)
    blocks = list(islice(plan_reads(layout, full, sizes, shard_indices, lengths), 2))
    if len(blocks) != 1:
        return None
    coords, source, _ = blocks[0]
    return shard(coords, source).permute(order)


def _order_by_shard(
    layout: Layout, full: Sequence[int], indices: Sequence[DimIndex]
) -> tuple[tuple[int, ...], list[DimIndex]]:
    """The shards' order of the dims of the full tensor, and a region's entries of each dim in that order.

    Raises:
        LayoutError: the region has another number of dims, or entries that the full tensor does not have.
    """
    order = full_order(layout)
    if len(indices) != len(order):
        raise LayoutError(
            f"a region of {len(indices)} dims; layout {layout.describe()} has {len(order)}: give entries "
            "of each"
        )
    shard_indices: list[DimIndex] = [range(0)] * len(order)
    for index, at in zip(indices, order, strict=True):
        keep = layout.dims[at].keep
        length = full[at] if keep is None else min(full[at], keep)
        if len(index) and not 0 <= min(index) <= max(index) < length:
            name = layout.dims[at].name or f"d{at}"
            raise LayoutError(
                f"entries {min(index)} to {max(index)} of dim {name}, of {length} in layout "
                f"{layout.describe()}: ask for entries of the full tensor"
            )
        shard_indices[at] = index
    return order, shard_indices


def take_entries(tensor: Tensor, where: RegionIndex) -> Tensor:
    """The entries of a tensor, indexed dim by dim; a view if all indices are ranges."""
    cut = [slice(i.start, i.stop, i.step) if isinstance(i, range) else slice(None) for i in where]
    tensor = tensor[tuple(cut)]
    for dim, index in enumerate(where):
        if not isinstance(index, range):
            tensor = tensor.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return tensor


def write_entries(out: Tensor, where: RegionIndex, block: Tensor, add: bool = False) -> None:
    """Write a block to the entries of a tensor, or add it to their values."""
    cut = [slice(i.start, i.stop, i.step) for i in where if isinstance(i, range)]
    if len(cut) == len(where):
        target = out[tuple(cut)]
        _ = target.add_(block) if add else target.copy_(block)
        return
    at = []
    for dim, index in enumerate(where):
        shape = [1] * len(where)
        shape[dim] = len(index)
        at.append(torch.tensor(list(index), dtype=torch.int64).reshape(shape))
    out.index_put_(tuple(at), block.to(out.dtype), accumulate=add)


def compact_index(index: Sequence[int]) -> DimIndex:
    """The same entries as a range, where they are ascending and evenly spaced."""
    if isinstance(index, range) and index.step > 0:
        return index
    indices = list(index)
    if not indices:
        return range(0)
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step > 0 and indices == (even := list(range(indices[0], indices[-1] + 1, step))):
        return range(even[0], even[-1] + 1, step)
    return indices


def _overlap_block(target: slice, source: slice, requested: DimIndex) -> tuple[DimIndex, DimIndex] | None:
    """The requested entries of a dim that a block has: their positions in the shard, and in the region."""
    start, stop, offset = target.start, target.stop, source.start
    if isinstance(requested, range):
        first = max(0, -((requested.start - start) // requested.step))
        last = min(len(requested), -((requested.start - stop) // requested.step))
        if first >= last:
            return None
        begin = requested[first] - start + offset
        return range(begin, begin + (last - first - 1) * requested.step + 1, requested.step), range(
            first, last
        )
    pairs = [(i - start + offset, at) for at, i in enumerate(requested) if start <= i < stop]
    return (compact_index([i for i, _ in pairs]), compact_index([at for _, at in pairs])) if pairs else None
