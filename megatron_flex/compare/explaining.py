"""The first divergence looked at more closely, in a second pass over that one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_flex.compare import patterns
from megatron_flex.compare.aligning import TensorPair
from megatron_flex.compare.patterns import DimShares
from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS
from megatron_flex.compare.statistics import COMPARE_BLOCK, DifferenceSums

ENTRY_NAMES = {SAMPLE_AXIS: "samples", TOKEN_AXIS: "tokens"}


def explain_divergence(
    pair: TensorPair,
    found: DifferenceSums,
    held: Mapping[int, Sequence[DimShares]],
    axes: Mapping[str, int],
    most: int = COMPARE_BLOCK,
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
    energies, norms = _measure_energies(pair, most, found.broken > 0)
    if found.broken:
        hints = [f"{found.broken} of {found.count} entries are NaN or infinite in one of the two"]
        return [*hints, *_find_error_places(pair, energies, held)]
    zeros = [n for n, squares in (("A", found.squares_a), ("B", found.squares_b)) if not squares]
    if zeros:
        return [f"{zeros[0]} is zero everywhere"]
    ratio = found.dots / found.squares_a
    rest = math.sqrt(max(found.squares_b - ratio * found.dots, 0.0) / found.squares_b)
    if hint := patterns.find_constant_factor(ratio, rest, axes):
        return [hint]
    hints = _find_permutations(pair, found, held, most)
    hints += [
        f"{n} is zero wherever they differ" for n, squares in zip("AB", norms, strict=True) if not squares
    ]
    hints += _find_error_places(pair, energies, held, all_dims=not hints)
    return [h for h in dict.fromkeys(hints) if h]


def _find_error_places(
    pair: TensorPair, energies: list[Tensor], held: Mapping[int, Sequence[DimShares]], all_dims: bool = True
) -> list[str]:
    """In whose part the error is, and which samples, tokens, features have it."""
    out: list[str] = []
    for place, dim in enumerate(pair.dims):
        out += patterns.find_wrong_ranks(energies[place], held.get(place, ()), pair.numbers[place])
        if all_dims or dim in ENTRY_NAMES:
            out.append(patterns.find_wrong_entries(_name_entries(dim), energies[place], pair.numbers[place]))
    return [h for h in out if h]


def _name_entries(dim: str) -> str:
    """Entries of a dim, as people call them."""
    return ENTRY_NAMES.get(dim, f"entries along {dim!r}")


def _measure_energies(pair: TensorPair, most: int, broken: bool) -> tuple[list[Tensor], tuple[float, float]]:
    """For each dim the squares of the difference, summed over all others; those of A and B where they differ.

    Where one of the two is no number, those places alone count, as 1.
    """
    out = [torch.zeros(n, dtype=torch.float64) for n in pair.shape]
    norms = 0.0, 0.0
    for block, a, b in pair.blocks(most):
        left, right = a.double(), b.double()
        unlike = left != right
        squares = (unlike & ~(right - left).isfinite()).double() if broken else (right - left).square()
        norms = norms[0] + float(left[unlike].square().sum()), norms[1] + float(right[unlike].square().sum())
        for dim, part in enumerate(block):
            others = [d for d in range(squares.ndim) if d != dim]
            out[dim][part] += squares.sum(others) if others else squares
    return out, norms


def _find_permutations(
    pair: TensorPair, found: DifferenceSums, held: Mapping[int, Sequence[DimShares]], most: int
) -> list[str]:
    """Rows in another order along one of the dims, or a vector that was added to all of them."""
    out = []
    for place, dim in enumerate(pair.dims):
        name = _name_entries(dim)
        a, b = _read_rows(pair, place, found, most)
        if a is None or b is None:
            continue
        known = {}
        for share in held.get(place, ()) if dim == TOKEN_AXIS else ():
            if share.axis == "cp":
                text = f"as if {share.run}'s {share.size} context parallel ranks had contiguous parts"
                known[f"{text}, and not zigzag ones"] = patterns.make_contiguous_order(
                    share.size, share.run == "A"
                )
        hint = patterns.find_permutation(name, a, b, pair.numbers[place], known)
        if not hint and dim == TOKEN_AXIS:
            hint = patterns.find_common_vector(name, b.double() - a.double(), float(a.double().norm()))
        out += [hint] if hint else []
    return out


def _read_rows(pair: TensorPair, place: int, found: DifferenceSums, most: int) -> tuple[Tensor | None, Tensor | None]:
    """Both as `[entries along a dim, ...]`; of the other dims as much as there is room for."""
    length = pair.shape[place]
    if not 2 <= length <= patterns.MOST_MATCHED_ROWS:
        return None, None
    room = max(1, min(most // (8 * length), 4 * patterns.MOST_MATCHED_COLUMNS))
    block = []
    for dim, size in enumerate(pair.shape):
        if dim == place:
            block.append(slice(0, size))
            continue
        one = pair.dims[place] == TOKEN_AXIS and pair.dims[dim] == SAMPLE_AXIS  # each may have an order of its own
        count = 1 if one else min(size, room)
        start = min(found.worst[dim], size - count)  # what differs is among it
        block.append(slice(start, start + count))
        room = max(1, room // count)
    a, b = pair.read(block)
    return a.movedim(place, 0), b.movedim(place, 0)
