"""Rearrangements of rows: how one tensor of Megatron is made of tensors of Hugging Face, on a single device.

A rearrangement is written once, as a function that joins the rows of some tensors. It is run on row numbers
instead of weights, which gives the origin of every row. Both directions of a conversion follow from that, and
so does the part of a file that a rank reads: the rows that its shard holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.errors import LayoutError

MAX_REMEMBERED_ROWS = 256  # cached origins of rows; layers of a model share one


class Heads(NamedTuple):
    """The heads of an attention layer, which some rearrangements depend on.

    Attributes:
        queries: the number of query heads.
        groups: the number of key and value heads.

    Examples:
        >>> from megatron_flex.conversion import Heads
        >>> heads = Heads(queries=32, groups=8)
        >>> heads.queries // heads.groups  # query heads that share a key
        4
    """

    queries: int
    groups: int


class Join(NamedTuple):
    """A rearrangement of rows.

    Attributes:
        rows: joins tensors of rows `[rows of the part, ...]` to `[rows, ...]`; every row is used once.
        shares: the relative numbers of rows of the parts.

    Examples:
        >>> from megatron_flex.conversion import Heads, Join
        >>> swapped = Join(lambda parts, heads: torch.cat((parts[1], parts[0])), lambda heads: (1, 1))
        >>> swapped.rows([torch.zeros(2), torch.ones(2)], Heads(4, 2))
        tensor([1., 1., 0., 0.])
    """

    rows: Callable[[Sequence[Tensor], Heads], Tensor]
    shares: Callable[[Heads], tuple[int, ...]]


class RowRun(NamedTuple):
    """Rows that follow each other on both sides.

    Attributes:
        start: the first row in the joined tensor.
        part: the index of the part that the rows come from.
        origin: the first row in that part.
        rows: the number of rows.
    """

    start: int
    part: int
    origin: int
    rows: int


def _same_rows(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    return parts[0]


def _concatenate(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    return torch.cat(list(parts))


def _interleave_heads(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """For each key and value head: its queries, its key, its value."""
    grouped = [part.reshape(heads.groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _interleave_thirds(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    return _interleave_heads(parts[0].chunk(3), heads)


SAME = Join(_same_rows, lambda heads: (1,))
GATE_UP = Join(_concatenate, lambda heads: (1, 1))  # gate, up
QUERY_KEY_VALUE = Join(_interleave_heads, lambda heads: (heads.queries, heads.groups, heads.groups))
FUSED_QUERY_KEY_VALUE = Join(_interleave_thirds, lambda heads: (1,))  # of GPT-2: one tensor `[q | k | v]`


def divide_rows(join: Join, rows: int, heads: Heads) -> tuple[int, ...]:
    """The number of rows of each part of a joined tensor.

    Raises:
        LayoutError: the rows cannot be divided so.
    """
    shares = join.shares(heads)
    if rows % sum(shares):
        raise LayoutError(f"{rows} rows do not divide into parts of {', '.join(map(str, shares))}")
    return tuple(rows // sum(shares) * share for share in shares)


@lru_cache(maxsize=MAX_REMEMBERED_ROWS)
def find_runs(join: Join, rows: int, heads: Heads) -> tuple[RowRun, ...]:
    """The origin of every row of a joined tensor, as runs in the order of the joined rows.

    Raises:
        LayoutError: the rows cannot be divided so, or the rearrangement does not use each row once.
    """
    counts = divide_rows(join, rows, heads)
    numbers = torch.arange(rows)
    parts = list(numbers.split(counts))
    try:
        joined = join.rows([part.clone() for part in parts], heads)
    except RuntimeError as error:  # a reshape that does not divide
        raise LayoutError(f"{rows} rows do not divide over {heads.groups} groups of heads") from error
    if joined.shape != (rows,) or not torch.equal(joined.sort().values, numbers):
        raise LayoutError("the rearrangement does not use each row once")
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    part_of = torch.bucketize(joined, torch.tensor(firsts), right=True) - 1
    breaks = ((joined.diff() != 1) | (part_of.diff() != 0)).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()] if rows else []
    stops = [*starts[1:], rows]
    return tuple(
        RowRun(start, part, int(joined[start]) - firsts[part], stop - start)
        for start, stop in zip(starts, stops, strict=True)
        for part in (int(part_of[start]),)
    )


def clip_runs(runs: Sequence[RowRun], start: int, stop: int) -> list[RowRun]:
    """The runs within rows `start` to `stop` of the joined tensor, counted from `start`."""
    out = []
    for run in runs:
        first, last = max(run.start, start), min(run.start + run.rows, stop)
        if first < last:
            out.append(RowRun(first - start, run.part, run.origin + first - run.start, last - first))
    return out
