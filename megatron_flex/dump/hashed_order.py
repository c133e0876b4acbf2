"""Random orders by a hash that is part of the format, so that no release of torch changes them.

All numbers are unsigned and of 64 bits; sums and products are taken modulo 2**64. `mix` is the finalizer of
SplitMix64:

    mix(z): z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB
            return z ^ (z >> 31)

A stream is chosen by some integers: `state = 0`, and for each of them, modulo 2**64, in order,
`state = mix((state ^ number) + 0x9E3779B97F4A7C15)`. The rank of entry `i` of the stream, counted from 0, is
`mix(state + (i + 1) * 0x9E3779B97F4A7C15)`: output `i` of SplitMix64 that begins at `state`. No two entries
of a stream have the same rank, as `mix` is a bijection.

The order of a stream lists its entries by ascending rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

METHOD = "splitmix64"  # what settings of a dump say of positions that were drawn so
WORD = (1 << 64) - 1
INCREMENT, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BLOCK_ENTRIES = 1 << 17  # ranks that are computed together: they stay in a core's cache


def choose_stream(*numbers: int) -> int:
    """The state of the stream of some integers.

    Examples:
        >>> from megatron_flex.dump.hashed_order import choose_stream
        >>> hex(choose_stream(0, 0, 0))
        '0x238275bc38fcbe91'
    """
    state = 0
    for number in numbers:
        z = ((state ^ (int(number) & WORD)) + INCREMENT) & WORD  # a number of numpy would overflow
        z = ((z ^ (z >> 30)) * FIRST_FACTOR) & WORD
        z = ((z ^ (z >> 27)) * SECOND_FACTOR) & WORD
        state = z ^ (z >> 31)
    return state


def draw_positions(count: int, length: int, seed: int, iteration: int, samples: Sequence[int]) -> Tensor:
    """The positions that are kept of each of some samples: the `count` of lowest rank, in ascending order.

    A sample has the stream of `seed`, `iteration` and its number in the global batch; its entries are its
    positions.

    Args:
        count: the number of positions to keep.
        length: the number of positions; all of them are kept if there are no more than `count`.
        seed: of the settings.
        iteration: the iteration.
        samples: the numbers of the samples.

    Returns:
        The positions, `[samples, positions]`.

    Examples:
        >>> from megatron_flex.dump.hashed_order import draw_positions
        >>> draw_positions(4, 16, 0, 0, [0, 1]).tolist()
        [[0, 1, 8, 9], [1, 5, 9, 10]]
    """
    if length <= count:
        return torch.arange(length).repeat(len(samples), 1)
    common = _to_signed(choose_stream(seed, iteration))
    states = _mix((torch.tensor(list(samples), dtype=torch.int64) ^ common) + _to_signed(INCREMENT))
    rows = max(BLOCK_ENTRIES // length, 1)
    drawn = torch.empty(len(states), count, dtype=torch.int64)
    for first in range(0, len(states), rows):
        ranks = _rank_entries(states[first : first + rows, None], length)
        lowest = ranks.topk(count, dim=1, largest=False, sorted=False).indices
        drawn[first : first + rows] = lowest.sort(dim=1).values
    return drawn


def order_entries(length: int, *numbers: int) -> Tensor:
    """The entries of a stream in its order.

    Args:
        length: the number of entries.
        numbers: what chooses the stream.

    Examples:
        >>> from megatron_flex.dump.hashed_order import order_entries
        >>> order_entries(6, 0, 1).tolist()
        [0, 4, 3, 2, 1, 5]
    """
    return _rank_entries(torch.tensor(_to_signed(choose_stream(*numbers))), length).argsort()


def _to_signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _rank_entries(states: Tensor, length: int) -> Tensor:
    """Ranks of the entries of streams, less 2**63, so that they compare as signed numbers do."""
    return _mix(torch.arange(1, length + 1) * _to_signed(INCREMENT) + states).bitwise_xor_(-(1 << 63))


def _mix(z: Tensor) -> Tensor:
    """`mix` of each entry, in place; torch wraps products of integers, and shifts their sign to the right."""
    shifted = torch.empty_like(z)
    for bits, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR), (31, 1)):
        torch.bitwise_right_shift(z, bits, out=shifted)
        z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1)).mul_(_to_signed(factor))
    return z
