"""Why two digests of a parameter differ: moved blocks, another parameter, a transposed matrix, a factor.

Blocks that are equal or have moved are known by their checksums, which cover all bytes. The other causes are
tested on the sampled entries of those blocks that differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_flex.compare.block_sums import find_on_grid
from megatron_flex.compare.error_patterns import find_constant_factor, list_entries
from megatron_flex.conversion import Heads
from megatron_flex.conversion.conversion_plan import VOCABULARIES
from megatron_flex.weights.parameter_digest import (
    GROUP_ROWS,
    QUERY_ROWS,
    ROUTER,
    VOCABULARY_ROWS,
    ParameterDigest,
    ParameterForm,
    choose_entries,
    count_block_rows,
    split_checksums,
)

EXPERT = re.compile(r"(?P<layer>.*\.experts)\.local_experts\.(?P<expert>\d+)\.(?P<part>.+)")
MIN_SAMPLED = 8  # entries, fewer of which show no cause
FEW = 0.1  # of the sampled entries
ON_GRID = 0.5  # of the entries of a tensor that is not rounded
ROUNDED_SHARE = 0.5  # of the entries, whose distance is that of one rounding; of subnormal ones it is more
RELATED = 0.7  # the cosine of weights of two steps of one run; that of unrelated ones is nearly 0
NARROWER = {2: "fp8 e5m2", 3: "fp8 e4m3", 7: "bf16", 10: "fp16 or tf32"}  # by bits of the mantissa
MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


@dataclass(frozen=True)
class WeightDifference:
    """A parameter that differs.

    Attributes:
        name: the parameter of a GPTModel with the local spec, and which of its matrices.
        stored: the names of its tensors in A, and in B.
        cause: `swapped`, `permuted experts`, `permuted heads`, `permuted rows`, `repeated`, `transposed`,
            `zero`, `not finite`, `rounded`, `scaled`, `few entries`, `stale` or `unrelated`.
        text: the cause in words.
        blocks: the numbers of the blocks of rows that differ; empty if the shapes differ.
    """

    name: str
    stored: tuple[str, str]
    cause: str
    text: str
    blocks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """In plain values."""
        return {"name": self.name, "stored": self.stored, "cause": self.cause, "text": self.text}


class Explainer:
    """Explains the differences of the parameters of two digests.

    Args:
        a: the digests of A, by name.
        heads: the heads of attention; None if they are not known.
    """

    def __init__(self, a: Mapping[str, ParameterDigest], heads: Heads | None) -> None:
        self._heads = heads
        self._by_checksum: dict[tuple[ParameterForm, str], list[str]] = {}
        for name, digest in a.items():
            self._by_checksum.setdefault((digest.form, digest.checksum), []).append(name)

    def explain(self, name: str, a: ParameterDigest, b: ParameterDigest) -> WeightDifference | None:
        """The difference of a parameter; None if it is equal."""
        if a == b or (a.form == b.form and a.blocks == b.blocks):
            return None
        stored = a.stored, b.stored
        if len(a.blocks) != len(b.blocks) or a.shape != b.shape:
            return self._explain_forms(name, a, b)
        blocks_a, blocks_b = split_checksums(a.blocks), split_checksums(b.blocks)
        differing = [i for i, (one, other) in enumerate(zip(blocks_a, blocks_b, strict=True)) if one != other]
        cause, text = (
            self._find_source(name, b)
            or self._find_moves(name, a, b, differing)
            or self._explain_entries(name, a, b, differing)
        )
        return WeightDifference(name, stored, cause, text, tuple(differing))

    def _explain_forms(self, name: str, a: ParameterDigest, b: ParameterDigest) -> WeightDifference | None:
        """The difference of two shapes: a transposed matrix, or a vocabulary with other rows."""
        stored = a.stored, b.stored
        if name in VOCABULARIES and a.shape[1:] == b.shape[1:]:
            return self._explain_rows(name, a, b)
        narrow = min(a.form.dtype, b.form.dtype, key=lambda dtype: dtype.itemsize)
        same = torch.equal(_bits(a.entries()[1].to(narrow)), _bits(b.entries()[0].to(narrow)))
        cause = "transposed" if same else "unrelated"
        text = f"B has shape {b.shape}, A {a.shape}: B is {'A transposed' if same else 'not A transposed'}"
        return WeightDifference(name, stored, cause, text)

    def _find_source(self, name: str, b: ParameterDigest) -> tuple[str, str] | None:
        """Whether B has here what A has elsewhere."""
        sources = [n for n in self._by_checksum.get((b.form, b.checksum), ()) if n != name]
        sampled = b.entries()[0]
        if not sources or bool((sampled == sampled[:1]).all()):
            return None  # norms and biases that nothing has trained are all alike
        here = EXPERT.fullmatch(name)
        for source in sources:
            there = EXPERT.fullmatch(source)
            if here and there and (here["layer"], here["part"]) == (there["layer"], there["part"]):
                return "permuted experts", f"expert {here['expert']} of B is expert {there['expert']} of A"
        return "swapped", f"B has A's {sources[0]} here"

    def _find_moves(
        self, name: str, a: ParameterDigest, b: ParameterDigest, differing: Sequence[int]
    ) -> tuple[str, str] | None:
        """Whether blocks of rows, or columns of heads, are those of A in another order."""
        rows = _match_blocks(split_checksums(a.blocks), split_checksums(b.blocks), differing)
        if rows:
            kind, labels = self._name_blocks(name, a.shape)
            moved = [f"{labels[to]}<-{labels[source]}" for to, source in rows]
            again = {source for _, source in rows} != set(differing)
            cause = "repeated" if again else f"permuted {kind}"
            return cause, f"{kind} are {'repeated' if again else 'permuted'} (B<-A): {list_entries(moved)}"
        columns_a, columns_b = split_checksums(a.columns), split_checksums(b.columns)
        if len(columns_a) != len(columns_b):
            return None
        wrong = [i for i, (one, other) in enumerate(zip(columns_a, columns_b, strict=True)) if one != other]
        moves = _match_blocks(columns_a, columns_b, wrong)
        if not moves:
            return None
        text = list_entries([f"{to}<-{source}" for to, source in moves])
        return "permuted heads", f"the columns of heads are permuted (B<-A): {text}"

    def _name_blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, list[str]]:
        """What the blocks are, and the name of each."""
        rows, heads = shape[0] if shape else 1, self._heads
        size = count_block_rows(name, rows, heads)
        count = -(-rows // size)
        if heads is not None and name.endswith((*QUERY_ROWS, *GROUP_ROWS)):
            return "heads", [str(n) for n in range(count)]
        if ROUTER in name and size == 1:
            return "experts", [str(n) for n in range(count)]
        starts = range(0, rows, size)
        return "rows", [f"{start}..{min(start + size, rows) - 1}" for start in starts]

    def _explain_rows(self, name: str, a: ParameterDigest, b: ParameterDigest) -> WeightDifference | None:
        """The difference of vocabularies, one of which is padded, in their common blocks of rows."""
        size = VOCABULARY_ROWS
        full = min(a.shape[0], b.shape[0]) // size
        blocks_a, blocks_b = split_checksums(a.blocks)[:full], split_checksums(b.blocks)[:full]
        differing = [i for i, (one, other) in enumerate(zip(blocks_a, blocks_b, strict=True)) if one != other]
        if not differing or a.dtype != b.dtype:
            return None
        where = self._describe_place(name, (full * size, *a.shape[1:]), differing)
        text = f"the common rows differ{where}; B has {b.shape[0]} rows, A {a.shape[0]}"
        return WeightDifference(name, (a.stored, b.stored), "few entries", text, tuple(differing))

    def _describe_place(self, name: str, shape: tuple[int, ...], differing: Sequence[int]) -> str:
        """The blocks that differ, if not all do."""
        kind, labels = self._name_blocks(name, shape)
        if len(differing) == len(labels):
            return ""
        return f" in {kind} {list_entries([labels[i] for i in differing])} only"

    def _explain_entries(
        self, name: str, a: ParameterDigest, b: ParameterDigest, differing: Sequence[int]
    ) -> tuple[str, str]:
        """The cause that the sampled entries of the differing blocks show."""
        one, transposed = a.entries()
        other = b.entries()[0]
        if a.dtype != b.dtype:
            return _explain_dtypes(one, other)
        if len(a.shape) == 2 and torch.equal(_bits(transposed), _bits(other)):
            return "transposed", "B is A transposed"
        size = count_block_rows(name, a.shape[0] if a.shape else 1, self._heads)
        places = choose_entries(a.shape)[: len(one)] // max(1, math.prod(a.shape[1:])) // size
        inside = torch.isin(places, torch.tensor(list(differing)))
        cause, text = explain_sample(one[inside], other[inside])
        return cause, text + self._describe_place(name, a.shape, differing)


def _match_blocks(a: Sequence[str], b: Sequence[str], differing: Sequence[int]) -> list[tuple[int, int]]:
    """Each differing block of B with the block of A that it is; nothing unless all of them are A's."""
    at = {checksum: i for i, checksum in reversed(list(enumerate(a)))}
    if len(differing) < 1 or any(b[i] not in at for i in differing):
        return []
    return [(i, at[b[i]]) for i in differing]


def explain_sample(one: Tensor, other: Tensor) -> tuple[str, str]:
    """The cause that entries of a parameter of A and B show.

    Args:
        one: of A.
        other: of B, at the same places.
    """
    a, b = one.double(), other.double()
    wrong = _bits(one) != _bits(other)
    count, changed = len(a), int(wrong.sum())
    if not (a.isfinite().all() and b.isfinite().all()):
        which = "A" if b.isfinite().all() else "B"
        return "not finite", f"{which} has entries that are NaN or infinite"
    if changed <= FEW * count or count < MIN_SAMPLED:
        return "few entries", f"few entries differ: {changed} of the {count} that were sampled there"
    if not b.any() or not a.any():
        return "zero", f"all sampled entries of {'A' if b.any() else 'B'} are 0"
    if (text := _find_rounding(one, other)) is not None:
        return "rounded", text
    factor = float(a @ b / (a @ a))
    unit = 2.0 ** -MANTISSA.get(one.dtype, 52)
    rest = float((b - factor * a).norm() / b.norm())
    if text := find_constant_factor(factor, rest, {}, 2 * unit, unit):
        return "scaled", text
    relative = float((b - a).norm() / a.norm())
    if float(a @ b / (a.norm() * b.norm())) >= RELATED:
        return "stale", f"B differs by {relative:.2g} of A, as the weights of another step do"
    return "unrelated", "B is unrelated to A: another model's weights, or weights that were never loaded"


def _find_rounding(one: Tensor, other: Tensor) -> str | None:
    """Whether one of the two is the other, rounded to a narrower dtype."""
    mantissa = MANTISSA.get(one.dtype)
    for run, rounded, exact in (("B", other, one), ("A", one, other)):
        for kept, grid in NARROWER.items() if mantissa is not None else ():
            if mantissa is None or kept >= mantissa or not find_on_grid(rounded, mantissa - kept).all():
                continue
            if float(find_on_grid(exact, mantissa - kept).double().mean()) > ON_GRID:
                break
            distance = (rounded.double() - exact.double()).abs()
            near = distance <= 2.0**-kept * exact.double().abs()
            if float(near.double().mean()) >= ROUNDED_SHARE:
                return f"{run} is {'A' if run == 'B' else 'B'} rounded to {grid}"
            break
    return None


def _explain_dtypes(one: Tensor, other: Tensor) -> tuple[str, str]:
    """The cause where dtypes differ: entries are compared in the narrower one."""
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    a, b = one.to(narrow), other.to(narrow)
    kinds = f"A is {str(one.dtype).removeprefix('torch.')}, B {str(other.dtype).removeprefix('torch.')}"
    if torch.equal(_bits(a), _bits(b)):
        return "rounded", f"{kinds}; all sampled entries are equal after rounding"
    cause, text = explain_sample(a, b)
    return cause, f"{kinds}; {text}"


def _bits(values: Tensor) -> Tensor:
    """The bits of each entry, as integers."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return values.contiguous().view(kinds[values.itemsize])
