"""Where the blocks of a rank's shard go in the memory of the full tensor: strided views, worked out once for
each layout and shape.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.layout import Layout, blocks, first_copy, full_shape, padded_shape
from megatron_flex.layout.blocks import Slices

Places = tuple[tuple[str, int], ...]  # coordinates or sizes of axes, as a key of a cache


class BlockTarget(NamedTuple):
    """Where one block of a shard goes, in entries.

    Attributes:
        shape: of the block.
        stride: of the view of the full tensor's memory.
        offset: of the view, from the beginning of the tensor.
        source: the block in the shard; None for the shard itself.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    source: Slices | None

    def view(self, entries: Tensor, start: int) -> Tensor:
        """The block in memory, given as entries of the dtype, in which the full tensor begins at `start`."""
        return entries.as_strided(self.shape, self.stride, start + self.offset)


@lru_cache(4096)
def find_targets(layout: Layout, shape: torch.Size, coords: Places, sizes: Places) -> tuple[BlockTarget, ...]:
    """Where the blocks of the shard of the rank at `coords` go; nothing where another rank has the same.

    Args:
        layout: how the shards relate; without partial sums and uneven dims.
        shape: of each shard.
        coords: the rank's, on all axes of the ranks that read together.
        sizes: of those axes.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    at, ranks = dict(coords), dict(sizes)
    padded, full = padded_shape(layout, shape, ranks), full_shape(layout, shape, ranks)
    copies = {**dict.fromkeys(ranks, 0), **first_copy(layout, at, ranks)}
    if any(at[axis] != copies[axis] for axis, size in sizes if size > 1) or not shape.numel():
        return ()
    tensor = torch.empty(full, device="meta")
    order = layout.permute
    if order is not None:
        tensor = tensor.permute([order.index(i) for i in range(len(order))])
    entire = tuple(slice(0, n) for n in shape)
    return tuple(
        BlockTarget(
            (view := tensor[target]).shape,
            view.stride(),
            int(view.storage_offset()),
            None if source == entire else source,
        )
        for target, source in blocks(layout, at, ranks, padded)
    )
