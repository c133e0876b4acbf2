"""One tensor of one microbatch on one replica, assembled from shards, and its mean over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_flex.dump.part_format import StoredPart
from megatron_flex.dump.reader.shard_files import LocatedShard, PartFiles
from megatron_flex.dump.schema import ShardEntry
from megatron_flex.dump.token_selection import SAMPLE_DIM, TOKEN_DIM, EntrySelection, find_dim
from megatron_flex.errors import DumpError, LayoutError
from megatron_flex.layout import (
    Coords,
    DimIndex,
    Layout,
    RegionIndex,
    Sizes,
    assemble_region,
    compact_index,
    coordinates,
    find_region,
    first_copy,
    full_order,
    full_shape,
    padded_shape,
    uneven_lengths,
)

EntrySelector = Any  # (layout, local shape, coords) -> Picked | None


@dataclass(slots=True)
class StoredShard:
    """What one rank wrote of a tensor: one entry, or several that follow one another, counted flat."""

    coords: Coords
    pieces: list[tuple[StoredPart, ShardEntry]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor, before anything was picked."""
        return self.pieces[0][1].shape

    @property
    def complete(self) -> bool:
        """Whether all of its shards are stored."""
        spans = sorted(e.span for _, e in self.pieces if e.span is not None)
        if not spans:
            return bool(self.pieces)
        at = 0
        for first, last in spans:
            if first > at:
                return False
            at = max(at, last)
        return at >= prod(self.shape)


class StoredTensor(Protocol):
    """A tensor of one microbatch on one replica, of which regions can be read."""

    dtype: torch.dtype
    where: str

    @property
    def layout(self) -> Layout:
        """How ranks hold it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dims(self) -> list[str]:
        """The names of its dims."""
        ...

    def dim(self, name: str) -> int | None:
        """The first dim of that name."""
        ...

    def region(self, indices: Sequence[DimIndex]) -> Tensor:
        """The requested entries of each dim."""
        ...


class AssembledTensor:
    """A tensor whose shards are known; its regions are read as they are asked for.

    Attributes:
        layout: of the shards.
        dtype: of the tensor.
        shape: of the full tensor.
        where: what it is, for errors.
    """

    def __init__(
        self,
        files: PartFiles,
        layout: Layout,
        sizes: Sizes,
        shards: Mapping[tuple[int, ...], StoredShard],
        where: str,
        picking: EntrySelector = None,
    ) -> None:
        self.files, self.layout, self.sizes, self.where = files, layout, sizes, where
        self._shards, self._picking = shards, picking
        self._lookups: dict[tuple[int, ...], _RowLookup | None] = {}
        first_shard = next(iter(shards.values()))
        part, entry = first_shard.pieces[0]
        self.dtype = part.where[entry.tensor][0]
        places = [self._shard(c) for c in coordinates(layout, sizes)] if _is_uneven(layout) else [first_shard]
        shapes = [s.shape for s in places]
        try:
            self._lengths = uneven_lengths(layout, shapes, sizes) if _is_uneven(layout) else {}
            self._full = padded_shape(layout, shapes[0], sizes, self._lengths)
            self.shape = full_shape(layout, shapes[0], sizes, self._lengths)
        except LayoutError as error:
            raise DumpError(f"{where}: {error}") from error
        self.order = full_order(layout)

    def dim(self, name: str) -> int | None:
        """The first dim of the full tensor with that name."""
        at = find_dim(self.layout, name)
        return None if at is None else self.order.index(at)

    @property
    def dims(self) -> list[str]:
        """The names of the dims of the full tensor."""
        ordered = [self.layout.dims[i] for i in self.order]
        return [d.name or f"d{i}" for i, d in enumerate(ordered)]

    def region(self, indices: Sequence[DimIndex], out: Tensor | None = None) -> Tensor:
        """The requested entries of each dim of the full tensor, written to `out` if it is given.

        Raises:
            DumpError: a shard is missing or damaged, or shards do not fit.
        """
        try:
            return assemble_region(
                self.layout, self._read, self._full, self.sizes, indices, self._lengths, out
            )
        except LayoutError as error:
            raise DumpError(f"{self.where}: {error}") from error

    def find(self, indices: Sequence[DimIndex]) -> Tensor | None:
        """The requested entries of each dim, which the caller does not write to.

        A view of a file where they are stored together; None unless one shard has all of them.

        Raises:
            DumpError: a shard is missing or damaged, or shards do not fit.
        """
        try:
            return find_region(self.layout, self._read, self._full, self.sizes, indices, self._lengths)
        except LayoutError as error:
            raise DumpError(f"{self.where}: {error}") from error

    def _shard(self, coords: Coords) -> StoredShard:
        at = tuple(first_copy(self.layout, coords, self.sizes).values())
        shard = self._shards.get(at)
        if shard is None:
            position = ", ".join(f"{a}={n}" for a, n in coords.items() if self.sizes.get(a, 1) > 1)
            raise DumpError(f"{self.where}: no rank with {position or 'these coordinates'} wrote its shard")
        return shard

    def _read(self, coords: Coords, where: RegionIndex) -> Tensor:
        shard = self._shards.get(tuple(coords.values())) or self._shard(coords)
        part, entry = shard.pieces[0]
        if entry.picked:
            return self._read_picked(shard, coords, where)
        if entry.span is not None:
            return self._read_spans(shard, where)
        if part.where[entry.tensor][1] != entry.shape:
            raise DumpError(
                f"{part.path}: {entry.tensor[:80]} differs from its index: the file is damaged",
                path=part.path,
            )
        _check_inside(part, entry.shape, where)
        return self.files.view(part, entry, where)

    def _read_spans(self, shard: StoredShard, where: RegionIndex) -> Tensor:
        """Read entries of a shard that is stored in flat pieces, from the pieces that have them."""
        _check_inside(shard.pieces[0][0], shard.shape, where)
        if not shard.complete:
            raise DumpError(
                f"{self.where}: ranks wrote only some of the flat pieces of a shard of {shard.shape}"
            )
        flat = torch.zeros([1] * len(where), dtype=torch.int64)
        for dim, index in enumerate(where):
            stride = prod(shard.shape[dim + 1 :])
            place = [1] * len(where)
            place[dim] = len(index)
            flat = flat + torch.tensor(list(index), dtype=torch.int64).reshape(place) * stride
        out = torch.empty(flat.shape, dtype=self.dtype)
        for part, entry in shard.pieces:
            assert entry.span is not None
            first, last = entry.span
            inside = (flat >= first) & (flat < last)
            if inside.any():
                at = flat[inside] - first
                low, high = int(at.min()), int(at.max()) + 1
                out[inside] = self.files.view(part, entry, (range(low, high),))[at - low]
        return out

    def _read_picked(self, shard: StoredShard, coords: Coords, where: RegionIndex) -> Tensor:
        """Read entries of a shard of which tokens or samples were picked while it was written."""
        part, entry = shard.pieces[0]
        key = tuple(first_copy(self.layout, coords, self.sizes).values())
        if key not in self._lookups:
            self._lookups[key] = self._lookup(part, entry, coords)
        lookup = self._lookups[key]
        sample, token = find_dim(self.layout, SAMPLE_DIM), find_dim(self.layout, TOKEN_DIM)
        front = [d for d in (sample, token) if d is not None]
        rest = [d for d in range(len(where)) if d not in front]
        if lookup is None or not front:
            raise DumpError(
                f"{part.path}: {entry.tensor[:80]} was picked, and the settings pick nothing", path=part.path
            )
        _check_inside(part, entry.shape, where)
        at = [torch.tensor(list(where[d]), dtype=torch.int64) for d in front]
        rows = lookup.rows(at[0] if len(front) == 1 else at[0][:, None] * entry.shape[front[1]] + at[1])
        if rows.numel() and int(rows.min()) < 0:
            raise DumpError(f"{self.where}: tokens or samples that were not kept")
        flat: list[int] = rows.reshape(-1).tolist()
        picked = self.files.view(part, entry, (compact_index(flat), *(where[d] for d in rest)))
        picked = picked.reshape(*rows.shape, *picked.shape[1:])
        return picked.movedim(list(range(len(front))), front)

    def _lookup(self, part: StoredPart, entry: ShardEntry, coords: Coords) -> _RowLookup | None:
        picked: EntrySelection | None = (
            self._picking(self.layout, entry.shape, coords) if self._picking else None
        )
        if picked is None:
            return None
        indices = [i for i in (picked.sample, picked.token) if i is not None]
        dims = [
            d for d in (find_dim(self.layout, SAMPLE_DIM), find_dim(self.layout, TOKEN_DIM)) if d is not None
        ]
        stored = part.where[entry.tensor][1]
        rest = tuple(n for d, n in enumerate(entry.shape) if d not in dims)
        if stored != (len(indices[0]), *rest):
            raise DumpError(
                f"{part.path}: {entry.tensor[:80]} has shape {list(stored)}, and the run's settings pick "
                f"{[len(indices[0]), *rest]}: the file is damaged",
                path=part.path,
            )
        return _RowLookup(indices[0] if len(dims) == 1 else indices[0] * entry.shape[dims[1]] + indices[1])


class _RowLookup:
    """Which stored row has an entry of the shard; as large as what is stored, and not as the shard.

    Args:
        keys: of each stored row its place in the shard, counted flat over samples and tokens.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys, self._rows = keys.sort()

    def rows(self, positions: Tensor) -> Tensor:
        """The rows of places, of any shape; -1 where a place was not kept."""
        if not len(self._keys):
            return torch.full(positions.shape, -1)
        at = torch.searchsorted(self._keys, positions).clamp_(max=len(self._keys) - 1)
        return torch.where(self._keys[at] == positions, self._rows[at], -1)


def group_shards(
    located: Iterable[LocatedShard], sizes: Sizes, where: str
) -> tuple[Layout, dict[tuple[int, ...], StoredShard]]:
    """Sort what ranks wrote of one tensor by who holds the same.

    Raises:
        DumpError: ranks disagree on layout or dtype.
    """
    layout: Layout | None = None
    shards: dict[tuple[int, ...], StoredShard] = {}
    dtype = ""
    for part, entry, entry_layout, coords in located:
        if layout is None:
            layout, dtype = entry_layout, entry.dtype
        if entry_layout != layout or entry.dtype != dtype:
            raise DumpError(
                f"{where}: {part.path.name} has {entry.dtype} in layout {entry_layout.describe()}, and "
                f"another rank {dtype} in {layout.describe()}"
            )
        place = first_copy(layout, coords, sizes)
        shard = shards.setdefault(tuple(place.values()), StoredShard(place))
        if entry.span is not None or not shard.pieces:
            shard.pieces.append((part, entry))
    assert layout is not None
    return layout, shards


def has_all_shards(layout: Layout, shards: Mapping[tuple[int, ...], StoredShard], sizes: Sizes) -> bool:
    """Whether every shard of a tensor is stored."""
    required = {tuple(first_copy(layout, c, sizes).values()) for c in coordinates(layout, sizes)}
    return required <= set(shards) and all(s.complete for s in shards.values())


def _is_uneven(layout: Layout) -> bool:
    return any(d.uneven and d.cuts for d in layout.dims)


def _check_inside(part: StoredPart, shape: Sequence[int], where: RegionIndex) -> None:
    for length, index in zip(shape, where, strict=True):
        if len(index) and (index[-1] if isinstance(index, range) else max(index)) >= length:
            raise DumpError(
                f"{part.path}: ranks hold shards of different shapes, here {tuple(shape)}", path=part.path
            )


class TokenMean:
    """A tensor without its dim of tokens.

    Args:
        tensor: with its dim of tokens.
        kept_tokens: for a sample of it the positions to average.
        dtype: of the mean, which is taken in fp32.
    """

    def __init__(
        self, tensor: StoredTensor, kept_tokens: Callable[[int], Sequence[int]], dtype: torch.dtype
    ) -> None:
        token = tensor.dim(TOKEN_DIM)
        assert token is not None
        self._tensor, self._kept, self._token = tensor, kept_tokens, token
        self.dtype, self.where = dtype, tensor.where
        self.shape = tuple(n for d, n in enumerate(tensor.shape) if d != token)

    @property
    def layout(self) -> Layout:
        """The layout of the tensor as it is stored."""
        return self._tensor.layout

    @property
    def dims(self) -> list[str]:
        return [n for d, n in enumerate(self._tensor.dims) if d != self._token]

    def dim(self, name: str) -> int | None:
        """The first dim of that name; there are no tokens."""
        dim = self._tensor.dim(name)
        if dim is None or name == TOKEN_DIM:
            return None
        return dim - (dim > self._token)

    def region(self, indices: Sequence[DimIndex]) -> Tensor:
        """The requested entries of each dim."""
        sample = self._tensor.dim(SAMPLE_DIM)
        each: list[tuple[int | None, Sequence[int]]] = [(None, self._kept(0))]
        at = None if sample is None else sample - (sample > self._token)
        if at is not None:
            each = [(i, self._kept(i)) for i in indices[at]]
        out = [self._mean(indices, at, item, tokens) for item, tokens in each]
        if not out:
            return torch.empty([len(i) for i in indices], dtype=self.dtype)
        return (out[0] if at is None else torch.cat(out, at)).to(self.dtype)

    def _mean(
        self, indices: Sequence[DimIndex], at: int | None, item: int | None, tokens: Sequence[int]
    ) -> Tensor:
        with_token = list(indices)
        if at is not None and item is not None:
            with_token[at] = compact_index([item])
        with_token.insert(self._token, compact_index(tokens))
        return self._tensor.region(with_token).sum(self._token, dtype=torch.float32) / max(len(tokens), 1)


__all__ = ["AssembledTensor", "StoredShard", "group_shards", "has_all_shards"]
