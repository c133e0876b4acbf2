"""The difference of two tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.compare.tensor_pairs import locate_entry, sum_tensors


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


def measure(here: Tensor, there: Tensor) -> Difference:
    """The difference of two tensors. Equal ones are found before sums are computed.

    Args:
        here: Megatron's.
        there: Hugging Face's, with the same axes.
    """
    if here.shape != there.shape:
        return Difference(DIFFERENT)
    here, there = here.detach().cpu(), there.detach().cpu()
    if here.dtype == there.dtype and torch.equal(here, there) and math.isfinite(float(here.sum())):
        return EQUAL
    sums = sum_tensors(here, there)
    place, values = sums.worst, sums.values
    if sums.finite < sums.count:  # also where both have the same entry that is not finite
        bad = (here.isfinite() & there.isfinite()).logical_not()
        place = locate_entry(int(bad.int().argmax()), here.shape)
        return Difference(DIFFERENT, DIFFERENT, DIFFERENT, place, float(here[place]), float(there[place]))
    peak = sums.error if sums.discrete else sums.peak_share
    return Difference(sums.error, sums.error if sums.discrete else sums.relative, peak, place, *values)
