"""What an error looks like, in words: whose part it sits in, a constant factor, rows in another order.

Each of these is told only where the numbers show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from megatron_flex.layout import Dim, Sizes, spans

MOST_MATCHED_ROWS, MOST_MATCHED_COLUMNS = 2048, 512  # at most so many are matched against each other
MOST_LISTED = 8  # places named in a sentence


@dataclass(frozen=True, slots=True)
class DimShares:
    """Which entries of a dim are whose, in one of the two runs.

    Attributes:
        run: `A` or `B`.
        axis: of the mesh.
        size: of it.
        parts: for each coordinate, the entries of the dim.
    """

    run: str
    axis: str
    size: int
    parts: tuple[tuple[int, ...], ...]


def compute_shares(run: str, dim: Dim, length: int, sizes: Sizes) -> list[DimShares]:
    """Who holds what of a dim: one for each axis that cuts it, over all coordinates of the others."""
    live = [c.axis for c in dim.cuts if sizes.get(c.axis, 1) > 1 and not c.partial]
    if dim.uneven:
        return []
    out = []
    for axis in live:
        held: list[tuple[int, ...]] = []
        for coord in range(sizes[axis]):
            own_entries: set[int] = set()
            for others in _list_coordinates({a: sizes[a] for a in live if a != axis}):
                for start, stop in spans(dim, length, {**others, axis: coord}, sizes):
                    own_entries |= set(range(start, stop))
            held.append(tuple(sorted(own_entries)))
        out.append(DimShares(run, axis, sizes[axis], tuple(held)))
    return out


def _list_coordinates(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    out: list[dict[str, int]] = [{}]
    for axis, size in sizes.items():
        out = [{**o, axis: c} for o in out for c in range(size)]
    return out


def find_wrong_ranks(energy: Tensor, found: Sequence[DimShares], numbers: Sequence[int]) -> list[str]:
    """Whether an error sits in the parts of some coordinates only, or at their borders only.

    Args:
        energy: squares of the error, by entry of a dim.
        found: who holds what of it.
        numbers: of those entries in the whole.
    """
    out = []
    wrong = {numbers[int(i)] for i in (energy > energy.sum() * 1e-9).nonzero()}
    last = max(numbers)
    for share in found:
        ill = [c for c, part in enumerate(share.parts) if wrong & set(part)]
        if 0 < len(ill) < share.size:
            out.append(
                f"all of the error is in what {share.axis} rank{'s' if len(ill) > 1 else ''} "
                f"{_format_list(ill)} of {share.size} hold{'s' if len(ill) == 1 else ''} in {share.run}"
            )
        edges = {i for part in share.parts for i in part if not {i - 1, i + 1} <= set(part)}
        edges -= {0, last}
        if wrong and wrong <= edges and len(edges) < last / 2:
            out.append(f"all of the error is at the borders between {share.axis} ranks of {share.run}")
    return out


def find_wrong_entries(name: str, energy: Tensor, numbers: Sequence[int]) -> str:
    """Which entries of a dim differ, where not all do."""
    wrong = [int(i) for i in (energy > energy.sum() * 1e-9).nonzero()]
    if not 0 < len(wrong) < len(energy):
        return ""
    return f"{len(wrong)} of {len(energy)} {name} differ: {_format_list([numbers[i] for i in wrong])}"


def find_constant_factor(ratio: float, rest: float, axes: Mapping[str, int]) -> str:
    """Whether one is the other times a number, and which sizes that number could come from.

    Args:
        ratio: the number that fits best, B over A.
        rest: what is then left of the difference, over the norm of B.
        axes: sizes that a factor could come from, by name.
    """
    if not math.isfinite(ratio) or abs(ratio - 1) < 1e-3 or rest > 1e-2 * min(abs(ratio - 1), 1):
        return ""
    named = {n: s for n, s in axes.items() if s > 1}
    wording: list[str] = []
    for count in range(1, len(named) + 1):
        for chosen in combinations(named, count):
            size = math.prod(named[n] for n in chosen)
            product_of = " x ".join(chosen)
            if math.isclose(ratio, size, rel_tol=1e-3):
                wording.append(product_of)
            elif math.isclose(ratio, 1 / size, rel_tol=1e-3):
                wording.append(f"1 / ({product_of})" if count > 1 else f"1 / {product_of}")
        if wording:
            break
    return f"B is A times a constant factor, {ratio:.6g}" + (
        f", which is {' or '.join(wording)}" if wording else ""
    )


def find_common_vector(name: str, difference: Tensor, scale: float) -> str:
    """Whether the difference is one vector, the same in each row: a bias, added or left out.

    Args:
        name: of rows.
        difference: `[rows, ...]`, B less A.
        scale: the norm of what is compared.
    """
    rows = difference.reshape(len(difference), -1)
    if len(rows) < 3 or rows.shape[1] < 2:
        return ""
    mean = rows.mean(0, keepdim=True)
    spread = float((rows - mean).norm())
    if float(mean.norm()) * math.sqrt(len(rows)) > 1e-3 * scale and spread < 1e-3 * float(rows.norm()):
        return f"the difference is the same vector for all {name}: a bias added too often or left out"
    return ""


def find_permutation(
    name: str, a: Tensor, b: Tensor, numbers: Sequence[int], known: Mapping[str, Callable[[int], list[int]]]
) -> str:
    """Whether rows of the one are rows of the other at other places.

    Args:
        name: of rows.
        a: `[rows, ...]`.
        b: likewise.
        numbers: of the rows, as people count them.
        known: orders with a name, as functions of the number of rows: row i of B would be row f[i] of A.
    """
    left, right = (t.reshape(len(t), -1)[:, :MOST_MATCHED_COLUMNS].double() for t in (a, b))
    if not 2 <= len(left) <= MOST_MATCHED_ROWS or not (left.isfinite().all() and right.isfinite().all()):
        return ""
    close = 1e-3 * max(float(left.norm(dim=1).max()), 1e-300)
    wrong = ((left - right).norm(dim=1) > close).nonzero().flatten()
    if len(wrong) < 2:
        return ""
    for wording, order in known.items():
        places = torch.tensor(order(len(left)))
        if float((left[places] - right).norm(dim=1).max()) <= close:
            return f"{name} are permuted: {wording}"
    distance, place = torch.cdist(right[wrong], left).min(1)
    if float((distance <= close).double().mean()) < 0.9:
        return ""
    pairs = [f"{numbers[int(i)]}<-{numbers[int(p)]}" for i, p in zip(wrong, place, strict=True)]
    kept = set(range(len(left))) - {int(i) for i in wrong}
    again = bool(kept & {int(p) for p in place}) or len(set(place.tolist())) < len(place)
    return f"{name} are {'repeated' if again else 'permuted'} (B<-A): {_format_list(pairs)}"


def make_contiguous_order(size: int, zigzag: bool) -> Callable[[int], list[int]]:
    """Rows as they come if zigzag parts were filled from contiguous ones, or the other way round."""

    def order(length: int) -> list[int]:
        if length % (2 * size):
            return list(range(length))
        chunks = [list(c) for c in torch.arange(length).chunk(2 * size)]
        zig = [int(i) for r in range(size) for i in [*chunks[r], *chunks[2 * size - 1 - r]]]
        if zigzag:
            return zig
        out = [0] * length
        for place, row in enumerate(zig):
            out[row] = place
        return out

    return order


def _format_list(items: Sequence[object]) -> str:
    text = ", ".join(map(str, items[:MOST_LISTED]))
    return text + (f" and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else "")
