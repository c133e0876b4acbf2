"""Sums over a block of two tensors, tile by tile. A tile fits into the CPU's cache.

The sums of a large block at once would move each of a dozen intermediate results to memory and back.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

COMPARE_BLOCK = 64 << 20  # bytes of one block of one tensor, in fp64
GRID_DTYPES = {  # low bits of the mantissa that are zero where a value is representable in a narrower dtype
    torch.float32: {"bf16": 16, "fp16 or tf32": 13, "fewer than 21 bits of mantissa": 4},
    torch.bfloat16: {"fp8 e4m3": 4, "fewer than 6 bits of mantissa": 3},
    torch.float16: {"fp8 e4m3": 7, "fewer than 8 bits of mantissa": 4},
}
COUNTED_BY_NUMPY = (torch.float16, torch.float32, torch.float64)
INTEGER_VIEWS = {4: torch.int32, 2: torch.int16}
TILE_ENTRIES = 1 << 16  # pairs whose sums are computed together: a dozen results of 512 KiB
FEWEST_TILES = 8  # of a block, fewer of which one thread sums
MOST_THREADS = 8


def split_into_blocks(shape: Sequence[int], most: int = COMPARE_BLOCK) -> Iterator[tuple[slice, ...]]:
    """Split a shape into blocks of at most `most` bytes in fp64, along its first dims.

    An empty shape has one block; a shape with no entries has none.
    """
    if math.prod(shape) == 0:
        return
    inner = 8
    steps = [1] * len(shape)
    for dim in reversed(range(len(shape))):
        steps[dim] = max(1, min(shape[dim], most // inner))
        inner *= steps[dim]
    for starts in product(*(range(0, n, step) for n, step in zip(shape, steps, strict=True))):
        yield tuple(slice(s, min(s + step, n)) for s, step, n in zip(starts, steps, shape, strict=True))


def split_into_tiles(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Split the shape of a block into tiles along all dims but the last; the slices are of those dims."""
    if math.prod(shape):
        width = shape[-1] if shape else 1
        yield from split_into_blocks(shape[:-1], 8 * (TILE_ENTRIES // width))


@dataclass(slots=True)
class TileSums:
    """Sums over a tile of two real tensors. The difference is B minus A.

    Five sums are computed: of the squares of A, the squares of B, the products of the difference and A, the
    squares of the difference, and the difference.

    Attributes:
        numel: number of pairs.
        differing: number of unequal pairs.
        finite: whether all entries are; those that are not count as zero in the sums, in both tensors.
        peak: the greatest magnitude.
        greatest: the greatest magnitude of the difference.
        totals: the five sums over all entries.
        rows: `[5, *dims but the last]`, the sums over the last dim.
        columns: `[5, last dim]`, the sums over the other dims.
        on_grids: for each narrower dtype of `GRID_DTYPES` the entries of A and of B that it represents; empty
            for other dtypes.
    """

    numel: int
    differing: int
    finite: bool
    peak: float
    greatest: float
    totals: tuple[float, ...]
    rows: Tensor
    columns: Tensor
    on_grids: tuple[tuple[int, int], ...] = ()


def sum_tiles(a: Tensor, b: Tensor) -> Iterator[tuple[tuple[slice, ...], TileSums]]:
    """The tiles of a block with their sums, in order. All cores compute where a block has many tiles.

    Args:
        a: a block of A, real.
        b: the same block of B.
    """
    parts = list(split_into_tiles(a.shape))
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    if threads == 1 or len(parts) < FEWEST_TILES:
        yield from ((part, sum_tile(a[part], b[part])) for part in parts)
        return
    waiting: deque[tuple[tuple[slice, ...], Future[TileSums]]] = deque()
    with ThreadPoolExecutor(threads, "megatron_flex compare") as pool:
        for part in parts:
            waiting.append((part, pool.submit(sum_tile, a[part], b[part])))
            if len(waiting) > 2 * threads:  # sums of wide rows are as large as the rows
                first, found = waiting.popleft()
                yield first, found.result()
        for first, found in waiting:
            yield first, found.result()


def sum_tile(a: Tensor, b: Tensor) -> TileSums:
    """Sums over a tile, which must not be empty.

    Args:
        a: a part of A, real.
        b: the same part of B.
    """
    left, right = (t.to(torch.float64, memory_format=torch.contiguous_format) for t in (a, b))
    found = _sum_products(left, right)
    if not math.isfinite(found.totals[0] + found.totals[1]):
        good = left.isfinite() & right.isfinite()  # all of them, where only the squares are too large
        found = _sum_products(left.where(good, 0.0), right.where(good, 0.0))
        found.finite = bool(good.all())
    found.differing = _count_differing(a, b)
    if has_grids(a, b):
        found.on_grids = tuple(
            (_count_on_grid(a, bits), _count_on_grid(b, bits)) for bits in GRID_DTYPES[a.dtype].values()
        )
    return found


def _sum_products(left: Tensor, right: Tensor) -> TileSums:
    """All sums but those that count entries."""
    gap = right - left
    parts = (left.square(), right.square(), gap * left, gap.square(), gap)
    rows = torch.stack([part.sum(-1) for part in parts])
    width = left.shape[-1] if left.ndim else 1
    columns = torch.stack([part.reshape(-1, width).sum(0) for part in parts])
    ends = [abs(float(end)) for t in (left, right, gap) for end in t.aminmax()]
    totals = tuple(rows.reshape(len(parts), -1).sum(1).tolist())
    return TileSums(left.numel(), 0, True, max(ends[:4]), max(ends[4:]), totals, rows, columns)


def has_grids(a: Tensor, b: Tensor) -> bool:
    """Whether entries that a narrower dtype represents are counted."""
    return a.dtype == b.dtype and a.dtype in GRID_DTYPES


def _count_on_grid(values: Tensor, bits: int) -> int:
    """The number of values whose low bits are zero."""
    return values.numel() - _count_nonzero(view_bits(values).numpy() & ((1 << bits) - 1))


def view_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(INTEGER_VIEWS[values.itemsize])


def _count_differing(a: Tensor, b: Tensor) -> int:
    if a.dtype == b.dtype and a.dtype in COUNTED_BY_NUMPY:
        return _count_nonzero(a.numpy() != b.numpy())
    return int(torch.count_nonzero(a.double() != b.double()))


def _count_nonzero(values: Any) -> int:
    """Of an array of numpy's, which counts several times as fast as torch."""
    import numpy as np

    return int(np.count_nonzero(values))
