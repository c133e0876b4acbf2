"""Sums over two aligned tensors by entry of each dim, from which pooled tests are computed.

A bound on the greatest difference uses one entry. A shard, a head, a token or a feature has many: sums over
all entries that share one index of a dim find what is small in each entry and systematic over many.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

MICROBATCH = "microbatch"
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
SMALL_ROW = 0.25  # of the norm of an average row
GRID_CONTRAST = 0.01  # fractions on a grid that differ by less are not resolved by dim


def split_into_tiles(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Split a block into tiles that fit into the CPU's cache, along all dims but the last.

    Sums over a large block would move each of a dozen intermediate results to memory and back.
    """
    if math.prod(shape) == 0:
        return
    inner, steps = shape[-1] if shape else 1, [1] * (len(shape) - 1)
    for dim in reversed(range(len(shape) - 1)):
        steps[dim] = max(1, min(shape[dim], TILE_ENTRIES // inner))
        inner *= steps[dim]
    for starts in product(*(range(0, n, step) for n, step in zip(shape, steps, strict=False))):
        yield tuple(slice(s, min(s + step, n)) for s, step, n in zip(starts, steps, shape, strict=False))


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
    return values.numel() - _count_nonzero(_view_bits(values).numpy() & ((1 << bits) - 1))


def _view_bits(values: Tensor) -> Tensor:
    return values.contiguous().view(INTEGER_VIEWS[values.itemsize])


def _count_differing(a: Tensor, b: Tensor) -> int:
    if a.dtype == b.dtype and a.dtype in COUNTED_BY_NUMPY:
        return _count_nonzero(a.numpy() != b.numpy())
    return int(torch.count_nonzero(a.double() != b.double()))


def _count_nonzero(values: Any) -> int:
    """Of an array of numpy's, which counts several times as fast as torch."""
    import numpy as np

    return int(np.count_nonzero(values))


@dataclass(slots=True)
class BlockSums:
    """What the tests need of all tiles of a block together.

    Attributes:
        rows: `[5, rows]` of each tile, as in `TileSums`.
        on_grids: of each tile, as in `TileSums`.
    """

    rows: list[Tensor] = field(default_factory=list)
    on_grids: list[tuple[tuple[int, int], ...]] = field(default_factory=list)


@dataclass(slots=True)
class DimSums:
    """Sums by entry of one dim, over all others; the difference is B minus A.

    Attributes:
        dim: the name of the dim.
        numbers: the numbers of its entries: samples, token positions, features.
        sums: `[6, entries]`, the sums that the properties name, in their order.
    """

    dim: str
    numbers: tuple[int, ...]
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(6, len(self.numbers), dtype=torch.float64)

    @property
    def count(self) -> Tensor:
        """Compared entries."""
        return self.sums[0]

    @property
    def squares_a(self) -> Tensor:
        """The squares of A."""
        return self.sums[1]

    @property
    def squares_b(self) -> Tensor:
        """The squares of B."""
        return self.sums[2]

    @property
    def dots(self) -> Tensor:
        """The products of the difference and A."""
        return self.sums[3]

    @property
    def squares(self) -> Tensor:
        """The squares of the difference."""
        return self.sums[4]

    @property
    def total(self) -> Tensor:
        """The difference itself."""
        return self.sums[5]


@dataclass(slots=True)
class GridCounts:
    """Entries of both runs that a narrower dtype represents exactly, by entry of each dim.

    Attributes:
        name: the narrower dtype.
        bits: the low bits of the mantissa that are zero in it.
        a: by dim, of A.
        b: by dim, of B.
        total_a: of all.
        total_b: likewise.
    """

    name: str
    bits: int
    a: list[Tensor]
    b: list[Tensor]
    total_a: int = 0
    total_b: int = 0


@dataclass(slots=True)
class DifferenceProfile:
    """The sums of one compared tensor, by entry of each of its dims.

    Args:
        dims: the names of the dims; with several microbatches that have no samples, `microbatch` first.
        numbers: for each dim, the numbers of its entries.

    Attributes:
        along: the energy of the difference along A, of each row of the last dim by itself.
        along_squares: the sum of the squares of these rows' energies.
        row: the greatest relative difference of one row, of those that are not far smaller than the others.
    """

    dims: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]
    by_dim: list[DimSums] = field(init=False)
    grids: list[GridCounts] = field(default_factory=list, init=False)
    count: int = field(default=0, init=False)
    along: float = field(default=0.0, init=False)
    along_squares: float = field(default=0.0, init=False)
    row: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.by_dim = [DimSums(dim, known) for dim, known in zip(self.dims, self.numbers, strict=True)]

    def add(self, a: Tensor, b: Tensor, places: Sequence[Tensor]) -> None:
        """Add a block of both.

        Args:
            a: entries of A; a dim for each of `dims`.
            b: the same block of B.
            places: for each dim, the indices of the block's entries among `numbers`.
        """
        block = BlockSums()
        for part, tile in sum_tiles(a, b):
            self.add_tile(tile, [*(w[p] for w, p in zip(places, part, strict=False)), places[-1]], block)
        self.finish_block(block, a, b, places)

    def add_tile(self, tile: TileSums, places: Sequence[Tensor], block: BlockSums) -> None:
        """Add a tile of a block. `finish_block` follows the block's last one.

        Args:
            tile: its sums.
            places: for each dim, the indices of its entries among `numbers`; of dims that the tile lacks one.
            block: receives what is needed of all tiles of the block together.
        """
        self.count += tile.numel
        found = [*_sum_rows(tile.rows), tile.columns]
        front = [torch.tensor(tile.totals, dtype=torch.float64)[:, None]] * (len(places) - len(found))
        for sums, where, part in zip(self.by_dim, places, [*front, *found], strict=True):
            count = torch.full((1, len(where)), tile.numel / max(len(where), 1), dtype=torch.float64)
            sums.sums.index_add_(1, where, torch.cat([count, part]))
        block.rows.append(tile.rows.reshape(len(tile.rows), -1))
        block.on_grids.append(tile.on_grids)

    def finish_block(self, block: BlockSums, a: Tensor, b: Tensor, places: Sequence[Tensor]) -> None:
        """Add what is found of a complete block.

        Args:
            block: of its tiles.
            a: the block of A.
            b: the block of B.
            places: as in `add_tile`, of the block's entries.
        """
        if not block.rows:
            return
        squares, _, dots, gaps, _ = torch.cat(block.rows, 1)
        self.row = max(self.row, _compute_greatest_row(squares, gaps))
        energies = _compute_energy_along(squares, dots)
        self.along += float(energies.sum())
        self.along_squares += float(energies.square().sum())
        if has_grids(a, b):
            self._add_grids(block, a, b, places)

    def _add_grids(self, block: BlockSums, a: Tensor, b: Tensor, places: Sequence[Tensor]) -> None:
        if not self.grids:
            for name, bits in GRID_DTYPES[a.dtype].items():
                one, two = ([torch.zeros_like(s.count) for s in self.by_dim] for _ in "ab")
                self.grids.append(GridCounts(name, bits, one, two))
        for grid, tiles in zip(self.grids, zip(*block.on_grids, strict=True), strict=True):
            counts = [sum(run) for run in zip(*tiles, strict=True)]
            grid.total_a, grid.total_b = grid.total_a + counts[0], grid.total_b + counts[1]
            if abs(counts[0] - counts[1]) <= GRID_CONTRAST * a.numel():
                continue
            for totals, values in ((grid.a, a), (grid.b, b)):
                entries = sum_by_dim((_view_bits(values) & ((1 << grid.bits) - 1)).eq(0).double())
                found = [entries[0].sum().reshape(1)] * (len(places) - len(entries)) + entries
                for total, part, where in zip(totals, found, places, strict=True):
                    total.index_add_(0, where, part)

    # -- of all entries --------------------------------------------------------------------------------

    def total(self, name: str) -> float:
        """One of the sums over all entries: `squares_a`, `squares_b`, `dots`, `squares` or `total`."""
        return float(getattr(self.by_dim[0], name).sum()) if self.by_dim else 0.0

    @property
    def relative(self) -> float:
        """The norm of the difference over the greater of the two norms."""
        scale = max(self.total("squares_a"), self.total("squares_b"))
        return math.sqrt(self.total("squares") / scale) if scale > 0 else 0.0

    def of(self, dim: str) -> DimSums | None:
        """The sums of a dim, by name."""
        return next((s for s in self.by_dim if s.dim == dim), None)


def _compute_energy_along(squares: Tensor, dots: Tensor) -> Tensor:
    """The part of each row's difference that is a factor of the row: the square of its projection."""
    return (dots.square() / squares.clamp(min=1e-300)).where(squares > 0, 0.0)


def _compute_greatest_row(squares: Tensor, gaps: Tensor) -> float:
    """The greatest relative difference of one row; a small row's norm counts as a part of the average one."""
    if not squares.numel():
        return 0.0
    least = SMALL_ROW * SMALL_ROW * float(squares.mean())
    return math.sqrt(float((gaps / squares.clamp(min=max(least, 1e-300))).max()))


def _sum_rows(rows: Tensor) -> list[Tensor]:
    """For each dim of a tile but the last the five sums over the others."""
    dims = range(1, rows.ndim)
    return [rows.sum([d for d in dims if d != dim]) if rows.ndim > 2 else rows for dim in dims]


def sum_by_dim(values: Tensor) -> list[Tensor]:
    """For each dim the sums over all others."""
    out: list[Tensor] = []
    while values.ndim > 1:
        out.append(values.flatten(0, -2).sum(0))
        values = values.sum(-1)
    return [values.reshape(-1), *reversed(out)]
