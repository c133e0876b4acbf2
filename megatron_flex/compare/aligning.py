"""Two dumped tensors, entry on entry: the samples and tokens that both have, read block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_flex.compare.compared_dump import MICROBATCH_AXIS, SAMPLE_AXIS, TOKEN_AXIS, ComparedTensor
from megatron_flex.compare.statistics import COMPARE_BLOCK, DifferenceSums, split_into_blocks
from megatron_flex.dump.reader import DumpArray

CommonIndices = tuple[int, ...] | None  # indices along a dim; None for all


@dataclass(frozen=True, slots=True)
class TensorPair:
    """What both dumps have of one tensor in one iteration, or in a part of it.

    Attributes:
        item: what it is.
        iteration: the framework's number.
        a: of the one dump, without the dim of iterations.
        b: of the other.
        dims: their names.
        numbers: for each dim, what people call its entries: numbers of samples, positions of tokens.
        picked_a: which indices along each dim of `a` these are.
        picked_b: likewise.
        microbatch: the number among all of the iteration, where a tensor has no samples to tell it.
    """

    item: ComparedTensor
    iteration: int
    a: DumpArray
    b: DumpArray
    dims: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]
    picked_a: tuple[CommonIndices, ...]
    picked_b: tuple[CommonIndices, ...]
    microbatch: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is compared."""
        return tuple(map(len, self.numbers))

    def read(self, block: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """A block of both; only that is read."""
        return _read_indices(self.a, self.picked_a, block), _read_indices(self.b, self.picked_b, block)

    def blocks(self, most: int = COMPARE_BLOCK) -> Iterator[tuple[tuple[slice, ...], Tensor, Tensor]]:
        """All blocks, one after the other."""
        for block in split_into_blocks(self.shape, most):
            yield block, *self.read(block)

    def along(self, dim: str) -> int | None:
        """The index of a dim; None if there is none of that name."""
        return self.dims.index(dim) if dim in self.dims else None


def sum_differences(pairs: Sequence[TensorPair], most: int = COMPARE_BLOCK) -> tuple[DifferenceSums, TensorPair]:
    """Over all blocks of all of them; and the pair that has the greatest difference."""
    out, worst = DifferenceSums(), pairs[0]
    for pair in pairs:
        for block, a, b in pair.blocks(most):
            before = out.worst, out.values, out.broken
            out.add(a, b, tuple(s.start for s in block))
            if (out.worst, out.values, out.broken) != before:
                worst = pair
    return out, worst


def align_arrays(item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray) -> list[TensorPair] | str:
    """Put two arrays on each other.

    Args:
        item: what they are.
        iteration: a number that both have.
        a: over iterations.
        b: likewise.

    Returns:
        What both have: mostly one pair; one for each sample where tokens were drawn for each by itself, one
        for each microbatch where there are no samples. Or words that say why that is nothing.
    """
    one, two = a.at(iteration), b.at(iteration)
    if MICROBATCH_AXIS in (*one.dims, *two.dims):
        return _align_by_microbatch(item, iteration, one, two)
    return _align_by_label(item, iteration, one[0], two[0])


def _align_by_microbatch(item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray) -> list[TensorPair] | str:
    left, right = ([piece.array for piece in x.pieces()] for x in (a, b))
    if len(left) != len(right):
        return f"{len(left)} microbatches in A and {len(right)} in B, and no samples to tell them by"
    out: list[TensorPair] = []
    for number, (one, two) in enumerate(zip(left, right, strict=True)):
        found = _align_by_label(item, iteration, one, two, number)
        if isinstance(found, str):
            return f"{found} (microbatch {number})"
        out += found
    return out


def _align_by_label(
    item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray, microbatch: int | None = None
) -> list[TensorPair] | str:
    marks = [[d if d in (SAMPLE_AXIS, TOKEN_AXIS) else "" for d in x.dims] for x in (a, b)]
    if marks[0] != marks[1]:
        return f"dims {', '.join(a.dims)} in A and {', '.join(b.dims)} in B"
    if any(t is not None and t.ndim == 2 for t in (a.tokens, b.tokens)):
        return _align_by_sample(item, iteration, a, b)
    found = _make_pair(item, iteration, a, b, _list_labels(a), _list_labels(b), microbatch)
    return found if isinstance(found, str) else [found]


def _list_labels(array: DumpArray) -> list[tuple[int, ...]]:
    """What the entries of each dim are called."""
    known = {SAMPLE_AXIS: array.samples, TOKEN_AXIS: array.tokens}
    found = [known.get(d) for d in array.dims]
    return [
        tuple(range(n)) if t is None else tuple(int(i) for i in t.tolist())
        for n, t in zip(array.shape, found, strict=True)
    ]


def _make_pair(
    item: ComparedTensor,
    iteration: int,
    a: DumpArray,
    b: DumpArray,
    numbers_a: Sequence[tuple[int, ...]],
    numbers_b: Sequence[tuple[int, ...]],
    microbatch: int | None = None,
) -> TensorPair | str:
    numbers: list[tuple[int, ...]] = []
    for dim, mine, other in zip(a.dims, numbers_a, numbers_b, strict=True):
        if dim not in (SAMPLE_AXIS, TOKEN_AXIS) and len(mine) != len(other):
            return f"{len(mine)} entries along {dim!r} in A and {len(other)} in B"
        both = tuple(sorted(set(mine) & set(other)))
        if not both and (mine or other):
            return f"no {dim} that both have"
        numbers.append(both)
    one, two = (tuple(_find_common_indices(n, w) for n, w in zip(x, numbers, strict=True)) for x in (numbers_a, numbers_b))
    return TensorPair(item, iteration, a, b, tuple(a.dims), tuple(numbers), one, two, microbatch)


def _align_by_sample(item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray) -> list[TensorPair] | str:
    """Where the tokens of each sample were drawn by themselves: sample by sample."""
    split = [{number: (row, tokens) for number, row, tokens in _iterate_samples(x)} for x in (a, b)]
    out = []
    for number in sorted(split[0].keys() & split[1].keys()):
        sides, labels = [], []
        for array, rows in zip((a, b), split, strict=True):
            row, tokens = rows[number]
            sides.append(array[row : row + 1])
            labels.append([(number,), tokens, *(tuple(range(n)) for n in array.shape[2:])])
        found = _make_pair(item, iteration, sides[0], sides[1], labels[0], labels[1])
        if not isinstance(found, str):
            out.append(found)
    return out or "no sample and token that both have"


def _iterate_samples(array: DumpArray) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Of an array over samples, tokens, ...: the number of each, where it is, and its tokens' positions."""
    samples, tokens = array.samples, array.tokens
    assert samples is not None, "tokens are drawn by sample"
    assert tokens is not None
    for row, number in enumerate(samples.tolist()):
        own = tokens[row] if tokens.ndim == 2 else tokens
        yield int(number), row, tuple(int(i) for i in own.tolist())


def _find_common_indices(numbers: tuple[int, ...], wanted: tuple[int, ...]) -> CommonIndices:
    if numbers == wanted:
        return None
    places = {n: i for i, n in enumerate(numbers)}
    return tuple(places[n] for n in wanted)


def _read_indices(array: DumpArray, picked: Sequence[CommonIndices], block: Sequence[slice]) -> Tensor:
    index = [part if p is None else list(p[part]) for p, part in zip(picked, block, strict=True)]
    found: Tensor = array[tuple(index)].torch()
    return found
