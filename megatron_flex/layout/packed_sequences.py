"""Packed sequences: several sequences one after the other in one row of tokens, and where each begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout.algebra import Cut, Dim, Layout, Span

TOKEN_DIM = "s"
UNEVEN_PACK = (
    "packed sequences of {lengths} tokens, of which number {number} has {length}: context_parallel_size="
    "{size} shards each sequence into {parts} equal chunks; pad each to a multiple of {parts} and pass the "
    "padded lengths as cu_seqlens_q_padded"
)
MAX_PACKS = 256  # packs whose layouts are kept; one for each microbatch of a step


@dataclass(frozen=True)
class PackedSequences:
    """The sequences of one packed microbatch, as the model was called with them.

    The row of tokens has `t` entries. Sequence i has the tokens `spans[i]` of it; the padding after a
    sequence, and after the last one, belongs to none.

    Attributes:
        spans: the first token and the end of each sequence, without its padding.
        padded: the lengths of the sequences with their padding; context parallel ranks shard each of them.
        by_sequence: whether context parallel ranks shard each sequence separately, or else the row.

    Examples:
        >>> from megatron_flex import PackedSequences
        >>> pack = PackedSequences.from_ends([0, 3, 7], padded=[0, 4, 8])
        >>> pack.spans, pack.lengths
        (((0, 3), (4, 8)), (3, 4))
    """

    spans: tuple[Span, ...]
    padded: tuple[int, ...]
    by_sequence: bool = True
    _layouts: dict[Layout, Layout] = field(default_factory=dict, init=False, compare=False, repr=False)

    @staticmethod
    def from_ends(
        ends: Iterable[int], padded: Iterable[int] | None = None, by_sequence: bool = True
    ) -> PackedSequences:
        """Make the description from cumulative lengths, as Megatron's `PackedSeqParams` has them.

        Args:
            ends: `cu_seqlens_q`: 0, and the number of tokens up to the end of each sequence, without padding.
                Sequences of no tokens at the end are left out: they fill up a tensor of fixed size.
            padded: `cu_seqlens_q_padded`: the same with the padding after each sequence; None without any.
            by_sequence: as the attribute.

        Returns:
            The description; the same object for equal arguments, as long as it is remembered.

        Raises:
            LayoutError: the numbers do not describe a pack.

        Examples:
            >>> from megatron_flex import PackedSequences
            >>> PackedSequences.from_ends([0, 5, 16, 16]).lengths
            (5, 11)
        """
        real = tuple(int(n) for n in ends)
        return _make(real, real if padded is None else tuple(int(n) for n in padded), by_sequence)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sequence, without padding."""
        return tuple(stop - start for start, stop in self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def __str__(self) -> str:
        """The lengths of the sequences, and of the row."""
        return f"sequences of {', '.join(map(str, self.lengths))} tokens in a row of {sum(self.padded)}"

    def unpack(self, tensor: Tensor, dim: int = 0) -> list[Tensor]:
        """Split a full tensor into its sequences.

        Args:
            tensor: a full tensor of the pack, `[t, 1, h]`, `[t, n, d]` or the like.
            dim: the dim of tokens.

        Returns:
            A view of the tensor for each sequence, without padding.

        Raises:
            LayoutError: the tensor has fewer tokens than the pack.

        Examples:
            >>> import torch
            >>> from megatron_flex import PackedSequences
            >>> pack = PackedSequences.from_ends([0, 3, 7], padded=[0, 4, 8])
            >>> [tuple(t.shape) for t in pack.unpack(torch.zeros(8, 1, 32))]
            [(3, 1, 32), (4, 1, 32)]
        """
        length = tensor.shape[dim]
        if self.spans and length < self.spans[-1][1]:
            raise LayoutError(
                f"a tensor of shape {tuple(tensor.shape)} has {length} entries in dim {dim}, and the pack "
                f"has {self.spans[-1][1]} tokens; give the full tensor and its dim of tokens",
                dim=dim,
            )
        return [tensor.narrow(dim, start, stop - start) for start, stop in self.spans]

    def positions(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Find the sequence and the position of each token of the row.

        Args:
            length: tokens of the row; None for those of the sequences with their padding.

        Returns:
            The number of the sequence, and the position in it, of each token `[t]`; -1 for padding.

        Examples:
            >>> from megatron_flex import PackedSequences
            >>> sequence, position = PackedSequences.from_ends([0, 2, 5], padded=[0, 3, 6]).positions()
            >>> sequence.tolist(), position.tolist()
            ([0, 0, -1, 1, 1, 1], [0, 1, -1, 0, 1, 2])
        """
        sequence = torch.full((sum(self.padded) if length is None else length,), -1)
        position = sequence.clone()
        for number, (start, stop) in enumerate(self.spans):
            sequence[start:stop] = number
            position[start:stop] = torch.arange(stop - start)
        return sequence, position

    def layout_of(self, layout: Layout) -> Layout:
        """Return the layout of a tensor of this pack at a place where `layout` has sequences unpacked.

        Args:
            layout: the layout of the place; dims called `s` count tokens.

        Returns:
            The layout with the sequences: context parallel ranks shard each of them in a zigzag of its own.

        Examples:
            >>> from megatron_flex import PackedSequences
            >>> from megatron_flex.layout import Cut, Dim, Layout
            >>> stream = Layout((Dim("s", (Cut("cp", "zigzag"),)), Dim("b"), Dim("h")))
            >>> PackedSequences.from_ends([0, 4, 12]).layout_of(stream).describe()
            '[s/cp zigzag in each of 2 sequences, b, h]'
        """
        packed = self._layouts.get(layout)
        if packed is None:
            packed = replace(layout, dims=tuple(self._dim_of(d) for d in layout.dims))
            self._layouts[layout] = self._layouts[packed] = packed
        return self._layouts[layout]

    def _dim_of(self, dim: Dim) -> Dim:
        if dim.uneven:
            return dim
        cuts = tuple(self._cut_of(c) for c in dim.cuts)
        return replace(dim, cuts=cuts, sequences=self.spans if dim.name == TOKEN_DIM else ())

    def _cut_of(self, cut: Cut) -> Cut:
        zigzag = cut.order == "zigzag" and self.by_sequence
        return replace(cut, segments=tuple(n for n in self.padded if n)) if zigzag else cut


def explain_uneven_sequence(pack: PackedSequences, context_parallel: int) -> str:
    """Why context parallel ranks cannot shard each sequence of a pack; empty if they can.

    Args:
        pack: the packed sequences.
        context_parallel: the number of context parallel ranks.
    """
    parts = 2 * context_parallel
    if context_parallel == 1 or not pack.by_sequence:
        return ""
    for number, length in enumerate(pack.padded):
        if length % parts:
            values = {"lengths": list(pack.padded), "number": number, "length": length}
            return UNEVEN_PACK.format(**values, size=context_parallel, parts=parts)
    return ""


@lru_cache(MAX_PACKS)
def _make(ends: tuple[int, ...], padded: tuple[int, ...], by_sequence: bool) -> PackedSequences:
    if len(ends) != len(padded):
        raise LayoutError(
            f"cu_seqlens_q of {len(ends)} entries and cu_seqlens_q_padded of {len(padded)}; they must have "
            "one for each sequence and one more"
        )
    real, room = _lengths(ends, "cu_seqlens_q"), _lengths(padded, "cu_seqlens_q_padded")
    if any(n > m for n, m in zip(real, room, strict=True)):
        raise LayoutError(
            f"sequences of {real} tokens do not fit into {room}, which they have with their padding: correct "
            "cu_seqlens_q_padded"
        )
    while real and not real[-1]:
        real.pop()
    starts = padded[: len(real)]
    spans = tuple((start, start + n) for start, n in zip(starts, real, strict=True))
    return PackedSequences(spans, tuple(room), by_sequence)


def _lengths(ends: Sequence[int], name: str) -> list[int]:
    if not ends or ends[0] != 0 or any(a > b for a, b in pairwise(ends)):
        raise LayoutError(
            f"{name}={list(ends)} must begin with 0 and not decrease: it counts the tokens up to the end of "
            "each sequence"
        )
    return [b - a for a, b in pairwise(ends)]
