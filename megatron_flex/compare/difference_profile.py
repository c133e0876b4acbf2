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

MICROBATCH = "microbatch"
GRID_DTYPES = {  # low bits of the mantissa that are zero where a value is representable in a narrower dtype
    torch.float32: {"bf16": 16, "fp16 or tf32": 13, "fewer than 21 bits of mantissa": 4},
    torch.bfloat16: {"fp8 e4m3": 4, "fewer than 6 bits of mantissa": 3},
    torch.float16: {"fp8 e4m3": 7, "fewer than 8 bits of mantissa": 4},
}
INTEGER_VIEWS = {4: torch.int32, 2: torch.int16}
SMALL_ROW = 0.25  # of the norm of an average row
GRID_CONTRAST = 0.01  # fractions on a grid that differ by less are not resolved by dim


@dataclass(slots=True)
class DimSums:
    """Sums by entry of one dim, over all others; the difference is B minus A.

    Attributes:
        dim: the name of the dim.
        numbers: the numbers of its entries: samples, token positions, features.
        count: compared entries.
        squares_a: of A.
        squares_b: of B.
        dots: of the difference and A.
        squares: of the difference.
        total: of the difference itself.
    """

    dim: str
    numbers: tuple[int, ...]
    count: Tensor
    squares_a: Tensor
    squares_b: Tensor
    dots: Tensor
    squares: Tensor
    total: Tensor

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """All of them, in the order in which they are added."""
        return self.count, self.squares_a, self.squares_b, self.dots, self.squares, self.total


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
        def zeros(length: int) -> Tensor:
            return torch.zeros(length, dtype=torch.float64)

        self.by_dim = [
            DimSums(dim, known, *(zeros(len(known)) for _ in range(6)))
            for dim, known in zip(self.dims, self.numbers, strict=True)
        ]

    def add(self, a: Tensor, b: Tensor, places: Sequence[Tensor]) -> None:
        """Add a block of both.

        Args:
            a: finite entries of A; a dim for each of `dims`.
            b: the same block of B.
            places: for each dim, the indices of the block's entries among `numbers`, fp64 as they are read.
        """
        left, right = a.double(), b.double()
        if not (left.isfinite().all() and right.isfinite().all()):
            finite = left.isfinite() & right.isfinite()
            left, right = left.where(finite, 0.0), right.where(finite, 0.0)
        gap = right - left
        parts = (left.square(), right.square(), gap * left, gap.square(), gap)
        found = [sum_by_dim(part) for part in parts]
        squares, dots, gaps = (part.sum(-1) for part in (parts[0], parts[2], parts[3]))
        self.row = max(self.row, _compute_greatest_row(squares, gaps))
        energies = _compute_energy_along(squares, dots)
        self.along += float(energies.sum())
        self.along_squares += float(energies.square().sum())
        self.count += left.numel()
        for at, (sums, where) in enumerate(zip(self.by_dim, places, strict=True)):
            sums.count.index_add_(
                0, where, torch.full((len(where),), left.numel() / max(len(where), 1), dtype=torch.float64)
            )
            for total, part in zip(sums.sums[1:], found, strict=True):
                total.index_add_(0, where, part[at])
        self._add_grids(a, b, places)

    def _add_grids(self, a: Tensor, b: Tensor, places: Sequence[Tensor]) -> None:
        if a.dtype != b.dtype or a.dtype not in GRID_DTYPES:
            return
        if not self.grids:
            for name, bits in GRID_DTYPES[a.dtype].items():
                one, two = ([torch.zeros_like(s.count) for s in self.by_dim] for _ in "ab")
                self.grids.append(GridCounts(name, bits, one, two))
        for grid in self.grids:
            low = (1 << grid.bits) - 1
            fine = tuple((t.contiguous().view(INTEGER_VIEWS[t.itemsize]) & low) == 0 for t in (a, b))
            counts = int(fine[0].sum()), int(fine[1].sum())
            grid.total_a, grid.total_b = grid.total_a + counts[0], grid.total_b + counts[1]
            if abs(counts[0] - counts[1]) <= GRID_CONTRAST * a.numel():
                continue
            for totals, entries in zip((grid.a, grid.b), fine, strict=True):
                for total, part, where in zip(totals, sum_by_dim(entries.double()), places, strict=True):
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


def sum_by_dim(values: Tensor) -> list[Tensor]:
    """For each dim the sums over all others."""
    out: list[Tensor] = []
    while values.ndim > 1:
        out.append(values.flatten(0, -2).sum(0))
        values = values.sum(-1)
    return [values.reshape(-1), *reversed(out)]
