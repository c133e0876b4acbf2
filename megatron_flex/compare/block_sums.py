"""Sums over a block of two tensors, tile by tile. A tile fits into the CPU's last cache.

The sums of a large block at once would move each of a dozen intermediate results to memory and back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

COMPARE_BLOCK = 64 << 20  # bytes of one block of one tensor, in fp64
GRID_DTYPES = {  # low bits of the mantissa that are zero where a value is representable in a narrower dtype
    torch.float32: {"bf16": 16, "fp16 or tf32": 13, "fewer than 21 bits of mantissa": 4},
    torch.bfloat16: {"fp8 e4m3": 4, "fewer than 6 bits of mantissa": 3},
    torch.float16: {"fp8 e4m3": 7, "fewer than 8 bits of mantissa": 4},
}
LOW_BITS = 16  # no grid has more
SEGMENT = 64  # entries that are counted together
EXACT_SEGMENTS = 1 << 10  # of a tile with more, an eighth is counted, and at least as many
INTEGER_VIEWS = {4: torch.int32, 2: torch.int16}
TILE_ENTRIES = 3 << 18  # pairs whose sums are computed together; threads wait for the GIL between calls

# Products and the sums over one tile are computed in fp32 where that loses nothing that a comparison uses:
# half the bytes in the CPU's cache, and twice the entries in an instruction. Sums over tiles are in fp64.
NARROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW_RANGE = 2.0**-50, 2.0**50  # of peaks whose products and sums are far from both ends of fp32's range
SMALL_GAP = 0.1  # of the squares of A; where those of the difference are less, B^2 = A^2 + 2 A gap + gap^2
NARROW_WIDTH = 128  # the least last dim: a sum over the other dims adds at most 6,144 numbers one by one


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
    squares of the difference, and the difference. Tiles of tensors in fp32 or less are summed in fp32, with
    an error of about 1e-6 of the sum of the magnitudes; others in fp64. The squares of B follow from the
    other sums where the difference is small, with an error of about 1e-6 of the squares of A.

    Attributes:
        numel: number of pairs.
        rows: `[5, *dims but the last]`, the sums over the last dim.
        columns: `[5, last dim]`, the sums over the other dims.
        differing: number of unequal pairs.
        finite: whether all entries are; those that are not count as zero in the sums, in both tensors.
        peak: the greatest magnitude.
        greatest: the greatest magnitude of the difference.
        worst: the row in which it is: its index along each dim but the last, as slices.
        on_grids: for each narrower dtype of `GRID_DTYPES` the entries of A and of B that it represents, in
            large tiles estimated from an eighth of them, the same in A and in B; empty for other dtypes.
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
        totals: list[float] = self.rows.reshape(5, -1).sum(1).tolist()
        return totals


def sum_block(a: Tensor, b: Tensor) -> BlockSums:
    """Sums over a block, which must not be empty.

    Args:
        a: a block of A, real.
        b: the same block of B.
    """
    width = a.shape[-1] if a.ndim else 1
    tiles = list(split_into_tiles(a.shape))
    grids = list(GRID_DTYPES[a.dtype].values()) if has_grids(a, b) else []
    rows = torch.empty(5, *a.shape[:-1], dtype=torch.float64)
    out = BlockSums(a.numel(), rows, rows.new_zeros(5, width), on_grids=[[0, 0] for _ in grids])
    narrow = a.dtype in NARROW_DTYPES and b.dtype in NARROW_DTYPES
    sums = _TileSums(out, grids, a[tiles[0]].numel(), narrow)
    for tile in tiles:
        sums.add(a[tile], b[tile], tile)
    return out


class _Tile(NamedTuple):
    """A tile in the dtype in which its sums are computed, `[rows, last dim]`.

    Attributes:
        left: A, with 0 for what is not finite in one of the two.
        right: B, likewise.
        gap: B minus A.
        peak: the greatest magnitude.
        greatest: that of the difference.
        finite: whether all entries are.
    """

    left: Any
    right: Any
    gap: Any
    peak: float
    greatest: float
    finite: bool

    @property
    def is_in_narrow_range(self) -> bool:
        """Whether the products of its entries can be summed in fp32."""
        least, most = NARROW_RANGE
        return self.peak <= most and all(not x or x >= least for x in (self.peak, self.greatest))


class _TileSums:
    """Sums over some tiles of a block, one after the other.

    Intermediate results are in memory that all tiles use: new memory of this size would be returned to the
    system after each tile, and the page faults of the next one would take longer than the sums. The sums are
    numpy's: of two dumps of 2,176 MiB they take 4.3 s of processor time, torch's 6.4 s, and those in fp64
    alone 7.4 s.

    Args:
        block: receives the sums.
        grids: the low bits of each narrower dtype that is counted.
        numel: pairs of the largest tile.
        narrow: whether the dtypes of the block allow sums in fp32.
    """

    def __init__(self, block: BlockSums, grids: Sequence[int], numel: int, narrow: bool) -> None:
        import numpy as np

        self.block, self.grids, self.width = block, grids, block.columns.shape[1]
        self._numel, self._narrow = numel, narrow and self.width >= NARROW_WIDTH
        self._arrays: dict[torch.dtype, list[Any]] = {}
        self._unequal = self._reserve(torch.bool)
        self._low, self._masked = (np.empty((2, numel), np.uint16) for _ in range(2))

    def add(self, a: Tensor, b: Tensor, tile: tuple[slice, ...]) -> None:
        """Add a tile.

        Args:
            a: the tile of A.
            b: the tile of B.
            tile: its part of each dim of the block but the last.
        """
        import numpy as np

        a, b = a.reshape(-1, self.width), b.reshape(-1, self.width)
        with np.errstate(all="ignore"):  # of squares that are too large
            loaded = self._load(a, b, torch.float32) if self._narrow else None
            if loaded is None or not loaded.is_in_narrow_range:
                self._narrow = False
                loaded = self._load(a, b, torch.float64)
            unequal = np.not_equal(loaded.gap, 0, out=self._unequal[: len(a)])
            rows = self._sum_products(loaded)
        block = self.block
        block.differing += int(np.count_nonzero(unequal))
        block.finite &= loaded.finite
        block.peak = max(block.peak, loaded.peak)
        if loaded.greatest > block.greatest:
            block.greatest, block.worst = loaded.greatest, _locate_row(loaded, tile)
        where = block.rows[(slice(None), *tile)]
        where.copy_(torch.from_numpy(rows).view(where.shape))
        if self.grids:
            self._count_on_grids(a, b)

    def _reserve(self, dtype: torch.dtype, rows: int | None = None) -> Any:
        """An array of `[rows, last dim]`; of the largest tile's rows for None."""
        # Torch aligns memory to 64 bytes, for speed. Tiles that need no conversion are read where they are:
        # sums do not depend on the address, as the test of copies needs bitwise equal ones.
        rows = self._numel // self.width if rows is None else rows
        return torch.empty(rows, self.width, dtype=dtype).numpy()

    def _load(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> _Tile:
        """Convert a tile; what is not finite in one of the two becomes 0 in both."""
        import numpy as np

        if dtype not in self._arrays:
            self._arrays[dtype] = [self._reserve(dtype) for _ in range(3)]
        left, right, gap = (x[: len(a)] for x in self._arrays[dtype])
        if a.dtype == b.dtype == dtype:
            both = a.numpy(), b.numpy()
        else:
            both = left, right
            _copy_to(both, a, b)
        ends = [float(end) for x in both for end in (x.min(), x.max())]
        finite = all(map(math.isfinite, ends))
        if not finite:
            both = left, right
            _copy_to(both, a, b)
            bad = ~(np.isfinite(left) & np.isfinite(right))
            left[bad] = right[bad] = 0.0
            ends = [float(end) for x in both for end in (x.min(), x.max())]
        np.subtract(both[1], both[0], out=gap)
        greatest = max(float(gap.max()), -float(gap.min()))
        return _Tile(*both, gap, max(map(abs, ends)), greatest, finite)

    def _sum_products(self, tile: _Tile) -> Any:
        """Add the five sums by column; return those by row, in fp64.

        With a difference `d = b - a`, they are the sums of `a*a`, `b*b`, `d*a`, `d*d` and `d`, in this order.
        """
        import numpy as np

        left, right, gap = tile.left, tile.right, tile.gap
        rows, columns = (np.empty((5, n), gap.dtype) for n in gap.shape)

        def add(at: int, x: Any, y: Any) -> None:
            np.matmul(x[:, None, :], y[:, :, None], out=rows[at, :, None, None])
            np.einsum("rc,rc->c", x, y, out=columns[at])

        add(0, left, left)
        add(2, gap, left)
        add(3, gap, gap)
        np.einsum("rc->r", gap, out=rows[4])
        np.add.reduce(gap, 0, out=columns[4])
        # b*b = a*a + 2*d*a + d*d: where the difference is small this is exact enough, and saves a product.
        is_small = float(columns[3].sum()) <= SMALL_GAP * float(columns[0].sum()) < math.inf
        if not is_small:
            add(1, right, right)
        rows, columns = rows.astype(np.float64), columns.astype(np.float64)
        if is_small:
            for sums in (rows, columns):
                np.maximum(sums[0] + 2 * sums[2] + sums[3], 0, out=sums[1])
        self.block.columns += torch.from_numpy(columns)
        return rows

    def _count_on_grids(self, a: Tensor, b: Tensor) -> None:
        """Count the entries that narrower dtypes represent."""
        import numpy as np

        runs = [view_bits(values).numpy().reshape(-1) for values in (a, b)]
        numel, segments = runs[0].size, runs[0].size // SEGMENT
        chosen = _choose_segments(segments) if segments > EXACT_SEGMENTS else None
        size = numel if chosen is None else len(chosen) * SEGMENT
        # A narrower dtype represents an entry if the last bits of its mantissa, which it lacks, are zero.
        low, masked = self._low[:, :size], self._masked[:, :size]
        for bits, part in zip(runs, low, strict=True):
            if chosen is None:
                np.copyto(part, bits, casting="unsafe")
            else:
                rows = bits[: segments * SEGMENT].reshape(segments, SEGMENT)
                np.copyto(part, np.take(rows, chosen, axis=0).reshape(-1), casting="unsafe")
        for counts, width in zip(self.block.on_grids, self.grids, strict=True):
            others = low if width == LOW_BITS else np.bitwise_and(low, (1 << width) - 1, out=masked)
            for run, part in enumerate(others):
                counts[run] += round((size - int(np.count_nonzero(part))) * numel / size)


@cache
def _choose_segments(segments: int) -> Any:
    """The numbers of an eighth of the segments, at random, as shards and samples repeat regularly."""
    import numpy as np

    count = max(EXACT_SEGMENTS, segments // 8)
    chosen = np.random.default_rng(segments).choice(segments, count, replace=False)
    return np.sort(chosen)


def _locate_row(loaded: _Tile, tile: tuple[slice, ...]) -> tuple[slice, ...]:
    """The row with the greatest difference of a tile."""
    import numpy as np

    gap = loaded.gap
    flat = int(gap.argmax())
    if gap.flat[flat] != loaded.greatest:
        flat = int(gap.argmin())
    at = np.unravel_index(flat // gap.shape[1], [s.stop - s.start for s in tile]) if tile else ()
    return tuple(slice(s.start + int(i), s.start + int(i) + 1) for s, i in zip(tile, at, strict=True))


def _copy_to(arrays: tuple[Any, Any], a: Tensor, b: Tensor) -> None:
    """Convert a tile of both; numpy has no bf16."""
    for array, values in zip(arrays, (a, b), strict=True):
        torch.from_numpy(array).copy_(values)


def has_grids(a: Tensor, b: Tensor) -> bool:
    """Whether entries that a narrower dtype represents are counted."""
    return a.dtype == b.dtype and a.dtype in GRID_DTYPES


def view_bits(values: Tensor) -> Tensor:
    """The bits of each entry, as an integer of its size."""
    return values.contiguous().view(INTEGER_VIEWS[values.itemsize])


def find_on_grid(values: Tensor, bits: int) -> Tensor:
    """Whether each entry is one that a narrower dtype represents.

    Args:
        values: of one of `GRID_DTYPES`.
        bits: the low bits that are zero in the narrower dtype.
    """
    return (view_bits(values) & ((1 << bits) - 1)) == 0
