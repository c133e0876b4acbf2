"""Part files opened to read: cached headers and mappings, shards, and checksums block by block."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args

import torch
from torch import Tensor

from megatron_flex.checksums import (
    CHECKSUM_BLOCK,
    compute_checksum,
    count_checksum_blocks,
    get_block_checksum,
)
from megatron_flex.dump.file_names import parse_iteration_folder, parse_part_name
from megatron_flex.dump.part_format import StoredPart, read_part
from megatron_flex.dump.reader.weighted_cache import WeightedCache
from megatron_flex.dump.run_folders import IterationKey, describe_iteration
from megatron_flex.dump.schema import REPLICA, ShardEntry, layout_from_json
from megatron_flex.errors import DumpError, LayoutError
from megatron_flex.layout import Coords, Layout, RegionIndex, take_entries


class ChecksumRecord:
    """Which blocks of which shards have been compared.

    Attributes:
        bytes_checked: whose checksums were computed.
    """

    def __init__(self) -> None:
        self.bytes_checked = 0
        self._seen: dict[
            tuple[Path, str], bytearray | None
        ] = {}  # a byte for each block; None: all are right

    def check(
        self, part: StoredPart, entry: ShardEntry, data: memoryview, where: RegionIndex | None = None
    ) -> None:
        """Compare the blocks of a shard that hold some of its entries, if that was not done before.

        Args:
            part: that has the shard.
            entry: the shard's entry in the header.
            data: all of its bytes.
            where: for each dim of what is stored the entries that are read; all if None.

        Raises:
            DumpError: a block differs from what was written.
        """
        key = part.path, entry.tensor
        if key not in self._seen:
            self._seen.setdefault(key, bytearray(count_checksum_blocks(len(data))))
        checked = self._seen[key]
        if checked is None:
            return
        dtype, shape, _, _ = part.where[entry.tensor]
        blocks: Sequence[int] = range(len(checked))
        if len(checked) > 1 and where is not None:
            blocks = find_touched_blocks(shape, where, dtype.itemsize)
        missing = [number for number in blocks if not checked[number]]
        self._compare(part, entry, data, missing)
        for number in missing:
            checked[number] = 1
        if all(checked):
            self._seen[key] = None

    def _compare(self, part: StoredPart, entry: ShardEntry, data: memoryview, numbers: Sequence[int]) -> None:
        """Compare blocks, with little that holds the GIL."""
        borders = [_get_block_border(n, len(data)) for n in numbers]
        computed = [compute_checksum(data[first:last]) for first, last in borders]
        expected = [get_block_checksum(entry.blocks, n) for n in numbers]
        nbytes = sum(last - first for first, last in borders)
        self.bytes_checked += nbytes  # without a call: other threads add too
        for number, computed_sum, expected_sum, border in zip(
            numbers, computed, expected, borders, strict=True
        ):
            if computed_sum != expected_sum:
                raise DumpError(_describe_damage(part, entry, number, *border), path=part.path)


def find_wrong_blocks(part: StoredPart, entry: ShardEntry, file: BinaryIO) -> list[int]:
    """The numbers of the blocks of a shard that are not as they were written; all of it is read."""
    _, _, at, size = part.where[entry.tensor]
    file.seek(at)
    borders = (_get_block_border(n, size) for n in range(count_checksum_blocks(size)))
    computed = (compute_checksum(file.read(last - first)) for first, last in borders)
    return [n for n, checksum in enumerate(computed) if checksum != get_block_checksum(entry.blocks, n)]


def count_shard_blocks(part: StoredPart, entry: ShardEntry) -> int:
    """How many blocks a shard has."""
    return count_checksum_blocks(part.where[entry.tensor][3])


def _describe_damage(part: StoredPart, entry: ShardEntry, number: int, first: int, last: int) -> str:
    """The error of a block whose bytes are not those that were written."""
    call = f", call {entry.call}" if entry.call else ""
    count, at = count_shard_blocks(part, entry), part.where[entry.tensor][2]
    return (
        f"{part.path}: the bytes of {entry.site} ({entry.kind}, microbatch {entry.microbatch}{call}, rank "
        f"{part.index.rank}) are not those that were written: the checksum of block {number} of {count} is "
        f"wrong (bytes {at + first} to {at + last - 1} of the file); the file is damaged"
    )


def find_touched_blocks(shape: Sequence[int], where: RegionIndex, itemsize: int) -> list[int]:
    """The blocks that contain requested entries of a tensor in row-major order.

    Args:
        shape: of the tensor.
        where: for each dim the entries.
        itemsize: bytes of an entry.
    """
    count = count_checksum_blocks(prod(shape) * itemsize)
    if any(len(index) == 0 for index in where):
        return []
    last = len(shape) - 1
    while last >= 0 and where[last] == range(shape[last]):
        last -= 1
    if last < 0:
        return list(range(count))
    inner = prod(shape[last + 1 :]) * itemsize  # bytes that are wanted together, wherever they are
    index = where[last]
    if isinstance(index, range) and index.step == 1:
        run, outer = inner * len(index), last
        offsets = torch.tensor([index.start * inner])
    else:
        run, outer = inner, last + 1
        offsets = torch.zeros(1, dtype=torch.int64)
    for dim in range(outer):
        starts = torch.tensor(list(where[dim]), dtype=torch.int64) * (prod(shape[dim + 1 :]) * itemsize)
        offsets = (offsets[:, None] + starts).reshape(-1)
    return _list_covered_blocks(offsets // CHECKSUM_BLOCK, (offsets + run - 1) // CHECKSUM_BLOCK, count)


def _list_covered_blocks(first: Tensor, last: Tensor, count: int) -> list[int]:
    """The numbers from each first to its last."""
    steps = torch.zeros(count + 1, dtype=torch.int64)
    steps.index_add_(0, first, torch.ones_like(first))
    steps.index_add_(0, last + 1, -torch.ones_like(last))
    covered: list[int] = steps.cumsum(0)[:count].nonzero().flatten().tolist()
    return covered


def _get_block_border(number: int, size: int) -> tuple[int, int]:
    return number * CHECKSUM_BLOCK, min((number + 1) * CHECKSUM_BLOCK, size)


ChecksumPolicy = Literal["blocks", "first", "never"]
CHECKSUM_POLICIES: tuple[ChecksumPolicy, ...] = get_args(ChecksumPolicy)
MAX_OPEN_FILES = 256  # files that are mapped at once; a process may have some thousand open
LocatedShard = tuple[
    StoredPart, ShardEntry, Layout, Coords
]  # an entry, the part that has it, and the rank's coordinates


class IndexedPart:
    """A part whose header was read.

    Attributes:
        part: the header.
        entries_by_site: its entries by site and kind, each with its layout; with a part that knows of these
            alone, so that keeping an entry does not keep the whole part.
    """

    def __init__(self, path: Path) -> None:
        self.part: StoredPart = read_part(path)
        self.entries_by_site: dict[tuple[str, str], tuple[StoredPart, list[tuple[ShardEntry, Layout]]]] = {}
        index = self.part.index
        bare = replace(index, layouts=(), entries=())
        try:
            layouts = [parse_layout_text(json.dumps(record)) for record in index.layouts]
            for entry in index.entries:
                layout = layouts[entry.layout]
                if entry.layout < 0 or len(entry.shape) != len(layout.dims):
                    raise LayoutError(f"{entry.tensor[:80]} of shape {entry.shape} in {layout.describe()}")
                part, several = self.entries_by_site.setdefault(
                    (entry.site, entry.kind), (replace(self.part, index=bare, where={}), [])
                )
                several.append((entry, layout))
                if entry.kind != REPLICA:
                    cast(dict[str, Any], part.where)[entry.tensor] = self.part.where[entry.tensor]
        except (LayoutError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DumpError(
                f"{path}: its index is not a dump's: {error}; the file is damaged", path=path
            ) from error


@lru_cache(4096)
def parse_layout_text(text: str) -> Layout:
    """A layout, from JSON's text."""
    return layout_from_json(json.loads(text))


class PartFiles:
    """The parts of a dump, opened as they are needed.

    Args:
        check: compare with their checksums the `blocks` that are read, when they are read first; all blocks
            of a shard when it is `first` read; or `never`.
        most_open: how many files are mapped at once.
        most_entries: how many entries of headers are kept.

    Attributes:
        opened: how many headers were read.
        bytes_read: how many bytes of tensors were read.
    """

    def __init__(
        self, check: ChecksumPolicy = "blocks", most_open: int = MAX_OPEN_FILES, most_entries: int = 1 << 18
    ) -> None:
        if check not in CHECKSUM_POLICIES:
            raise DumpError(f"check={check!r} is not one of {', '.join(CHECKSUM_POLICIES)}")
        self.check: ChecksumPolicy = check
        self.integrity = ChecksumRecord()
        self.bytes_read = self.opened = 0
        self._maps: WeightedCache[Path, mmap.mmap] = WeightedCache(most_open)
        self._headers: WeightedCache[Path, IndexedPart] = WeightedCache(most_entries)

    @property
    def mapped(self) -> int:
        """How many files are mapped."""
        return len(self._maps)

    def open(self, path: Path) -> IndexedPart:
        """The header of a part."""

        def make() -> IndexedPart:
            self.opened += 1
            return _index_part(path)

        return self._headers.get(path, make, lambda o: 1 + len(o.part.index.entries))

    def read(self, part: StoredPart, entry: ShardEntry, where: RegionIndex) -> Tensor:
        """Copy entries of a shard, as it is stored: like `view`, and a tensor of its own."""
        return self.view(part, entry, where).clone(memory_format=torch.contiguous_format)

    def view(self, part: StoredPart, entry: ShardEntry, where: RegionIndex) -> Tensor:
        """Entries of a shard, as it is stored; nothing is read of what ranges leave out.

        Args:
            part: that has the shard.
            entry: the shard's entry in the header.
            where: for each dim the requested entries.

        Returns:
            A view of the file, which the caller does not write to.

        Raises:
            DumpError: the file is gone or has changed its size, or the checksum of a block is wrong.
        """
        if entry.kind == REPLICA:
            raise DumpError(f"{part.path}: {entry.site} was stored as a checksum only", path=part.path)
        dtype, shape, start, size = part.where[entry.tensor]
        if size == 0:
            return take_entries(torch.empty(shape, dtype=dtype), where)
        mapped = self._map_file(part, start, size)
        if self.check != "never":
            with memoryview(mapped) as content, content[start : start + size] as data:
                self.integrity.check(part, entry, data, where if self.check == "blocks" else None)
        small = dtype.itemsize == 1 and dtype is not torch.bool  # not every function knows 8-bit floats
        file_dtype = torch.uint8 if small else dtype
        if start % dtype.itemsize:
            unaligned = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start)
            stored = unaligned.clone().view(file_dtype)
        else:
            stored = torch.frombuffer(mapped, dtype=file_dtype, count=size // dtype.itemsize, offset=start)
        out = take_entries(stored.view(shape), where)
        nbytes = out.nbytes
        self.bytes_read += nbytes  # without a call: other threads add too
        return out.view(dtype) if small else out

    def _map_file(self, part: StoredPart, start: int, size: int) -> mmap.mmap:
        mapped = self._maps.get(part.path, lambda: _map_part_file(part.path))
        if mapped.size() < start + size or len(mapped) < start + size:
            # reading past a file's end kills the process
            raise DumpError(
                f"{part.path}: {mapped.size()} bytes now, {start + size} needed: it changed since it was "
                "opened; open the dump again",
                path=part.path,
            )
        return mapped

    def close(self) -> None:
        self._maps.clear()
        self._headers.clear()


def _index_part(path: Path) -> IndexedPart:
    """The header of a part, which must be of the rank and iteration that its name has."""
    indexed = IndexedPart(path)
    from_name = parse_iteration_folder(path.parent.name), parse_part_name(path.name)
    index = indexed.part.index
    stated = (index.iteration, index.run_of), (index.rank, index.part, index.parts)
    if stated != from_name:
        raise DumpError(
            f"{path}: its header is of {_describe_place(*stated)}, its name of "
            f"{_describe_place(*from_name)}; the file was moved or renamed: put it back",
            path=path,
        )
    return indexed


def _describe_place(iteration: IterationKey | None, part: tuple[int, int, int] | None) -> str:
    """The iteration, rank and part of a file; None for what the name of a file or folder does not say."""
    where = "no iteration" if iteration is None else describe_iteration(iteration)
    if part is None:
        return f"{where}, no rank"
    rank, number, parts = part
    return f"{where}, rank {rank}, part {number}" + (f" of {parts}" if parts else "")


def _map_part_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # a private mapping that nobody writes to: torch warns of memory that is read-only
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise DumpError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}", path=path
        ) from error
