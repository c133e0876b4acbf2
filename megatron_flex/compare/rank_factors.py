"""Whether a tensor is another one times a factor of each rank: a loss that its ranks weigh differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS
from megatron_flex.compare.shards import DimShares
from megatron_flex.compare.tensor_pairs import TensorPair

REST = 1e-4  # of the difference's energy, that the factors may leave
UNLIKE = 1e-3  # of two factors that are not the same
MAX_SAMPLES = 2  # whose factors are listed


def find_rank_factors(pair: TensorPair, shares_by_dim: Mapping[int, Sequence[DimShares]], most: int) -> str:
    """Whether, in each sample, B is A times one factor for each rank that shards the tokens.

    Args:
        pair: the tensor in both dumps.
        shares_by_dim: the shards, by dim.
        most: maximum bytes of a block.
    """
    place = pair.along(TOKEN_AXIS)
    if place is None:
        return ""
    for share in shares_by_dim.get(place, ()):
        holders = {number: coord for coord, part in enumerate(share.parts) for number in part}
        coords = torch.tensor([holders.get(number, -1) for number in pair.numbers[place]])
        if int(coords.min()) < 0:
            continue  # entries that no rank is known to hold
        factors = _fit(pair, place, coords, share.size, most)
        if factors is not None:
            return (
                f"B is A times a factor of its own in what each {share.axis} rank holds in {share.run}: "
                f"{_list(factors)}; the ranks weigh their tokens differently"
            )
    return ""


def _fit(pair: TensorPair, place: int, coords: Tensor, size: int, most: int) -> Tensor | None:
    """The factors, `[samples, ranks]`, if they explain the difference; NaN where A has nothing but zeros."""
    sample = pair.along(SAMPLE_AXIS)
    kept_dims = [d for d in (sample, place) if d is not None]
    reduced = [d for d in range(len(pair.dims)) if d not in kept_dims]
    samples = 1 if sample is None else pair.shape[sample]
    sums = torch.zeros(4, samples, size, dtype=torch.float64)
    for block, a, b in pair.blocks(most):
        left, right = a.double(), b.double()
        rows = slice(0, 1) if sample is None else block[sample]
        products = (left * left, left * right, right * right, (left != 0).double())
        for total, product in zip(sums, products, strict=True):
            by_token = product.sum(reduced) if reduced else product
            if sample is None:
                by_token = by_token[None]
            elif place < sample:
                by_token = by_token.T
            total[rows].index_add_(1, coords[block[place]], by_token)
    squares, dots, others, entries = sums
    used = squares > 0
    if int((entries > 0).sum()) * 2 > int(entries.sum()):
        return None  # a factor for each entry explains everything
    factors = torch.where(used, dots / squares, torch.nan)
    rest = torch.where(used, others - factors * dots, others).sum()
    difference = (squares - 2 * dots + others).sum()
    spread = [
        float(f.max() - f.min()) / float(f.abs().max()) for row in factors if (f := row[row == row]).numel()
    ]
    if float(rest) > REST * float(difference) or max(spread, default=0.0) < UNLIKE:
        return None
    return factors


def _list(factors: Tensor) -> str:
    rows = [", ".join(f"{v:.4g}" for v in row[~row.isnan()].tolist()) for row in factors[:MAX_SAMPLES]]
    more = " ..." if len(factors) > MAX_SAMPLES else ""
    return "; ".join(f"{row} in sample {n}" for n, row in enumerate(rows)) + more
