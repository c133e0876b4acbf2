"""Sums over a block of two tensors, tile by tile. A tile fits into the CPU's cache.

The sums of a large block at once would move each of a dozen intermediate results to memory and back.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

COMPARE_BLOCK = 64 << 20  # bytes of one block of one tensor, in fp64
GRID_DTYPES = {  # low bits of the mantissa that are zero where a value is representable in a narrower dtype
    torch.float32: {"bf16": 16, "fp16 or tf32": 13, "fewer than 21 bits of mantissa": 4},
    torch.bfloat16: {"fp8 e4m3": 4, "fewer than 6 bits of mantissa": 3},
    torch.float16: {"fp8 e4m3": 7, "fewer than 8 bits of mantissa": 4},
}
LOW_BITS = 16  # no grid has more
INTEGER_VIEWS = {4: torch.int32, 2: torch.int16}
TILE_ENTRIES = 1 << 17  # pairs whose sums are computed together: three arrays of 1 MiB in fp64
FEWEST_TILES = 8  # for each thread
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
    for starts in itertools.product(*(range(0, n, step) for n, step in zip(shape, steps, strict=True))):
        yield tuple(slice(s, min(s + step, n)) for s, step, n in zip(starts, steps, shape, strict=True))


def split_into_tiles(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Split the shape of a block into tiles along all dims but the last; the slices are of those dims."""
    if math.prod(shape):
        width = shape[-1] if shape else 1
        yield from split_into_blocks(shape[:-1], 8 * (TILE_ENTRIES // width))


@dataclass(slots=True)
class BlockSums:
    """Sums over a block of two real tensors. The difference is B minus A.

    Five sums are computed: of the squares of A, the squares of B, the products of the difference and A, the
    squares of the difference, and the difference.

    Attributes:
        numel: number of pairs.
        rows: `[5, *dims but the last]`, the sums over the last dim.
        columns: `[5, last dim]`, the sums over the other dims.
        differing: number of unequal pairs.
        finite: whether all entries are; those that are not count as zero in the sums, in both tensors.
        peak: the greatest magnitude.
        greatest: the greatest magnitude of the difference.
        worst: the tile in which it is.
        on_grids: for each narrower dtype of `GRID_DTYPES` the entries of A and of B that it represents; empty
            for other dtypes.
    """

    numel: int
    rows: Tensor
    columns: Tensor
    differing: int = 0
    finite: bool = True
    peak: float = 0.0
    greatest: float = -1.0
    worst: tuple[slice, ...] = ()
    on_grids: list[list[int]] = field(default_factory=list)

    @property
    def totals(self) -> list[float]:
        """The five sums over all entries."""
        found: list[float] = self.rows.reshape(5, -1).sum(1).tolist()
        return found

    def merge(self, other: BlockSums) -> None:
        """Add the sums over the next tiles of the block; both have the block's rows."""
        self.columns += other.columns
        self.differing += other.differing
        self.finite &= other.finite
        self.peak = max(self.peak, other.peak)
        if other.greatest > self.greatest:
            self.greatest, self.worst = other.greatest, other.worst
        self.on_grids = [
            [mine + theirs for mine, theirs in zip(one, two, strict=True)]
            for one, two in zip(self.on_grids, other.on_grids, strict=True)
        ]


def sum_block(a: Tensor, b: Tensor) -> BlockSums:
    """Sums over a block, which must not be empty. All cores compute where a block has many tiles.

    Args:
        a: a block of A, real.
        b: the same block of B.
    """
    tiles = list(split_into_tiles(a.shape))
    rows = torch.empty(5, *a.shape[:-1], dtype=torch.float64)
    spare = (os.cpu_count() or 1) - 1  # one core reads the next block
    threads = max(1, min(MOST_THREADS, spare, len(tiles) // FEWEST_TILES))
    if threads == 1:
        return _sum_tiles(a, b, tiles, rows)
    ends = [len(tiles) * n // threads for n in range(threads + 1)]
    shares = [tiles[first:last] for first, last in pairwise(ends)]
    with ThreadPoolExecutor(threads, "megatron_flex compare") as pool:
        out, *others = pool.map(lambda share: _sum_tiles(a, b, share, rows), shares)
    for other in others:
        out.merge(other)
    return out


class _TileSums:
    """Sums over some tiles of a block, one after the other.

    Intermediate results are in memory that all tiles use: new memory of this size would be returned to the
    system after each tile, and the page faults of the next one would take longer than the sums. The sums are
    numpy's, as its functions begin sooner than torch's.

    Args:
        block: receives the sums.
        grids: the low bits of each narrower dtype that is counted.
        numel: pairs of the largest tile.
    """

    def __init__(self, block: BlockSums, grids: Sequence[int], numel: int) -> None:
        import numpy as np

        self.block, self.grids, self.width = block, grids, block.columns.shape[1]

        # Torch aligns memory to 64 bytes: equal tensors have bitwise equal sums, as the test of copies needs.
        def reserve(dtype: torch.dtype, rows: int = numel // self.width) -> Any:
            return torch.empty(rows, self.width, dtype=dtype).numpy()

        self._left, self._right, self._gap = (reserve(torch.float64) for _ in range(3))
        self._unequal = reserve(torch.bool)
        self._low, self._masked = (reserve(torch.int16).view(np.uint16) for _ in range(2))
        self._columns = reserve(torch.float64, 5)

    def add(self, a: Tensor, b: Tensor, tile: tuple[slice, ...]) -> None:
        """Add a tile.

        Args:
            a: the tile of A.
            b: the tile of B.
            tile: its part of each dim of the block but the last.
        """
        import numpy as np

        a, b = a.reshape(-1, self.width), b.reshape(-1, self.width)
        left, right, gap = (x[: len(a)] for x in (self._left, self._right, self._gap))
        with np.errstate(all="ignore"):  # of squares that are too large
            self._load(a, b, left, right)
            np.subtract(right, left, out=gap)
            greatest = max(float(gap.max()), -float(gap.min()))
            if greatest > self.block.greatest:
                self.block.greatest, self.block.worst = greatest, tile
            rows = self._sum_products(left, right, gap)
        where = self.block.rows[(slice(None), *tile)]
        where.copy_(torch.from_numpy(rows).view(where.shape))
        for run, values in enumerate((a, b) if self.grids else ()):
            self._count_on_grids(values, run)

    def _load(self, a: Tensor, b: Tensor, left: Any, right: Any) -> None:
        """Convert a tile to fp64; what is not finite in one of the two becomes 0 in both."""
        import numpy as np

        torch.from_numpy(left).copy_(a)
        torch.from_numpy(right).copy_(b)
        both = (left, right)
        if a.dtype == b.dtype == torch.float32:
            both = a.numpy(), b.numpy()  # half the bytes
        ends = [float(end) for x in both for end in (x.min(), x.max())]
        if not all(map(math.isfinite, ends)):
            self.block.finite, both = False, (left, right)
            bad = ~(np.isfinite(left) & np.isfinite(right))
            left[bad] = right[bad] = 0.0
            ends = [float(end) for x in both for end in (x.min(), x.max())]
        self.block.peak = max(self.block.peak, *map(abs, ends))
        unequal = np.not_equal(*both, out=self._unequal[: len(a)])
        self.block.differing += int(np.count_nonzero(unequal))

    def _sum_products(self, left: Any, right: Any, gap: Any) -> Any:
        """Add the five sums by column; return those by row."""
        import numpy as np

        rows, columns = np.empty((5, len(gap))), self._columns
        for at, (x, y) in enumerate(((left, left), (right, right), (gap, left), (gap, gap))):
            np.matmul(x[:, None, :], y[:, :, None], out=rows[at, :, None, None])
            np.einsum("rc,rc->c", x, y, out=columns[at])
        np.add.reduce(gap, 1, out=rows[4])
        np.add.reduce(gap, 0, out=columns[4])
        self.block.columns += torch.from_numpy(columns)
        return rows

    def _count_on_grids(self, values: Tensor, run: int) -> None:
        import numpy as np

        low, masked = self._low[: len(values)], self._masked[: len(values)]
        np.copyto(low, view_bits(values).numpy(), casting="unsafe")
        for counts, bits in zip(self.block.on_grids, self.grids, strict=True):
            others = low if bits == LOW_BITS else np.bitwise_and(low, (1 << bits) - 1, out=masked)
            counts[run] += low.size - int(np.count_nonzero(others))


def _sum_tiles(a: Tensor, b: Tensor, tiles: Sequence[tuple[slice, ...]], rows: Tensor) -> BlockSums:
    """Sums over some tiles of a block; those by row are written to the block's."""
    grids = list(GRID_DTYPES[a.dtype].values()) if has_grids(a, b) else []
    out = BlockSums(a.numel(), rows, rows.new_zeros(5, a.shape[-1] if a.ndim else 1))
    out.on_grids = [[0, 0] for _ in grids]
    sums = _TileSums(out, grids, a[tiles[0]].numel())
    for tile in tiles:
        sums.add(a[tile], b[tile], tile)
    return out


def has_grids(a: Tensor, b: Tensor) -> bool:
    """Whether entries that a narrower dtype represents are counted."""
    return a.dtype == b.dtype and a.dtype in GRID_DTYPES


def view_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(INTEGER_VIEWS[values.itemsize])
