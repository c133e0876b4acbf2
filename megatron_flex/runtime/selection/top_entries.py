"""The top entries with their indices, each encoded as one integer: a larger integer is selected first.

The upper half orders the values, the lower half prefers lower indices. No two integers are equal, the
selection
does not depend on how entries are distributed over ranks, and each candidate takes 8 bytes to send.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW_BITS = 0xFFFFFFFF
NAN_BITS = 0x7FC00000
NO_ENTRY = -(1 << 63)  # marks a missing entry


def is_rankable(dtype: torch.dtype) -> bool:
    """Whether values of this dtype fit into the upper half."""
    return not dtype.is_complex and dtype.itemsize <= 4


def select_candidates(local: Tensor, dim: int, entries: Tensor | None, count: int, largest: bool) -> Tensor:
    """The candidates of a rank.

    Args:
        local: its shard.
        dim: the dim along which entries are selected.
        entries: the indices of the shard's entries in the full tensor; None if they are the same.
        count: the number of candidates; a smaller shard is filled up with markers of missing entries.
        largest: whether to select the largest entries, which include NaN, or the smallest.
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


def select_top(
    candidates: Tensor, dim: int, k: int, largest: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The values and indices of the top k, from the candidates of all ranks."""
    keys = candidates.topk(k, dim).values
    return _restore_values(keys >> 32, largest, dtype), LOW_BITS - (keys & LOW_BITS)


def _order_values(values: Tensor, largest: bool) -> Tensor:
    """32-bit integers in the order of the values, as int64."""
    if values.dtype.is_floating_point:
        bits = (values.float() + 0.0).view(torch.int32)  # +0 and -0 are equal
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
