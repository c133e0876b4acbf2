"""The difference of two tensors, and how far they may differ in two precisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.compare.compared_dump import GRADIENT, PARAMETER_GRADIENT, VALUE, ComparedTensor
from megatron_flex.compare.tolerance import Precision, ReductionDepths, derive_tolerance

__all__ = ["GRADIENT", "PARAMETER_GRADIENT", "VALUE", "Difference", "SiteTolerances", "measure"]


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
    """The difference of two tensors.

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
        place = _place(wrong.int())
        fraction = float(wrong.float().mean())
        return Difference(fraction, fraction, fraction, place, float(here[place]), float(there[place]))
    a, b = here.double(), there.double()
    difference = (a - b).abs()
    if not bool(difference.isfinite().all()):
        place = _place((~difference.isfinite()).int())
        return Difference(DIFFERENT, DIFFERENT, DIFFERENT, place, float(a[place]), float(b[place]))
    norm, peak = max(float(a.norm()), float(b.norm())), max(float(a.abs().max()), float(b.abs().max()))
    if not peak:
        return EQUAL
    place = _place(difference)
    relative, worst = float(difference.norm()) / norm, float(difference[place]) / peak
    return Difference(max(relative, worst), relative, worst, place, float(a[place]), float(b[place]))


def _place(tensor: Tensor) -> tuple[int, ...]:
    """The index of the greatest entry."""
    return tuple(int(i) for i in torch.unravel_index(tensor.argmax(), tensor.shape))


class SiteTolerances:
    """How far correct models may differ at each site.

    Args:
        sites: the sites in the order of execution.
        precisions: of the Megatron model and of the Hugging Face model.
        given: a tolerance for all sites; None: from dtype and depth.
    """

    def __init__(
        self, sites: Sequence[str], precisions: Sequence[Precision], given: float | None = None
    ) -> None:
        self._precisions, self._given = precisions, given
        self._depths = ReductionDepths(list(sites), max(p.layers for p in precisions))

    def of(
        self, site: str, dtypes: Sequence[torch.dtype], kind: str = VALUE, isolated: bool = False
    ) -> float:
        """The tolerance of a site.

        Args:
            site: the site or parameter.
            dtypes: of the two tensors.
            kind: `value`, `gradient` or `parameter_gradient`.
            isolated: whether only the layer of the site was computed by both.
        """
        if self._given is not None:
            return self._given
        item = ComparedTensor(site, kind)
        depth = self._depths.of(item)
        if isolated:
            depth = min(depth, self._depths.forward("decoder.layers.0:output"))
        return derive_tolerance(item, depth, self._precisions, dtypes, 0)
