"""The difference of two tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two tensors of the same shape.

    Attributes:
        error: the greater of `relative` and `peak`; for integers the fraction of entries that differ.
        relative: the norm of the difference over the greater of the two norms.
        peak: the greatest difference over the greatest entry.
        index: the index of the greatest difference.
        here: the Megatron value there.
        there: the Hugging Face value there.
    """

    error: float
    relative: float = 0.0
    peak: float = 0.0
    index: tuple[int, ...] = ()
    here: float = 0.0
    there: float = 0.0


EQUAL = Difference(0.0)
DIFFERENT = float("inf")  # the error of tensors of different shapes, or with entries that are no numbers
BLOCK = 1 << 16  # entries that are compared at once
SMALLEST, GREATEST = 1e-12, 1e15  # magnitudes whose squares, and those of their round-off, fit into fp32


def measure(here: Tensor, there: Tensor) -> Difference:
    """The difference of two tensors.

    The tensors are read once, in blocks that stay in the processor's cache. Equal ones are found before.

    Args:
        here: Megatron's.
        there: Hugging Face's, with the same axes.
    """
    if here.shape != there.shape:
        return Difference(DIFFERENT)
    if not here.numel():
        return EQUAL
    if not here.is_floating_point():
        wrong = here != there.to(here.dtype)
        place = _index(int(wrong.int().argmax()), here.shape)
        fraction = float(wrong.float().mean())
        return Difference(fraction, fraction, fraction, place, float(here[place]), float(there[place]))
    if here.dtype == there.dtype and torch.equal(here, there) and math.isfinite(float(here.sum())):
        return EQUAL
    squares, norms, peak, greatest = 0.0, (0.0, 0.0), 0.0, 0.0
    at, around = 0, torch.zeros(1)  # the block of the greatest difference
    for start, a, b in _blocks(here, there):
        difference = a - b
        worst, high = _peak(difference), max(_peak(a), _peak(b))
        if not math.isfinite(worst):  # also where an entry of one of them is not finite
            at = start + int(difference.isfinite().logical_not().int().argmax())
            place = _index(at, here.shape)
            return Difference(DIFFERENT, DIFFERENT, DIFFERENT, place, float(here[place]), float(there[place]))
        if not SMALLEST < high < GREATEST:  # their squares in fp32 are 0 or infinite
            a, b, difference = a.double(), b.double(), difference.double()
        squares += float(difference.dot(difference))
        norms = norms[0] + float(a.dot(a)), norms[1] + float(b.dot(b))
        peak = max(peak, high)
        if worst > greatest:
            greatest, at, around = worst, start, difference
    if not peak:
        return EQUAL
    place = _index(at + int(around.abs().argmax()), here.shape)
    relative, share = math.sqrt(squares / max(norms)), greatest / peak
    return Difference(max(relative, share), relative, share, place, float(here[place]), float(there[place]))


def _blocks(here: Tensor, there: Tensor, start: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Both tensors in blocks, each with the number of its first entry, flat and in fp32 or fp64."""
    if here.numel() <= BLOCK or here.ndim == 0:
        wide = torch.float64 if torch.float64 in (here.dtype, there.dtype) else torch.float32
        yield start, here.reshape(-1).to(wide), there.reshape(-1).to(wide)
        return
    row = here.numel() // len(here)
    if row > BLOCK:
        for number, (a, b) in enumerate(zip(here, there, strict=True)):
            yield from _blocks(a, b, start + number * row)
        return
    rows = BLOCK // row
    for number, (a, b) in enumerate(zip(here.split(rows), there.split(rows), strict=True)):
        yield from _blocks(a, b, start + number * rows * row)


def _peak(block: Tensor) -> float:
    """The greatest absolute value; NaN if there is one."""
    low, high = torch.aminmax(block)
    return max(-float(low), float(high))


def _index(number: int, shape: torch.Size) -> tuple[int, ...]:
    """The index of an entry, by its number in the order of the rows."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(number), shape))
