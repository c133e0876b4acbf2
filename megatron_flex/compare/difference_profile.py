"""Sums over two aligned tensors by entry of each dim, from which pooled tests are computed.

A bound on the greatest difference uses one entry. A shard, a head, a token or a feature has many: sums over
all entries that share one index of a dim find what is small in each entry and systematic over many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_flex.compare.block_sums import GRID_DTYPES, BlockSums, find_on_grid

SMALL_ROW = 0.25  # of the norm of an average row
GRID_CONTRAST = 0.01  # fractions on a grid that differ by less are not resolved by dim


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
        return self.sums[1]

    @property
    def squares_b(self) -> Tensor:
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
        total_a: of all; of a large block in which the two hardly differ, an estimate.
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

    def add(self, block_sums: BlockSums, a: Tensor, b: Tensor, places: Sequence[Tensor]) -> None:
        """Add a block.

        Args:
            block_sums: its sums.
            a: the block of A.
            b: the block of B.
            places: for each dim, the indices of the block's entries among `numbers`; dims that the block
                lacks come first, and have one.
        """
        self.count += block_sums.numel
        added = [*sum_by_dim(block_sums.rows, 1), block_sums.columns]
        all_entries = torch.tensor(block_sums.totals, dtype=torch.float64)[:, None]
        front = [all_entries] * (len(places) - len(added))
        for sums, where, part in zip(self.by_dim, places, [*front, *added], strict=True):
            count = torch.full((1, len(where)), block_sums.numel / len(where), dtype=torch.float64)
            sums.sums.index_add_(1, where, torch.cat([count, part]))
        squares, _, dots, gaps, _ = block_sums.rows.reshape(5, -1)
        self.row = max(self.row, _compute_greatest_row(squares, gaps))
        energies = _compute_energy_along(squares, dots)
        self.along += float(energies.sum())
        self.along_squares += float(energies.square().sum())
        if block_sums.on_grids:
            self._add_grids(block_sums.on_grids, a, b, places)

    def _add_grids(
        self, on_grids: Sequence[Sequence[int]], a: Tensor, b: Tensor, places: Sequence[Tensor]
    ) -> None:
        if not self.grids:
            for name, bits in GRID_DTYPES[a.dtype].items():
                totals_a, totals_b = ([torch.zeros_like(s.count) for s in self.by_dim] for _ in "ab")
                self.grids.append(GridCounts(name, bits, totals_a, totals_b))
        for grid, counts in zip(self.grids, on_grids, strict=True):
            resolved = abs(counts[0] - counts[1]) > GRID_CONTRAST * a.numel()
            exact = list(counts)
            for run, (totals, values) in enumerate(((grid.a, a), (grid.b, b)) if resolved else ()):
                entries = sum_by_dim(find_on_grid(values, grid.bits).double())
                exact[run] = int(entries[0].sum())
                counts_by_dim = [entries[0].sum().reshape(1)] * (len(places) - len(entries)) + entries
                for total, part, where in zip(totals, counts_by_dim, places, strict=True):
                    total.index_add_(0, where, part)
            grid.total_a, grid.total_b = grid.total_a + exact[0], grid.total_b + exact[1]

    # -- of all entries --------------------------------------------------------------------------------

    def total(self, name: str) -> float:
        """One of the sums over all entries: `squares_a`, `squares_b`, `dots`, `squares` or `total`."""
        return float(getattr(self.by_dim[0], name).sum()) if self.by_dim else 0.0

    @property
    def relative(self) -> float:
        """The norm of the difference over the greater of the two norms."""
        scale = max(self.total("squares_a"), self.total("squares_b"))
        return math.sqrt(self.total("squares") / scale) if scale > 0 else 0.0


def _compute_energy_along(squares: Tensor, dots: Tensor) -> Tensor:
    """The part of each row's difference that is a factor of the row: the square of its projection."""
    return (dots.square() / squares.clamp(min=1e-300)).where(squares > 0, 0.0)


def _compute_greatest_row(squares: Tensor, gaps: Tensor) -> float:
    """The greatest relative difference of one row; a small row's norm counts as a part of the average one."""
    if not squares.numel():
        return 0.0
    least = SMALL_ROW * SMALL_ROW * float(squares.mean())
    return math.sqrt(float((gaps / squares.clamp(min=max(least, 1e-300))).max()))


def sum_by_dim(values: Tensor, first: int = 0) -> list[Tensor]:
    """For each dim from `first` on the sums over the others from there."""
    dims = range(first, values.ndim)
    return [values.sum([d for d in dims if d != dim]) if len(dims) > 1 else values for dim in dims]
