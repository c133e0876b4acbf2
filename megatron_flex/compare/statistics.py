"""What is known of two tensors' difference, block by block: they are never in memory as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

COMPARE_BLOCK = 64 << 20  # bytes of one block of one tensor, in fp64


def split_into_blocks(shape: Sequence[int], most: int = COMPARE_BLOCK) -> Iterator[tuple[slice, ...]]:
    """Cut a shape into blocks of at most `most` bytes in fp64, along its first dims.

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


@dataclass(slots=True)
class DifferenceSums:
    """Sums over the pairs of entries that were added.

    Attributes:
        count: of pairs.
        differing: of them, how many are not equal. Two NaNs are.
        broken: pairs of which one is a NaN or infinite, and the other is not the same.
        worst: index of the greatest difference; the first broken pair if there is one.
        values: the two entries there.
        discrete: whether entries are numbers of something, which round-off does not touch.
    """

    count: int = 0
    differing: int = 0
    broken: int = 0
    squares_a: float = 0.0
    squares_b: float = 0.0
    dots: float = 0.0
    squares: float = 0.0
    greatest: float = 0.0
    peak: float = 0.0
    worst: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)
    discrete: bool = False
    _found: bool = field(default=False, repr=False)

    def add(self, a: Tensor, b: Tensor, start: Sequence[int] = ()) -> None:
        """Add a block of both.

        Args:
            a: of the one.
            b: of the other, of the same shape.
            start: where the block begins in the whole; its entries' indices count from there.
        """
        self.discrete = not (a.is_floating_point() and b.is_floating_point())
        left, right = a.to(torch.float64), b.to(torch.float64)
        different = (left != right) & ~(left.isnan() & right.isnan())
        finite = left.isfinite() & right.isfinite()
        broken = different & ~finite
        self.count += left.numel()
        self.differing += int(different.sum())
        if not finite.all():
            left, right = left.where(finite, 0.0), right.where(finite, 0.0)
        distance = (left - right).abs()
        self.squares_a += float(left.square().sum())
        self.squares_b += float(right.square().sum())
        self.dots += float((left * right).sum())
        self.squares += float(distance.square().sum())
        if left.numel():
            self.peak = max(self.peak, float(left.abs().max()), float(right.abs().max()))
            self._note_worst(a, b, distance, broken, start)
        self.broken += int(broken.sum())

    def _note_worst(
        self, a: Tensor, b: Tensor, distance: Tensor, broken: Tensor, start: Sequence[int]
    ) -> None:
        if self.broken:
            return
        has_broken = bool(broken.any())
        flat = int((broken.int() if has_broken else distance).argmax())
        found = float(distance.reshape(-1)[flat])
        if has_broken or found > self.greatest or not self._found:
            at = [int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape)]
            self.worst = tuple(i + s for i, s in zip(at, start, strict=True)) if start else tuple(at)
            self.values = float(a.reshape(-1)[flat]), float(b.reshape(-1)[flat])
            self._found = True
        self.greatest = math.inf if has_broken else max(self.greatest, found)

    @property
    def equal(self) -> bool:
        """Whether no pair differs."""
        return self.differing == 0

    @property
    def relative(self) -> float:
        """The norm of the difference over the greater of the two norms; infinite with a NaN in one only."""
        if self.broken:
            return math.inf
        scale = math.sqrt(max(self.squares_a, self.squares_b))
        return math.sqrt(self.squares) / scale if scale else 0.0

    @property
    def cosine(self) -> float:
        """Of the angle between the two; 1 for two of zeros, 0 if one of them is."""
        if self.broken:
            return math.nan
        scale = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        if scale:
            return max(-1.0, min(1.0, self.dots / scale))
        return 1.0 if self.equal else 0.0

    @property
    def error(self) -> float:
        """What tolerances bound: the greater of the relative error and the greatest difference over the peak.

        Of numbers of something, the part that differs.
        """
        if self.discrete:
            return self.differing / self.count if self.count else 0.0
        if self.broken:
            return math.inf
        return max(self.relative, self.greatest / self.peak if self.peak else 0.0)
