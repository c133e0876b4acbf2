"""The first divergence looked at more closely, in a second pass over that one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_flex.compare import patterns
from megatron_flex.compare.aligning import Pair
from megatron_flex.compare.patterns import Shares
from megatron_flex.compare.source import SAMPLE, TOKEN
from megatron_flex.compare.statistics import BLOCK, Statistics

NAMES = {SAMPLE: "samples", TOKEN: "tokens"}


def explain(
    pair: Pair,
    found: Statistics,
    held: Mapping[int, Sequence[Shares]],
    axes: Mapping[str, int],
    most: int = BLOCK,
) -> list[str]:
    """What the error looks like.

    Args:
        pair: the tensor in both dumps.
        found: its statistics.
        held: who holds what, by dim.
        axes: sizes that a constant factor could come from, by name.
        most: bytes of a block.
    """
    if found.discrete:
        part = f"{found.differing} of {found.count} entries differ"
        return [f"{part}; where what they were chosen by is nearly tied, round-off alone can do that"]
    energies, there = _energies(pair, most, found.broken > 0)
    if found.broken:
        hints = [f"{found.broken} of {found.count} entries are NaN or infinite in one of the two"]
        return [*hints, *_places(pair, energies, held)]
    zeros = [n for n, squares in (("A", found.squares_a), ("B", found.squares_b)) if not squares]
    if zeros:
        return [f"{zeros[0]} is zero everywhere"]
    ratio = found.dots / found.squares_a
    rest = math.sqrt(max(found.squares_b - ratio * found.dots, 0.0) / found.squares_b)
    if told := patterns.factor(ratio, rest, axes):
        return [told]
    hints = _permutations(pair, found, held, most)
    hints += [
        f"{n} is zero wherever they differ" for n, squares in zip("AB", there, strict=True) if not squares
    ]
    hints += _places(pair, energies, held, all_dims=not hints)
    return [h for h in dict.fromkeys(hints) if h]


def _places(
    pair: Pair, energies: list[Tensor], held: Mapping[int, Sequence[Shares]], all_dims: bool = True
) -> list[str]:
    """In whose part the error is, and which samples, tokens, features have it."""
    out: list[str] = []
    for place, dim in enumerate(pair.dims):
        out += patterns.whose_part(energies[place], held.get(place, ()), pair.numbers[place])
        if all_dims or dim in NAMES:
            out.append(patterns.which(_name(dim), energies[place], pair.numbers[place]))
    return [h for h in out if h]


def _name(dim: str) -> str:
    """Entries of a dim, as people call them."""
    return NAMES.get(dim, f"entries along {dim!r}")


def _energies(pair: Pair, most: int, broken: bool) -> tuple[list[Tensor], tuple[float, float]]:
    """For each dim the squares of the difference, summed over all others; those of A and B where they differ.

    Where one of the two is no number, those places alone count, as 1.
    """
    out = [torch.zeros(n, dtype=torch.float64) for n in pair.shape]
    there = 0.0, 0.0
    for block, a, b in pair.blocks(most):
        left, right = a.double(), b.double()
        unlike = left != right
        squares = (unlike & ~(right - left).isfinite()).double() if broken else (right - left).square()
        there = there[0] + float(left[unlike].square().sum()), there[1] + float(right[unlike].square().sum())
        for dim, part in enumerate(block):
            others = [d for d in range(squares.ndim) if d != dim]
            out[dim][part] += squares.sum(others) if others else squares
    return out, there


def _permutations(
    pair: Pair, found: Statistics, held: Mapping[int, Sequence[Shares]], most: int
) -> list[str]:
    """Rows in another order along one of the dims, or a vector that was added to all of them."""
    out = []
    for place, dim in enumerate(pair.dims):
        name = _name(dim)
        a, b = _rows(pair, place, found, most)
        if a is None or b is None:
            continue
        known = {}
        for share in held.get(place, ()) if dim == TOKEN else ():
            if share.axis == "cp":
                text = f"as if {share.run}'s {share.size} context parallel ranks had contiguous parts"
                known[f"{text}, and not zigzag ones"] = patterns.dealt_contiguously(
                    share.size, share.run == "A"
                )
        told = patterns.in_another_order(name, a, b, pair.numbers[place], known)
        if not told and dim == TOKEN:
            told = patterns.same_for_all(name, b.double() - a.double(), float(a.double().norm()))
        out += [told] if told else []
    return out


def _rows(pair: Pair, place: int, found: Statistics, most: int) -> tuple[Tensor | None, Tensor | None]:
    """Both as `[entries along a dim, ...]`; of the other dims as much as there is room for."""
    length = pair.shape[place]
    if not 2 <= length <= patterns.ROWS:
        return None, None
    room = max(1, min(most // (8 * length), 4 * patterns.COLUMNS))
    block = []
    for dim, size in enumerate(pair.shape):
        if dim == place:
            block.append(slice(0, size))
            continue
        one = pair.dims[place] == TOKEN and pair.dims[dim] == SAMPLE  # each may have an order of its own
        taken = 1 if one else min(size, room)
        start = min(found.worst[dim], size - taken)  # what differs is among it
        block.append(slice(start, start + taken))
        room = max(1, room // taken)
    a, b = pair.read(block)
    return a.movedim(place, 0), b.movedim(place, 0)
