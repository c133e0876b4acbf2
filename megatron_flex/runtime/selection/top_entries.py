"""The greatest entries, with where they are: each as one number that is greater the earlier it is chosen.

The upper half orders values, the lower half puts lower indices first. So no two are equal, the choice does
not depend on how entries lie on ranks, and 8 bytes of each candidate are sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW_BITS = 0xFFFFFFFF
NAN_BITS = 0x7FC00000
NO_ENTRY = -(1 << 63)  # of an entry that is not there


def is_rankable(dtype: torch.dtype) -> bool:
    """Whether values of this dtype fit into the upper half."""
    return not dtype.is_complex and dtype.itemsize <= 4


def select_candidates(local: Tensor, dim: int, entries: Tensor | None, count: int, largest: bool) -> Tensor:
    """The candidates of a rank.

    Args:
        local: its part.
        dim: the dim along which one chooses.
        entries: where the part's entries are in the whole; None if as they lie.
        count: how many candidates; where the part has fewer, there are some that stand for nothing.
        largest: whether the greatest are wanted, of which NaN is one, or the smallest.
    """
    shape = [1] * local.ndim
    shape[dim] = local.shape[dim]
    places = torch.arange(local.shape[dim], device=local.device) if entries is None else entries
    keys = (_order_values(local, largest) << 32) | (LOW_BITS - places.view(shape))
    keys = keys.topk(min(count, local.shape[dim]), dim).values
    missing = count - keys.shape[dim]
    if missing:
        shape = list(keys.shape)
        shape[dim] = missing
        keys = torch.cat([keys, keys.new_full(shape, NO_ENTRY)], dim)
    return keys


def select_top(candidates: Tensor, dim: int, k: int, largest: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and indices of the first k, from the candidates of all ranks."""
    keys = candidates.topk(k, dim).values
    return _restore_values(keys >> 32, largest, dtype), LOW_BITS - (keys & LOW_BITS)


def _order_values(values: Tensor, largest: bool) -> Tensor:
    """Whole numbers of 32 bits in the order of the values, as int64."""
    if values.dtype.is_floating_point:
        bits = (values.float() + 0.0).view(torch.int32)  # a zero of either sign is one value
        bits = torch.where(values.isnan(), NAN_BITS, bits)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = values.to(torch.int32)
    return (bits if largest else ~bits).long()


def _restore_values(ordered: Tensor, largest: bool, dtype: torch.dtype) -> Tensor:
    bits = ordered.to(torch.int32)
    bits = bits if largest else ~bits
    if not dtype.is_floating_point:
        return bits.to(dtype)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32).to(dtype)
