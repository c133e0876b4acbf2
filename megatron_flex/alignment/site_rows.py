"""The difference of the two tensors of a site, as a row of a comparison: A is Megatron, B is Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_flex.alignment.alignment_result import SiteVerdict
from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.comparison import Row, Worst, make_row
from megatron_flex.compare.noise_scale import SoftmaxNoise
from megatron_flex.compare.table_of_tests import Bounds, Conditions, run_tests
from megatron_flex.compare.tensor_pairs import DifferenceSums, locate_entry, sum_tensors
from megatron_flex.compare.tolerance import Tolerances
from megatron_flex.dump import VALUE

Dtypes = tuple[torch.dtype, torch.dtype]


def sum_site(megatron: Tensor, hf: Tensor) -> DifferenceSums:
    """Sums over the two tensors of a site. Other shapes, and entries that are not finite, are broken.

    Args:
        megatron: Megatron's.
        hf: Hugging Face's, with the same axes.
    """
    if megatron.shape != hf.shape:
        count = max(hf.numel(), 1)
        return DifferenceSums(count, differing=count, broken=count, greatest=math.inf)
    megatron, hf = megatron.detach().cpu(), hf.detach().cpu()
    sums = sum_tensors(megatron, hf)
    if sums.finite == sums.count:
        return sums
    finite = megatron.isfinite() & hf.isfinite()
    at = locate_entry(int(finite.int().argmin()), megatron.shape)
    values, broken = (float(megatron[at]), float(hf[at])), sums.count - sums.finite
    return replace(sums, differing=max(sums.differing, broken), broken=broken, worst=at, values=values)


def hold_to(bound: float, item: ComparedTensor, sums: DifferenceSums) -> Row:
    """The row of a site, whose norm and peak are held to one bound."""
    (outcome,) = run_tests(Conditions(item, Bounds(bound, bound, is_given=True), sums, sums))
    return make_row(
        item, sums, outcome, Worst(0, None, None, sums.worst, *sums.values), floors=(bound, bound)
    )


def make_rows(
    tolerances: Tolerances,
    sums: Mapping[str, DifferenceSums],
    dtypes: Mapping[str, Dtypes],
    layers: Mapping[str, int | None],
    isolated: bool,
) -> dict[str, Row]:
    """The row of each site, held to its tolerance and to what attention scores before it explain.

    Args:
        tolerances: from dtype and depth.
        sums: by site, in the order of execution.
        dtypes: of both tensors of each site.
        layers: of the sites; None outside of layers.
        isolated: whether each layer has its own input, so that nothing carries over to the next one.
    """
    out: dict[str, Row] = {}
    softmax, layer = SoftmaxNoise(), None
    for site, site_sums in sums.items():
        if isolated and layers[site] != layer:
            softmax = SoftmaxNoise()
        item, layer = ComparedTensor(site, VALUE), layers[site]
        row = out[site] = hold_to(
            tolerances.bound(item, dtypes[site], isolated, softmax.later), item, site_sums
        )
        if not row.diverges:
            softmax.observe(item, row.error, row.max_abs)
    return out


def make_verdict(
    other: str,
    part: str,
    shape: Sequence[int],
    dtypes: Dtypes,
    accumulated: Row,
    isolated: Row | None = None,
) -> SiteVerdict:
    """The verdict of a site.

    Args:
        other: the Hugging Face points.
        part: the part of the model.
        shape: of the compared tensors.
        dtypes: of both tensors, Megatron's first.
        accumulated: the row as the models run.
        isolated: the row with equal layer inputs.
    """
    names = str(dtypes[0]).removeprefix("torch."), str(dtypes[1]).removeprefix("torch.")
    return SiteVerdict(accumulated.name, other, part, accumulated, isolated, tuple(shape), names)
