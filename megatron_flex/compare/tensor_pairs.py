"""Two dumped tensors, aligned by samples and tokens, and sums over their difference, block by block."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from megatron_flex.compare.block_sums import (
    COMPARE_BLOCK,
    BlockSums,
    split_into_blocks,
    split_into_tiles,
    sum_block,
)
from megatron_flex.compare.compared_dump import MICROBATCH_AXIS, SAMPLE_AXIS, TOKEN_AXIS, ComparedTensor
from megatron_flex.compare.difference_profile import DifferenceProfile
from megatron_flex.dump.host_memory import ReusedMemory
from megatron_flex.dump.reader import DumpArray
from megatron_flex.dump.reader.read_ahead import read_ahead

MAX_THREADS = 8  # that read and sum blocks
CONSTANT = 1 - 1e-6  # of a tensor's energy over that of its greatest entry everywhere
MIN_READ_AHEAD = 1 << 18  # entries of a block; a smaller one is read sooner than handed to a thread


@dataclass(slots=True)
class DifferenceSums:
    """Sums over pairs of entries.

    Attributes:
        count: number of pairs.
        differing: number of unequal pairs. Two NaNs are equal.
        broken: pairs with one NaN or infinity that the other lacks.
        finite: pairs of two finite entries, which alone are evidence.
        not_finite: pairs of which neither entry is finite.
        overflowed: of `broken`, pairs of an infinity and a finite entry of the same sign.
        nearest_overflow: the least magnitude of these finite entries.
        finite_gap: the greatest difference of two finite entries.
        worst: index of the greatest difference; the first broken pair if there is one.
        values: the two entries there; magnitudes for complex entries.
        discrete: whether entries are integers, which have no round-off.
    """

    count: int = 0
    differing: int = 0
    broken: int = 0
    finite: int = 0
    not_finite: int = 0
    overflowed: int = 0
    nearest_overflow: float = math.inf
    finite_gap: float = 0.0
    squares_a: float = 0.0
    squares_b: float = 0.0
    dots: float = 0.0
    squares: float = 0.0
    greatest: float = 0.0
    peak: float = 0.0
    worst: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)
    discrete: bool = False
    _has_worst: bool = field(default=False, repr=False)

    def add(
        self,
        a: Tensor,
        b: Tensor,
        start: Sequence[int] = (),
        profile: DifferenceProfile | None = None,
        places: Sequence[Tensor] = (),
        block_sums: BlockSums | None = None,
    ) -> None:
        """Add a block of both.

        Args:
            a: block of the first tensor.
            b: block of the second tensor, of the same shape.
            start: position of the block in the full tensor; indices count from there.
            profile: receives the sums of real tensors too.
            places: as in `DifferenceProfile.add`.
            block_sums: `sum_real_block` of the two, if it is there already.
        """
        start = tuple(start) or (0,) * a.ndim
        self.discrete = not all(t.is_floating_point() or t.is_complex() for t in (a, b))
        if not a.numel():
            return
        block_sums = block_sums or sum_real_block(a, b)
        if block_sums is None or not block_sums.finite:
            for tile in split_into_tiles(a.shape):
                self._add_exactly(a[tile], b[tile], _shift(start, tile))
        else:
            self._add_sums(block_sums, a, b, start)
        if block_sums is not None and profile is not None:
            profile.add(block_sums, a, b, places)

    def _add_sums(self, block_sums: BlockSums, a: Tensor, b: Tensor, start: Sequence[int]) -> None:
        """Add a block of both whose entries are real and finite."""
        squares_a, squares_b, dots, squares, _ = block_sums.totals
        self.count += block_sums.numel
        self.finite += block_sums.numel
        self.differing += block_sums.differing
        self.squares_a += squares_a
        self.squares_b += squares_b
        self.dots += squares_a + dots  # of the difference and A
        self.squares += squares
        self.peak = max(self.peak, block_sums.peak)
        self.finite_gap = max(self.finite_gap, block_sums.greatest)
        if not self.broken and (block_sums.greatest > self.greatest or not self._has_worst):
            a, b = a[block_sums.worst], b[block_sums.worst]
            distance = (a.double() - b.double()).abs()
            self._note_worst(
                a, b, distance, torch.zeros((), dtype=torch.bool), _shift(start, block_sums.worst)
            )

    def _add_exactly(self, a: Tensor, b: Tensor, start: Sequence[int]) -> None:
        """Add a tile of integers, of complex numbers, or with entries that are not finite."""
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        left, right = a.to(wide), b.to(wide)
        if self.discrete and a.dtype == b.dtype:
            different = a != b  # fp64 does not have every integer
        else:
            different = (left != right) & ~(left.isnan() & right.isnan())
        finite = left.isfinite() & right.isfinite()
        broken = different & ~finite
        self.count += left.numel()
        self.finite += int(finite.sum())
        self.differing += int(different.sum())
        if not finite.all():
            self._count_overflows(left, right, broken)
            left, right = left.where(finite, 0.0), right.where(finite, 0.0)
        distance = (left - right).abs()
        if self.discrete:
            distance = distance.where(~different | (distance > 0), 1.0)
        self.squares_a += float(left.abs().square().sum())
        self.squares_b += float(right.abs().square().sum())
        self.dots += float((left * right.conj()).real.sum())
        self.squares += float(distance.square().sum())
        if left.numel():
            self.peak = max(self.peak, float(left.abs().max()), float(right.abs().max()))
            self.finite_gap = max(self.finite_gap, float(distance.max()))
            self._note_worst(a, b, distance, broken, start)
        self.broken += int(broken.sum())

    def _count_overflows(self, left: Tensor, right: Tensor, broken: Tensor) -> None:
        self.not_finite += int((~left.isfinite() & ~right.isfinite()).sum())
        if left.is_complex():
            return
        for infinite, other in ((left, right), (right, left)):
            edge = broken & infinite.isinf() & other.isfinite() & (infinite.sign() == other.sign())
            if edge.any():
                self.overflowed += int(edge.sum())
                self.nearest_overflow = min(self.nearest_overflow, float(other[edge].abs().min()))

    def without_overflows(self) -> DifferenceSums:
        """The sums over the pairs of two finite entries alone."""
        return replace(self, broken=0, greatest=self.finite_gap)

    def _note_worst(
        self, a: Tensor, b: Tensor, distance: Tensor, broken: Tensor, start: Sequence[int]
    ) -> None:
        if self.broken:
            return
        has_broken = bool(broken.any())
        flat = int((broken.int() if has_broken else distance).argmax())
        greatest = float(distance.reshape(-1)[flat])
        if has_broken or greatest > self.greatest or not self._has_worst:
            at = locate_entry(flat, distance.shape)
            self.worst = tuple(i + s for i, s in zip(at, start, strict=True))
            self.values = _compute_magnitude(a.reshape(-1)[flat]), _compute_magnitude(b.reshape(-1)[flat])
            self._has_worst = True
        self.greatest = math.inf if has_broken else max(self.greatest, greatest)

    @property
    def equal(self) -> bool:
        """Whether no pair differs."""
        return self.differing == 0

    @property
    def is_constant(self) -> bool:
        """Whether all entries of one of the two have the same magnitude."""
        least = CONSTANT * self.count * (self.peak * self.peak)
        return bool(self.peak) and max(self.squares_a, self.squares_b) >= least

    @property
    def relative(self) -> float:
        """The norm of the difference over the greater of the two norms; infinite with a NaN in one only."""
        if self.broken:
            return math.inf
        scale = math.sqrt(max(self.squares_a, self.squares_b))
        return math.sqrt(self.squares) / scale if scale else 0.0

    @property
    def factor(self) -> float:
        """The factor between both that fits best, B over A; NaN if A is zero."""
        return self.dots / self.squares_a if self.squares_a else math.nan

    @property
    def peak_share(self) -> float:
        """The greatest difference over the greatest entry."""
        return self.greatest / self.peak if self.peak else 0.0

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the two; 1 for two zero tensors, 0 if one of them is zero."""
        if self.broken:
            return math.nan
        scale = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        if scale:
            return max(-1.0, min(1.0, self.dots / scale))
        return 1.0 if self.equal else 0.0

    @property
    def error(self) -> float:
        """The quantity that tolerances bound: the greater of relative error and max difference over peak.

        For integers, the fraction that differs.
        """
        if self.discrete:
            return self.differing / self.count if self.count else 0.0
        if self.broken:
            return math.inf
        return max(self.relative, self.peak_share)


def sum_tensors(a: Tensor, b: Tensor, most: int = COMPARE_BLOCK) -> DifferenceSums:
    """Sums over two tensors on the CPU that have the same shape, block by block.

    Equal ones are found before sums are computed; only their number of entries is counted.
    """
    if a.dtype == b.dtype and torch.equal(a, b) and math.isfinite(float(a.sum())):
        return DifferenceSums(count=a.numel(), finite=a.numel())
    out = DifferenceSums()
    for block in split_into_blocks(a.shape, most):
        out.add(a[block], b[block], [part.start for part in block])
    return out


def sum_real_block(a: Tensor, b: Tensor) -> BlockSums | None:
    """Sums over a block; None for a block without entries, of integers, or of complex numbers."""
    real = a.is_floating_point() and b.is_floating_point()
    return sum_block(a, b) if real and a.numel() else None


def _shift(start: Sequence[int], part: Sequence[slice]) -> tuple[int, ...]:
    """The position of a tile in the full tensor."""
    return tuple(s + (part[dim].start if dim < len(part) else 0) for dim, s in enumerate(start))


def locate_entry(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index along each dim; torch.unravel_index would import sympy for it."""
    out: list[int] = []
    for length in reversed(shape):
        flat, at = divmod(flat, length)
        out.append(at)
    return tuple(out[::-1])


def _compute_magnitude(entry: Tensor) -> float:
    """An entry as one real number: a complex one's absolute value."""
    return float(entry.abs() if entry.is_complex() else entry)


CommonIndices = tuple[int, ...] | None  # indices along a dim; None for all


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The common part of one tensor in one iteration, or in a part of it.

    Attributes:
        item: the tensor.
        iteration: the framework's number.
        a: from the first dump, without the dim of iterations.
        b: from the second dump.
        dims: their names.
        numbers: for each dim, the numbers of its entries: samples, token positions.
        picked_a: the indices along each dim of `a`.
        picked_b: likewise.
        microbatch: its number in the iteration, where a tensor has no samples.
        packed: whether it is one sequence, of which tokens are counted, and a run has it in a pack.
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
    packed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the common part."""
        return tuple(map(len, self.numbers))

    def read(self, block: Sequence[slice], memory: ReusedMemory | None = None) -> tuple[Tensor, Tensor]:
        """A block of both; only that block is read.

        Args:
            block: the entries of each dim.
            memory: provides memory for entries that are in several shards. The caller releases the two
                tensors after use. None allocates new memory.

        Returns:
            The two, which the caller does not write to, as they may be views of files.
        """
        return _read_indices(self.a, self.picked_a, block, memory), _read_indices(
            self.b, self.picked_b, block, memory
        )

    def blocks(self, most: int = COMPARE_BLOCK) -> Iterator[tuple[tuple[slice, ...], Tensor, Tensor]]:
        """All blocks, one after the other; the next one is read while the caller works on this one."""
        for block, (a, b) in read_ahead(split_into_blocks(self.shape, most), self.read):
            yield block, a, b

    def along(self, dim: str) -> int | None:
        """The index of a dim; None if there is none of that name."""
        return self.dims.index(dim) if dim in self.dims else None


@dataclass(slots=True)
class PairSums:
    """What one compared tensor's blocks add up to.

    Attributes:
        sums: over all entries.
        profile: by entry of each dim; None for integers and complex numbers.
        worst: the pair with the greatest difference.
    """

    sums: DifferenceSums
    profile: DifferenceProfile | None
    worst: TensorPair


@dataclass(frozen=True, slots=True)
class _PairBlock:
    """A block of a pair that is to be read.

    Attributes:
        pairs: of the tensor.
        pair: one of these.
        block: None for a tensor without entries.
        is_last: whether it is the tensor's last one.
    """

    pairs: Sequence[TensorPair]
    pair: TensorPair
    block: tuple[slice, ...] | None
    is_last: bool

    def is_small(self) -> bool:
        return self.block is None or math.prod(s.stop - s.start for s in self.block) < MIN_READ_AHEAD


def sum_differences(pairs: Sequence[TensorPair], most: int = COMPARE_BLOCK) -> PairSums:
    """Sums over all blocks of all pairs; each block is read once."""
    ((_, sums),) = sum_in_order([pairs], most)
    return sums


def sum_in_order(
    tensors: Iterable[Sequence[TensorPair]], most: int = COMPARE_BLOCK
) -> Iterator[tuple[Sequence[TensorPair], PairSums]]:
    """The pairs of one tensor after the other, with the sums over them.

    Each core reads and sums blocks, and the sums are added in order; the first blocks of a tensor are summed
    while the caller works on the tensor before.

    Args:
        tensors: the pairs of each tensor, which are asked for as many tensors ahead as there are threads.
        most: bytes of a block in fp64.
    """
    blocks = (block_sums for pairs in tensors for block_sums in _list_blocks(pairs, most))
    memory = ReusedMemory()
    out: PairSums | None = None

    def read(item: _PairBlock) -> tuple[Tensor, Tensor, BlockSums | None] | None:
        if item.block is None:
            return None
        a, b = item.pair.read(item.block, memory)
        return a, b, sum_real_block(a, b)

    threads = max(1, min(MAX_THREADS, os.cpu_count() or 1))
    for item, values in read_ahead(blocks, read, _PairBlock.is_small, threads):
        out = out or _make_sums(item.pairs)
        if item.block is not None and values is not None:
            sums = out.sums
            before = sums.worst, sums.values, sums.broken
            places = [] if out.profile is None else _locate_entries(out.profile, item.pair, item.block)
            a, b, block_sums = values
            sums.add(a, b, tuple(s.start for s in item.block), out.profile, places, block_sums)
            if (sums.worst, sums.values, sums.broken) != before:
                out.worst = item.pair
            memory.release(a, b)
            del values, a, b, block_sums
        if item.is_last:
            yield item.pairs, out
            out = None


def _list_blocks(pairs: Sequence[TensorPair], most: int) -> list[_PairBlock]:
    """The blocks of all pairs of a tensor. Of a tensor without entries, one item with `block` None."""
    pair_blocks = [(pair, block) for pair in pairs for block in split_into_blocks(pair.shape, most)]
    last = len(pair_blocks) - 1
    return [_PairBlock(pairs, pair, block, n == last) for n, (pair, block) in enumerate(pair_blocks)] or [
        _PairBlock(pairs, pairs[0], None, True)
    ]


def _make_sums(pairs: Sequence[TensorPair]) -> PairSums:
    real = bool(pairs[0].dims) and all(d.is_floating_point for p in pairs for d in (p.a.dtype, p.b.dtype))
    return PairSums(DifferenceSums(), make_profile(pairs) if real else None, pairs[0])


def make_profile(pairs: Sequence[TensorPair]) -> DifferenceProfile:
    """An empty profile over the entries of all pairs; several microbatches are a dim of their own."""
    dims, numbers = pairs[0].dims, [p.numbers for p in pairs]
    known = tuple(_unite([n[at] for n in numbers]) for at in range(len(dims)))
    if pairs[0].microbatch is None:
        return DifferenceProfile(dims, known)
    return DifferenceProfile((MICROBATCH_AXIS, *dims), (tuple(range(len(pairs))), *known))


def _unite(numbers: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """All numbers in order; each argument is in order."""
    first = numbers[0]
    return first if all(n is first for n in numbers) else tuple(sorted(set().union(*numbers)))


def _locate_entries(profile: DifferenceProfile, pair: TensorPair, block: Sequence[slice]) -> list[Tensor]:
    """For each dim of the profile the indices of the entries of a pair's block."""
    known = profile.numbers[len(profile.numbers) - len(pair.numbers) :]
    out = [] if pair.microbatch is None else [torch.tensor([pair.microbatch])]
    for numbers, every, part in zip(pair.numbers, known, block, strict=True):
        if numbers == every:
            out.append(torch.arange(part.start, part.stop))
        else:
            out.append(torch.tensor([bisect_left(every, n) for n in numbers[part]], dtype=torch.int64))
    return out


def align_arrays(
    item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray, iteration_b: int | None = None
) -> list[TensorPair] | str:
    """Align two arrays.

    Args:
        item: the tensor.
        iteration: a common iteration.
        a: over iterations.
        b: likewise.
        iteration_b: the iteration of `b`; None for the same.

    Returns:
        The common part: usually one pair; one for each sample where tokens were selected by sample, one
        for each microbatch where there are no samples. Or a text with the reason why there is none.
    """
    array_a, array_b = a.at(iteration), b.at(iteration if iteration_b is None else iteration_b)
    if any(x.packed or x.ragged for x in (array_a, array_b)) and TOKEN_AXIS in (*array_a.dims, *array_b.dims):
        return _align_by_sequence(item, iteration, array_a, array_b)
    if MICROBATCH_AXIS in (*array_a.dims, *array_b.dims):
        return _align_by_microbatch(item, iteration, array_a, array_b)
    return _align_by_label(item, iteration, array_a[0], array_b[0])


def _align_by_sequence(
    item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray
) -> list[TensorPair] | str:
    """Where a run packs sequences: sequence by sequence, its samples against those of a run without packs."""
    if TOKEN_AXIS not in a.dims or TOKEN_AXIS not in b.dims:
        return f"dims {', '.join(a.dims)} in A and {', '.join(b.dims)} in B"
    left, right = ({s.sequence: s for s in x.sequence_arrays()} for x in (a, b))
    if left.keys() != right.keys():
        return f"{len(left)} sequences in A and {len(right)} in B: the two runs do not have the same ones"
    out: list[TensorPair] = []
    for number, sequence_a in left.items():
        sides = [sequence_a, right[number]]
        labels = [[(number,), *_list_labels(s.array)[1:]] for s in sides]
        for side, side_labels in zip(sides, labels, strict=True):
            side_labels[1] = tuple(int(p) for p in side.positions.tolist())
        pair = _make_pair(item, iteration, sequence_a.array, right[number].array, labels[0], labels[1])
        if isinstance(pair, str):
            return f"{pair} (sequence {number})"
        out.append(replace(pair, dims=(SAMPLE_AXIS, *pair.dims[1:]), packed=True))
    return out


def _align_by_microbatch(
    item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray
) -> list[TensorPair] | str:
    left, right = ([piece.array for piece in x.microbatch_arrays()] for x in (a, b))
    if len(left) != len(right):
        return f"{len(left)} microbatches in A and {len(right)} in B, and no samples to tell them by"
    out: list[TensorPair] = []
    for number, (microbatch_a, microbatch_b) in enumerate(zip(left, right, strict=True)):
        pairs = _align_by_label(item, iteration, microbatch_a, microbatch_b, number)
        if isinstance(pairs, str):
            return f"{pairs} (microbatch {number})"
        out += pairs
    return out


def _align_by_label(
    item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray, microbatch: int | None = None
) -> list[TensorPair] | str:
    marks = [[d if d in (SAMPLE_AXIS, TOKEN_AXIS) else "" for d in x.dims] for x in (a, b)]
    if marks[0] != marks[1]:
        return f"dims {', '.join(a.dims)} in A and {', '.join(b.dims)} in B"
    if any(t is not None and t.ndim == 2 for t in (a.tokens, b.tokens)):
        return _align_by_sample(item, iteration, a, b)
    pair = _make_pair(item, iteration, a, b, _list_labels(a), _list_labels(b), microbatch)
    return pair if isinstance(pair, str) else [pair]


def _list_labels(array: DumpArray) -> list[tuple[int, ...]]:
    """The names of the entries of each dim."""
    known = {SAMPLE_AXIS: array.samples, TOKEN_AXIS: array.tokens}
    labels = [known.get(d) for d in array.dims]
    return [
        _count_up(n) if t is None else _share(tuple(t.tolist()))
        for n, t in zip(array.shape, labels, strict=True)
    ]


@lru_cache(maxsize=32)
def _count_up(length: int) -> tuple[int, ...]:
    """The numbers of a full dim: one object for each length, as a dim of features or tokens has many."""
    return tuple(range(length))


def _share(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The object of `_count_up` where the numbers are equal to it."""
    if not numbers or numbers[0] != 0 or numbers[-1] != len(numbers) - 1:
        return numbers
    full = _count_up(len(numbers))
    return full if numbers == full else numbers


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
    for dim, labels_a, labels_b in zip(a.dims, numbers_a, numbers_b, strict=True):
        if dim not in (SAMPLE_AXIS, TOKEN_AXIS) and len(labels_a) != len(labels_b):
            return f"{len(labels_a)} entries along {dim!r} in A and {len(labels_b)} in B"
        full = labels_a is labels_b and labels_a is _count_up(len(labels_a))
        both = labels_a if full else tuple(sorted(set(labels_a) & set(labels_b)))
        if not both and (labels_a or labels_b):
            return f"no {dim} that both have"
        numbers.append(both)
    indices_a, indices_b = (
        tuple(_find_common_indices(n, w) for n, w in zip(x, numbers, strict=True))
        for x in (numbers_a, numbers_b)
    )
    return TensorPair(item, iteration, a, b, tuple(a.dims), tuple(numbers), indices_a, indices_b, microbatch)


def _align_by_sample(
    item: ComparedTensor, iteration: int, a: DumpArray, b: DumpArray
) -> list[TensorPair] | str:
    """Where the tokens were selected by sample: sample by sample."""
    split = [{number: (row, tokens) for number, row, tokens in _iterate_samples(x)} for x in (a, b)]
    out = []
    for number in sorted(split[0].keys() & split[1].keys()):
        sides, labels = [], []
        for array, rows in zip((a, b), split, strict=True):
            row, tokens = rows[number]
            sides.append(array[row : row + 1])
            labels.append([(number,), tokens, *(tuple(range(n)) for n in array.shape[2:])])
        pair = _make_pair(item, iteration, sides[0], sides[1], labels[0], labels[1])
        if not isinstance(pair, str):
            out.append(pair)
    return out or "no sample and token that both have"


def _iterate_samples(array: DumpArray) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """For an array over samples, tokens, ...: each sample's number, its index, and its tokens' positions."""
    samples, tokens = array.samples, array.tokens
    assert samples is not None, "tokens are drawn by sample"
    assert tokens is not None
    for row, number in enumerate(samples.tolist()):
        positions = tokens[row] if tokens.ndim == 2 else tokens
        yield int(number), row, tuple(int(i) for i in positions.tolist())


def _find_common_indices(numbers: tuple[int, ...], common: tuple[int, ...]) -> CommonIndices:
    if numbers == common:
        return None
    places = {n: i for i, n in enumerate(numbers)}
    return tuple(places[n] for n in common)


def _read_indices(
    array: DumpArray, picked: Sequence[CommonIndices], block: Sequence[slice], memory: ReusedMemory | None
) -> Tensor:
    index = [part if p is None else list(p[part]) for p, part in zip(picked, block, strict=True)]
    selected = array[tuple(index)]
    view = selected.mapped()
    if view is not None:
        return view
    return selected.torch(out=None if memory is None else memory.take(selected.shape, selected.dtype))
