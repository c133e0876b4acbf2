"""The digest of one matrix of the full model: checksums of blocks of its rows, and a sample of its entries.

A block is what may have moved as one: a head of queries, keys or values, an expert's row of a router, or a
sixteenth of the rows. The checksums show which blocks are equal and which have moved; the sample shows how
the others differ. Rows are read once, in pieces.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from megatron_flex.checksums import CHECKSUM_DIGITS, combine_block_checksums
from megatron_flex.conversion import Heads
from megatron_flex.conversion.conversion_plan import VOCABULARIES

PIECE_BYTES = 4 << 20  # that are read and hashed at a time; they fit into a CPU's cache
SAMPLE_ENTRIES = 128  # of a parameter, and as many of its transposed matrix
GOLDEN = 0x9E3779B97F4A7C15  # multiples of it, modulo 2^64, are spread evenly
SPREAD = [(GOLDEN * n) % (1 << 64) for n in range(1, SAMPLE_ENTRIES + 1)]
MAX_PARTS = 16  # blocks of a parameter whose rows have no meaning of their own
VOCABULARY_ROWS = 16  # in a block; a padded vocabulary has the same blocks, and more of them
COLUMN_ROWS = 16  # rows of which the blocks of columns are hashed
MAX_EXPERTS = 4096  # rows of a router that are blocks of their own
QUERY_ROWS = ("[q]", "linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight")
GROUP_ROWS, PROJECTION, ROUTER = ("[k]", "[v]"), ".linear_proj.weight", "mlp.router."

ReadRows = Callable[[int, int], Tensor]  # the rows of a full parameter from the first number to the second


class ParameterForm(NamedTuple):
    """The shape and the dtype of a full parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ParameterDigest:
    """The digest of a full parameter.

    Attributes:
        shape: its shape, without rows that pad a vocabulary where they are known.
        dtype: its dtype, without `torch.`.
        blocks: the checksums of its blocks of rows, one after the other.
        sample: some entries, and some of the transposed matrix, as base64 of their bytes.
        columns: the checksums of blocks of columns, of some rows; empty unless they belong to heads.
        stored: the names of the tensors that it was read from.
    """

    shape: tuple[int, ...]
    dtype: str
    blocks: str
    sample: str
    columns: str = ""
    stored: str = ""

    @property
    def form(self) -> ParameterForm:
        """The shape and the dtype."""
        return ParameterForm(self.shape, getattr(torch, self.dtype))

    @property
    def checksum(self) -> str:
        """The checksum of all bytes."""
        return combine_block_checksums(self.blocks)

    def entries(self) -> tuple[Tensor, Tensor]:
        """The sampled entries, and those at the same places of the transposed matrix."""
        flat = torch.frombuffer(bytearray(b64decode(self.sample)), dtype=self.form.dtype)
        return flat[: len(flat) // 2], flat[len(flat) // 2 :]


def split_checksums(blocks: str) -> list[str]:
    """The checksum of each block."""
    return [blocks[at : at + CHECKSUM_DIGITS] for at in range(0, len(blocks), CHECKSUM_DIGITS)]


def count_block_rows(name: str, rows: int, heads: Heads | None) -> int:
    """The number of rows in a block.

    Args:
        name: the parameter, as a GPTModel with the local spec has it.
        rows: its rows.
        heads: those of attention; None if they are not known.
    """
    if name in VOCABULARIES:
        return VOCABULARY_ROWS
    parts = next((n for n in range(MAX_PARTS, 1, -1) if rows % n == 0), MAX_PARTS)
    if ROUTER in name and rows <= MAX_EXPERTS:
        parts = rows
    elif heads is not None and name.endswith(QUERY_ROWS):
        parts = heads.queries
    elif heads is not None and name.endswith(GROUP_ROWS):
        parts = heads.groups
    return max(1, math.ceil(rows / max(1, parts)))


def count_column_heads(name: str, shape: tuple[int, ...], heads: Heads | None) -> int:
    """The number of heads that the columns belong to; 0 if they do not."""
    of_heads = name.endswith(PROJECTION) and len(shape) == 2
    return heads.queries if heads is not None and of_heads and shape[1] % heads.queries == 0 else 0


def digest_parameter(
    name: str, form: ParameterForm, read: ReadRows, heads: Heads | None, stored: str = ""
) -> ParameterDigest:
    """Read a full parameter once, and digest it.

    Args:
        name: its name, as a GPTModel with the local spec has it.
        form: its shape and dtype.
        read: reads some of its rows, in this dtype.
        heads: those of attention; None if they are not known.
        stored: the names of the tensors that it is read from.
    """
    rows = form.shape[0] if form.shape else 1
    size = count_block_rows(name, rows, heads)
    sample = _Sample(form)
    column_heads, columns = count_column_heads(name, form.shape, heads), _Columns(rows)
    checksums, state = [], xxh3_64()
    row_bytes = math.prod(form.shape[1:]) * form.dtype.itemsize
    for first, last in _split_rows(rows, size, row_bytes):
        piece = read(first, last).contiguous()
        sample.take(first, piece)
        if column_heads:
            columns.take(first, piece)
        data = memoryview(piece.reshape(-1).view(torch.uint8).numpy())
        for start in range(first - first % size, last, size):
            begin, end = max(start, first), min(start + size, last)
            block = data[(begin - first) * row_bytes : (end - first) * row_bytes]
            if end == begin + size:  # in one call, which takes less time for blocks of a few rows
                checksums.append(xxh3_64_hexdigest(block))
                continue
            state.update(block)
            if end in (start + size, rows):
                checksums.append(state.hexdigest())
                state.reset()
    return ParameterDigest(
        form.shape,
        str(form.dtype).removeprefix("torch."),
        "".join(checksums),
        b64encode(sample.entries.view(torch.uint8).numpy().tobytes()).decode(),
        columns.checksums(column_heads) if column_heads else "",
        stored,
    )


def _split_rows(rows: int, size: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Pieces of rows: of several blocks, or of a part of one."""
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    if step > size:
        step -= step % size
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def choose_entries(shape: tuple[int, ...]) -> Tensor:
    """Places of entries in the flat parameter, and the places of the same entries of the transposed matrix.

    They depend on the shape alone. Entry `i` of the second half is what entry `i` of the first half would be
    if the matrix were transposed, whatever shape it is then given.
    """
    count = math.prod(shape)
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    places = torch.tensor([spread * count >> 64 for spread in SPREAD])
    if len(shape) != 2:
        return torch.cat([places, places])
    rows, columns = shape
    return torch.cat([places, places % rows * columns + places // rows])


class _Sample:
    """Takes the sampled entries out of pieces of a parameter."""

    def __init__(self, form: ParameterForm) -> None:
        self._places, self._order = choose_entries(form.shape).sort()
        self._numbers = self._places.tolist()
        self._width = math.prod(form.shape[1:])
        self.entries = torch.zeros(len(self._numbers), dtype=form.dtype)

    def take(self, first: int, piece: Tensor) -> None:
        start = first * self._width
        low = bisect_left(self._numbers, start)
        high = bisect_left(self._numbers, start + piece.numel())
        if low < high:
            self.entries[self._order[low:high]] = piece.reshape(-1)[self._places[low:high] - start]


class _Columns:
    """Keeps some rows, and hashes the columns of each head in them."""

    def __init__(self, rows: int) -> None:
        step = max(1, rows // COLUMN_ROWS)
        self._chosen = range(0, rows, step)[:COLUMN_ROWS]
        self._rows: list[Tensor] = []

    def take(self, first: int, piece: Tensor) -> None:
        self._rows += [
            piece[row - first].clone() for row in self._chosen if first <= row < first + len(piece)
        ]

    def checksums(self, heads: int) -> str:
        by_head = torch.stack(self._rows).unflatten(1, (heads, -1)).movedim(1, 0).contiguous()
        return "".join(xxh3_64_hexdigest(head.reshape(-1).view(torch.uint8).numpy()) for head in by_head)
