"""Patterns in the error of the first divergence: one rank's shard, a constant factor, permuted rows.

Each pattern is reported only where the numbers show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from megatron_flex.compare.block_sums import COMPARE_BLOCK
from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS
from megatron_flex.compare.hint import Hint
from megatron_flex.compare.input_tokens import holds_token_ids
from megatron_flex.compare.rank_factors import find_rank_factors
from megatron_flex.compare.shards import DimShares
from megatron_flex.compare.tensor_pairs import DifferenceSums, TensorPair
from megatron_flex.errors import list_some

MAX_MATCHED_ROWS, MAX_MATCHED_COLUMNS = 4096, 512  # at most this many are matched against each other
list_entries = partial(list_some, most=8)
MIN_ROWS = 3  # of a difference that may be one vector
FACTOR_SHARE = 0.3  # of the difference's energy
ERASED = 1e-6  # of the difference's energy, that may be elsewhere than at zeros
FACTOR_COSINE = 0.7  # of the two: half of the difference of unrelated tensors is along each of them
NOISE_CONTRAST = 50.0  # of the energy of an entry over the median
RIGHT_CONTRAST = 1000.0  # of the median over the energy of an entry that has round-off only
ROW_MARGIN = 8.0  # of the distance of matching rows over the relative noise


def find_wrong(energy: Tensor) -> Tensor:
    """The entries of a dim that differ: by far more than most others, or all but those with far less."""
    some = energy > energy.sum() * 1e-9
    typical = float(energy.median())
    above, below = energy > NOISE_CONTRAST * typical, energy < typical / RIGHT_CONTRAST
    if typical > 0 and above.any():
        return above.nonzero().flatten()
    return (~below if below.any() else some).nonzero().flatten()


def find_wrong_ranks(energy: Tensor, shares: Sequence[DimShares], numbers: Sequence[int]) -> list[str]:
    """Whether an error is only in the shards of some coordinates, or only at their borders.

    Args:
        energy: squares of the error, by entry of a dim.
        shares: the shards of the dim.
        numbers: the indices of those entries in the full tensor.
    """
    out = []
    wrong = {numbers[int(i)] for i in find_wrong(energy)}
    last = max(numbers)
    for share in shares:
        coords = [c for c, part in enumerate(share.parts) if wrong & set(part)]
        if 0 < len(coords) < share.size:
            out.append(
                f"all of the error is in what {share.axis} rank{'s' if len(coords) > 1 else ''} "
                f"{list_entries(coords)} of {share.size} hold{'s' if len(coords) == 1 else ''} in {share.run}"
            )
        edges = {i for part in share.parts for i in part if not {i - 1, i + 1} <= set(part)}
        edges -= {0, last}
        if wrong and wrong <= edges and len(edges) < last / 2:
            out.append(f"all of the error is at the borders between {share.axis} ranks of {share.run}")
    return out


def find_wrong_entries(name: str, energy: Tensor, numbers: Sequence[int]) -> str:
    """The entries of a dim that differ, if not all do."""
    wrong = [int(i) for i in find_wrong(energy)]
    if not 0 < len(wrong) < len(energy):
        return ""
    return f"{len(wrong)} of {len(energy)} {name} differ: {list_entries([numbers[i] for i in wrong])}"


CONSTANT_FACTOR = "B is A times a constant factor"  # the beginning of that pattern


def find_constant_factor(
    ratio: float, rest: float, axes: Mapping[str, int], noise: float = 0.0, error: float = math.inf
) -> str:
    """Whether one is a multiple of the other, and which sizes could be the factor.

    Args:
        ratio: the best-fitting factor, B over A.
        rest: the norm of the remaining difference, over the norm of B.
        axes: sizes that could be the factor, by name.
        noise: the relative difference that round-off may make there, which the remaining one may have.
        error: the standard error of the factor; infinite if it was not estimated.
    """
    if not math.isfinite(ratio) or ratio == 1:
        return ""
    gap = abs(ratio - 1)
    # Either hardly anything remains, or the factor stands out from its error, and what remains is noise.
    exact = gap >= 1e-3 and rest <= 1e-2 * min(gap, 1)
    pooled = gap > 8 * error and rest <= max(min(noise, gap), 0.7 * gap if gap < 0.3 else 0.1 * gap)
    if not exact and not pooled:
        return ""
    close = max(1e-3, min(3 * error, 0.02)) if math.isfinite(error) else 1e-3
    named = {n: s for n, s in axes.items() if s > 1}
    wording: list[str] = []
    for count in range(1, len(named) + 1):
        for chosen in combinations(named, count):
            size = math.prod(named[n] for n in chosen)
            product_of = " x ".join(chosen)
            if math.isclose(ratio, size, rel_tol=close):
                wording.append(product_of)
            elif math.isclose(ratio, 1 / size, rel_tol=close):
                wording.append(f"1 / ({product_of})" if count > 1 else f"1 / {product_of}")
        if wording:  # a product of fewer sizes is the likelier factor
            break
    digits = f"1 {'+' if ratio > 1 else '-'} {gap:.3g}" if gap < 1e-3 else f"{ratio:.6g}"
    return f"{CONSTANT_FACTOR}, {digits}" + (f", which is {' or '.join(wording)}" if wording else "")


def fit_common_vector(rows: Tensor) -> tuple[Tensor, float]:
    """The vector that all rows of a difference share, and what it leaves of the difference's norm.

    Args:
        rows: `[rows, features]`, of which fewer than `MIN_ROWS` prove nothing.
    """
    vector, norm = rows.mean(0), float(rows.norm())
    return vector, float((rows - vector).norm()) / norm if norm else 0.0


def find_constant_offset(
    pair: TensorPair, sums: DifferenceSums, mean: float, rest: float, axes: Mapping[str, int]
) -> str:
    """Whether one is the other plus a number, in a tensor of one number for each token, such as the loss.

    Args:
        pair: the tensor in both dumps.
        sums: its statistics.
        mean: of the difference.
        rest: the norm of what the best-fitting factor leaves, which is more than the number leaves.
        axes: sizes whose logarithm the number could be, by name.
    """
    if sums.count < 4 or not set(pair.dims) <= {SAMPLE_AXIS, TOKEN_AXIS}:
        return ""
    left = math.sqrt(max(sums.squares - sums.count * mean * mean, 0.0))
    if left > 1e-3 * math.sqrt(sums.squares) or left >= 0.1 * rest:
        return ""
    named = [n for n, s in axes.items() if s > 1 and math.isclose(abs(mean), math.log(s), rel_tol=1e-3)]
    logarithm = f", which is the logarithm of {' or '.join(named)}" if named else ""
    return f"B is A {'plus' if mean > 0 else 'minus'} {abs(mean):.6g} everywhere{logarithm}"


def find_common_vector(name: str, difference: Tensor, scale: float) -> str:
    """Whether the difference is one vector, the same in each row: a bias, added or omitted.

    Args:
        name: the name of the rows.
        difference: `[rows, ...]`, B minus A.
        scale: the norm of the compared tensor.
    """
    rows = difference.reshape(len(difference), -1)
    if len(rows) < MIN_ROWS or rows.shape[1] < 2:
        return ""
    vector, left = fit_common_vector(rows)
    if float(vector.norm()) * math.sqrt(len(rows)) > 1e-3 * scale and left < 1e-3:
        return f"the difference is the same vector for all {name}: a bias added too often or left out"
    return ""


def match_rows(rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the number of the nearest one among others, and the distance to it.

    Args:
        rows: `[rows, features]`.
        others: likewise. At most `MAX_MATCHED_COLUMNS` features count.
    """
    rows, others = (t[:, :MAX_MATCHED_COLUMNS].double() for t in (rows, others))
    place = torch.cdist(rows, others).argmin(1)
    return place, (rows - others[place]).norm(dim=1)  # cdist takes small distances from large products


def find_permutation(
    name: str,
    a: Tensor,
    b: Tensor,
    numbers: Sequence[int],
    known: Mapping[str, Callable[[int], list[int]]],
    noise: float = 0.0,
) -> str:
    """Whether rows of one are rows of the other in another order.

    Args:
        name: the name of the rows.
        a: `[rows, ...]`.
        b: likewise.
        numbers: the numbers of the rows.
        known: orders with a name, as functions of the number of rows: row i of B would be row f[i] of A.
        noise: the relative difference of matching rows.
    """
    left, right = (t.reshape(len(t), -1)[:, :MAX_MATCHED_COLUMNS].double() for t in (a, b))
    if not 2 <= len(left) <= MAX_MATCHED_ROWS or not (left.isfinite().all() and right.isfinite().all()):
        return ""
    close = min(max(1e-3, ROW_MARGIN * noise), 0.3) * max(float(left.norm(dim=1).max()), 1e-300)
    wrong = ((left - right).norm(dim=1) > close).nonzero().flatten()
    if len(wrong) < 2:
        return ""
    for wording, order in known.items():
        places = torch.tensor(order(len(left)))
        if float((left[places] - right).norm(dim=1).max()) <= close:
            return f"{name} are permuted: {wording}"
    place, distance = match_rows(right[wrong], left)
    if float((distance <= close).double().mean()) < 0.9:
        return ""
    pairs = _compress_moves([(numbers[int(i)], numbers[int(p)]) for i, p in zip(wrong, place, strict=True)])
    unmoved = set(range(len(left))) - {int(i) for i in wrong}
    again = bool(unmoved & {int(p) for p in place}) or len(set(place.tolist())) < len(place)
    moved = f"{name} are {'repeated' if again else 'permuted'} (B<-A): {list_entries(pairs)}"
    shift = find_shift(name, ", ".join(pairs)) if len(wrong) > 2 and name == "tokens" else ""
    return f"{moved}; {shift}" if shift else moved


def _compress_moves(moves: Sequence[tuple[int, int]]) -> list[str]:
    """`to<-from` for each, runs of neighbours as one."""
    runs: list[tuple[int, int, int]] = []
    for to, source in moves:
        if runs and (to, source) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((to, source, 1))
    return [
        f"{to}<-{source}" if n == 1 else f"{to}..{to + n - 1}<-{source}..{source + n - 1}"
        for to, source, n in runs
    ]


def find_shift(name: str, moves: str) -> str:
    """How far rows were shifted, if all moved by the same number; empty otherwise."""
    shifts = {
        int(source.split("..")[0]) - int(to.split("..")[0])
        for to, source in (m.split("<-") for m in moves.split(", ") if "<-" in m)
    }
    return f"{name} are shifted by {abs(shifts.pop())}" if len(shifts) == 1 else ""


def make_contiguous_order(size: int, zigzag: bool) -> Callable[[int], list[int]]:
    """The order of rows if zigzag shards were filled from contiguous ones, or the other way round."""

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


ENTRY_NAMES = {SAMPLE_AXIS: "samples", TOKEN_AXIS: "tokens", "n": "heads", "g": "groups of heads"}


def explain_divergence(
    pair: TensorPair,
    sums: DifferenceSums,
    shares_by_dim: Mapping[int, Sequence[DimShares]],
    axes: Mapping[str, int],
    most: int = COMPARE_BLOCK,
    noise: float = 0.0,
    factor: tuple[float, float] = (0.0, math.inf),
) -> tuple[list[Hint], list[Hint]]:
    """The patterns of the error, and the shards, samples, tokens and features that contain it.

    Args:
        pair: the tensor in both dumps.
        sums: its statistics.
        shares_by_dim: the shards, by dim.
        axes: sizes that a constant factor could come from, by name.
        most: maximum bytes of a block.
        noise: the relative difference that round-off may make there.
        factor: the constant factor minus 1, and its standard error.
    """
    if sums.discrete:
        part = f"{sums.differing} of {sums.count} entries differ"
        if holds_token_ids(pair):
            return [Hint("place", f"{sums.differing} of {sums.count} token ids differ")], []
        text = f"{part}; where what they were chosen by is nearly tied, round-off alone can do that"
        return [Hint("place", text)], []
    if pair.a.dtype.is_complex or pair.b.dtype.is_complex:
        return [], []  # the patterns are of real numbers
    energies, erased, mean = _measure_energies(pair, most, sums.broken > 0)
    if sums.broken:
        text = f"{sums.broken} of {sums.count} entries are NaN or infinite in one of the two"
        return [Hint("not finite", text)], _find_error_places(pair, energies, shares_by_dim)
    zeros = [n for n, squares in (("A", sums.squares_a), ("B", sums.squares_b)) if not squares]
    if zeros:
        return [Hint("zero", f"all entries of {zeros[0]} are 0")], []
    ratio = sums.factor
    rest = math.sqrt(max(sums.squares - (ratio - 1) ** 2 * sums.squares_a, 0.0) / sums.squares_b)
    if hint := find_constant_offset(pair, sums, mean, rest * math.sqrt(sums.squares_b), axes):
        return [Hint("same vector", hint)], []
    if hint := find_constant_factor(ratio, rest, axes, noise, factor[1]):
        return [Hint("constant factor", hint)], []
    if hint := find_rank_factors(pair, shares_by_dim, most):
        return [Hint("constant factor", hint)], []
    share = (ratio - 1) ** 2 * sums.squares_a / sums.squares
    hints: list[Hint] = []
    if abs(ratio - 1) > 8 * factor[1] and share >= FACTOR_SHARE and sums.cosine >= FACTOR_COSINE:
        hints.append(
            Hint(
                "place",
                f"{share:.0%} of the difference is a factor, {ratio:.6g}, which is not the same everywhere",
            )
        )
    hints += _find_permutations(pair, sums, shares_by_dim, most, noise)
    hints += [
        Hint("zero", f"{n} is zero wherever they differ")
        for n, squares in zip("AB", erased, strict=True)
        if squares >= (1 - ERASED) * sums.squares
    ]
    return list(dict.fromkeys(hints)), _find_error_places(pair, energies, shares_by_dim, all_dims=not hints)


def _find_error_places(
    pair: TensorPair,
    energies: list[Tensor],
    shares_by_dim: Mapping[int, Sequence[DimShares]],
    all_dims: bool = True,
) -> list[Hint]:
    """The shards, samples, tokens and features that contain the error."""
    out: list[str] = []
    for place, dim in enumerate(pair.dims):
        out += find_wrong_ranks(energies[place], shares_by_dim.get(place, ()), pair.numbers[place])
        if all_dims or dim in ENTRY_NAMES:
            out.append(find_wrong_entries(_name_entries(dim), energies[place], pair.numbers[place]))
    return [Hint("place", text) for text in dict.fromkeys(out) if text]


def _name_entries(dim: str) -> str:
    return ENTRY_NAMES.get(dim, f"entries along {dim!r}")


def _measure_energies(
    pair: TensorPair, most: int, broken: bool
) -> tuple[list[Tensor], tuple[float, float], float]:
    """For each dim the squares of the difference, summed over all others; those at zeros of each; the mean.

    Where one of the two is not finite, only those entries count, as 1.
    """
    out = [torch.zeros(n, dtype=torch.float64) for n in pair.shape]
    erased, total = (0.0, 0.0), 0.0
    for block, a, b in pair.blocks(most):
        left, right = a.double(), b.double()
        difference = right - left
        squares = ((left != right) & ~difference.isfinite()).double() if broken else difference.square()
        erased = erased[0] + float(squares[left == 0].sum()), erased[1] + float(squares[right == 0].sum())
        total += float(difference.sum())
        for dim, part in enumerate(block):
            others = [d for d in range(squares.ndim) if d != dim]
            out[dim][part] += squares.sum(others) if others else squares
    return out, erased, total / max(1, math.prod(pair.shape))


def _find_permutations(
    pair: TensorPair,
    sums: DifferenceSums,
    shares_by_dim: Mapping[int, Sequence[DimShares]],
    most: int,
    noise: float,
) -> list[Hint]:
    """Rows permuted along one of the dims, or a vector that was added to all of them."""
    out: list[Hint] = []
    for place, dim in enumerate(pair.dims):
        name = _name_entries(dim)
        a, b = _read_rows(pair, place, sums, most)
        if a is None or b is None:
            continue
        known = {}
        for share in shares_by_dim.get(place, ()) if dim == TOKEN_AXIS else ():
            if share.axis == "cp":
                text = (
                    f"as if {share.run}'s ranks had contiguous parts along cp={share.size}, not zigzag ones"
                )
                known[text] = make_contiguous_order(share.size, share.run == "A")
        hint = find_permutation(name, a, b, pair.numbers[place], known, noise)
        if hint:
            out.append(Hint("order", hint))
        elif dim == TOKEN_AXIS:
            hint = find_common_vector(name, b.double() - a.double(), float(a.double().norm()))
            out += [Hint("same vector", hint)] if hint else []
    return out


def _read_rows(
    pair: TensorPair, place: int, sums: DifferenceSums, most: int
) -> tuple[Tensor | None, Tensor | None]:
    """Both as `[entries along a dim, ...]`; a bounded part of the other dims."""
    length = pair.shape[place]
    if not 2 <= length <= MAX_MATCHED_ROWS:
        return None, None
    room = max(1, min(most // (8 * length), 4 * MAX_MATCHED_COLUMNS))
    block = []
    for dim, size in enumerate(pair.shape):
        if dim == place:
            block.append(slice(0, size))
            continue
        is_token_order = (
            pair.dims[place] == TOKEN_AXIS and pair.dims[dim] == SAMPLE_AXIS
        )  # each may have an order of its own
        count = 1 if is_token_order else min(size, room)
        start = min(sums.worst[dim], size - count)  # includes the differing entry
        block.append(slice(start, start + count))
        room = max(1, room // count)
    a, b = pair.read(block)
    return a.movedim(place, 0), b.movedim(place, 0)
