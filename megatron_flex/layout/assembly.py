"""From shards to the full tensor and back: `assemble` and `extract`, inverse to each other for every layout.

Both are loops over blocks. Each entry is copied once, directly to its destination.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout.algebra import Coords, Layout, Lengths, Sizes
from megatron_flex.layout.blocks import Block, Slices, blocks, freeze_lengths, owned_blocks, partial_plane
from megatron_flex.layout.spans import (
    count_parts,
    full_shape,
    inverse_order,
    padded_shape,
    shard_shape,
    uneven_lengths,
)

MAX_CACHED_COPIES = 1024  # layouts and shapes


def assemble(
    layout: Layout, shards: Tensor | Sequence[Tensor], sizes: Sizes, out: Tensor | None = None
) -> Tensor:
    """Build the full tensor from all shards.

    Args:
        layout: the layout of the shards.
        shards: the local tensors in the order of `coordinates(layout, sizes)`; equal ones may be one tensor,
            stacked along its first dim.
        sizes: the sizes of the mesh axes.
        out: the tensor to write to, of the shards' dtype and any strides; a new tensor if None.

    Returns:
        The full tensor as one device would hold it: padding stripped, dims in the single-device order.
        Without `out` it may share memory with a shard that is the full tensor; otherwise it is contiguous.

    Raises:
        LayoutError: a wrong number of shards, or shapes that do not fit the layout.
    """
    count = prod(sizes.get(a, 1) for a in layout.axes)
    if len(shards) != count:
        raise LayoutError(f"{len(shards)} shards for layout {layout.describe()}, which needs {count}")
    shapes = [s.shape for s in shards]
    for index, dim in enumerate(layout.dims):
        lengths_held = {s[index] for s in shapes if len(s) == len(layout.dims)}
        if not dim.uneven and len(lengths_held) > 1:
            raise LayoutError(
                f"shards have {sorted(lengths_held)} entries in dim {dim.name!r}; they must fit one length",
                dim=dim.name,
            )
    first = shards[0]
    lengths = uneven_lengths(layout, shapes, sizes)
    padded_shape(layout, first.shape, sizes, lengths)  # raises for a wrong number of dims
    if count == 1:
        full_tensor = single_device_view(layout, first)
        return full_tensor if out is None else out.copy_(full_tensor)
    shape = full_shape(layout, first.shape, sizes, lengths)
    if out is None:
        out = torch.empty(shape, dtype=first.dtype, device=first.device)
    elif out.shape != shape:
        raise LayoutError(f"a full tensor of shape {shape} does not fit into a tensor of {tuple(out.shape)}")
    plan_copy(layout, first.shape, sizes, lengths)(shards, out)
    return out


class ShardCopy(NamedTuple):
    """The copy of all shards into a full tensor.

    Attributes:
        order: the full tensor's dims in the shards' order; None for the same order.
        strides: of a contiguous full tensor as the view `[shards, *shard]`; None without such a view.
        blocks: the number of a shard, whether its block is added to what is there, and the block.
    """

    order: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    blocks: tuple[tuple[int, bool, Block], ...]

    def __call__(self, shards: Tensor | Sequence[Tensor], out: Tensor) -> None:
        """Copy the shards, which may be one tensor, stacked along its first dim; then at once if possible."""
        if self.strides is not None and isinstance(shards, Tensor) and out.is_contiguous():
            out.as_strided(shards.shape, self.strides, out.storage_offset()).copy_(shards)
            return
        inner = out if self.order is None else out.permute(self.order)
        for number, adds, (target, source) in self.blocks:
            block = shards[number][source]
            _ = inner[target].add_(block) if adds else inner[target].copy_(block)


def plan_copy(
    layout: Layout, shape: Sequence[int], sizes: Sizes, lengths: Lengths | None = None
) -> ShardCopy:
    """The copy of shards into a full tensor; `shape` is that of the first shard.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    return _plan_copy(layout, tuple(shape), _freeze_sizes(layout, sizes), freeze_lengths(lengths))


@lru_cache(MAX_CACHED_COPIES)
def _plan_copy(
    layout: Layout,
    shape: tuple[int, ...],
    axes: tuple[tuple[str, int], ...],
    lengths: tuple[tuple[int, tuple[int, ...]], ...],
) -> ShardCopy:
    sizes, lengths_by_dim = dict(axes), dict(lengths)
    owners = owned_blocks(layout, sizes, padded_shape(layout, shape, sizes, lengths_by_dim), lengths_by_dim)
    copies = tuple((o.shard, o.plane > 0, block) for o in owners for block in o.blocks)
    return ShardCopy(
        None if layout.permute is None else inverse_order(layout.permute),
        None if lengths else _find_strides(layout, shape, sizes, copies),
        copies,
    )


def _find_strides(
    layout: Layout, shape: Sequence[int], sizes: Sizes, copies: Sequence[tuple[int, bool, Block]]
) -> tuple[int, ...] | None:
    """The strides of the view `[shards, *shard]` of a contiguous full tensor; None without such a view."""
    strides = _contiguous_strides(full_shape(layout, shape, sizes))
    if layout.permute is not None:
        strides = tuple([strides[i] for i in inverse_order(layout.permute)])
    if any(adds or not _is_entire(source, shape) for _, adds, (_, source) in copies):
        return None
    starts = [sum(t.start * n for t, n in zip(target, strides, strict=True)) for _, _, (target, _) in copies]
    step = starts[1] if len(starts) > 1 else 0
    if starts != [n * step for n in range(prod(sizes.values()))]:
        return None
    return step, *strides


def find_joined_dim(layout: Layout, shape: Sequence[int], sizes: Sizes) -> int | None:
    """The dim along which `torch.cat` of equal shards of this shape is the full tensor; None without one."""
    if any(d.uneven for d in layout.dims):
        layout = replace(layout, dims=tuple(replace(d, uneven=False) for d in layout.dims))
    strides = plan_copy(layout, shape, sizes).strides
    if strides is None or layout.permute is not None:
        return None
    full, count = full_shape(layout, shape, sizes), prod(sizes.get(a, 1) for a in layout.axes)
    for dim, (length, stride) in enumerate(zip(shape, strides[1:], strict=True)):
        if strides[0] == length * stride and full[dim] == count * length:
            return dim
    return None


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
        full: the full tensor, with or without its padding.
        coords: this rank's coordinates.
        sizes: the sizes of the mesh axes.
        local: where the layout strips padding, the previous shard (its padding is restored), or its shape
            (the padding becomes zeros).
        lengths: the lengths of the shards of uneven dims.
        alias: whether the shard may be a view of `full` where it is contiguous there.

    Returns:
        A contiguous tensor, which shares no memory with `full` unless `alias` is set.

    Raises:
        LayoutError: the shape of `full` does not fit the layout.
    """
    given = local.shape if isinstance(local, Tensor) else local
    shape = full.shape if layout.permute is None else [full.shape[i] for i in inverse_order(layout.permute)]
    count = len(layout.dims)
    padded = [
        n if d.keep is None or given is None else max(n, given[i] * count_parts(d, sizes))
        for i, (n, d) in enumerate(zip(shape, layout.dims, strict=False))
    ]
    if [d for n, d in zip(shape, layout.dims, strict=False) if d.keep not in (None, n)]:
        layout = _keep_lengths(layout, tuple(shape[:count]))
    local_shape = (*shard_shape(layout, padded, coords, sizes, lengths), *shape[count:])
    blocks = find_values(layout, coords, sizes, padded, lengths)
    old = local if isinstance(local, Tensor) and not partial_plane(layout, coords, sizes)[1] else None
    return copy_from_full(layout, full, blocks, local_shape, old, alias)


def find_values(
    layout: Layout, coords: Coords, sizes: Sizes, padded: Sequence[int], lengths: Lengths | None = None
) -> tuple[Block, ...]:
    """The blocks that a shard gets of a full tensor: none where it gets zeros of a partial sum."""
    if partial_plane(layout, coords, sizes)[1]:
        return ()
    return blocks(layout, coords, sizes, padded, lengths)


def copy_from_full(
    layout: Layout,
    full: Tensor,
    blocks: Sequence[Block],
    shape: Sequence[int],
    old: Tensor | None = None,
    alias: bool = False,
) -> Tensor:
    """Copy the blocks of one shard out of a full tensor; `old` and `alias` as `extract` has them.

    Args:
        layout: the layout of the shard.
        full: the full tensor.
        blocks: its blocks in the shard: `find_values`.
        shape: of the shard. Entries outside of the blocks become those of `old`, or zeros.
        old: the shard before.
        alias: whether the result may be a view of `full`.
    """
    inner = full if layout.permute is None else full.permute(inverse_order(layout.permute))
    if len(blocks) == 1 and (shard := inner[blocks[0].target]).shape == shape:
        return (
            shard if alias and shard.is_contiguous() else shard.clone(memory_format=torch.contiguous_format)
        )
    if not blocks:
        return inner.new_zeros(shape) if old is None else old.clone(memory_format=torch.contiguous_format)
    shard = inner.new_empty(shape)
    for target, source in blocks:
        shard[source].copy_(inner[target])
    for index, start, stop in _find_padding(blocks, shape) if any(d.keep for d in layout.dims) else ():
        hole = shard.narrow(index, start, stop - start)
        _ = hole.zero_() if old is None else hole.copy_(old.narrow(index, start, stop - start))
    return shard


def _find_padding(blocks: Sequence[Block], shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The ranges of a shard's dims that no block covers: dim, first and last index."""
    for index in range(len(blocks[0].source)):
        offset = 0
        for start, stop in sorted({(b.source[index].start, b.source[index].stop) for b in blocks}):
            if offset < start:
                yield index, offset, start
            offset = stop
        if offset < shape[index]:
            yield index, offset, shape[index]


def _is_entire(source: Slices, shape: Sequence[int]) -> bool:
    return all(s.start == 0 and s.stop == n for s, n in zip(source, shape, strict=False))


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple([prod(shape[i + 1 :]) for i in range(len(shape))])


def _freeze_sizes(layout: Layout, sizes: Sizes) -> tuple[tuple[str, int], ...]:
    return tuple([(a, sizes.get(a, 1)) for a in layout.axes])


@lru_cache(MAX_CACHED_COPIES)
def _keep_lengths(layout: Layout, lengths: tuple[int, ...]) -> Layout:
    """The layout with the padding that a full tensor of these lengths lacks."""
    dims = zip(layout.dims, lengths, strict=True)
    return replace(layout, dims=tuple(d if d.keep is None else replace(d, keep=n) for d, n in dims))


def single_device_view(layout: Layout, full: Tensor) -> Tensor:
    """A shard that has the full tensor, as one device would hold it: without padding, dims in that order."""
    for index, dim in enumerate(layout.dims):
        if dim.keep is not None and dim.keep < full.shape[index]:
            full = full.narrow(index, 0, dim.keep)
    return full if layout.permute is None else full.permute(layout.permute)
