"""Parts opened to read: headers and mappings kept, as many as fit, and bytes copied out of them."""

from __future__ import annotations

import json
import mmap
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor

from megatron_flex.dump.part_format import REPLICA, ShardEntry, StoredPart, parse_iteration_folder, parse_part_name, read_part
from megatron_flex.dump.layouts import layout_from_json
from megatron_flex.errors import DumpError, LayoutError
from megatron_flex.layout import Coords, Layout, RegionIndex, take_entries

ChecksumPolicy = Literal["first", "whole", "never"]
MOST_OPEN_FILES = 256  # files that are mapped at once; a process may have some thousand open
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
LocatedShard = tuple[StoredPart, ShardEntry, Layout, Coords]  # an entry, the part that has it, and the rank's coordinates


class WeightedCache(Generic[K, V]):
    """The values that were asked for last, up to a total weight."""

    def __init__(self, most: int) -> None:
        self.most, self._weight = most, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock, self._process = threading.Lock(), os.getpid()

    def get(self, key: K, make: Callable[[], V], weight: Callable[[V], int] = lambda _: 1) -> V:
        """The value of a key; made where it is not kept."""
        if self._process != os.getpid():  # forked off, maybe while another thread held the lock
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
                return found[0]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value, weight(value)
                self._weight += self._values[key][1]
            while self._weight > self.most and len(self._values) > 1:
                self._weight -= self._values.popitem(last=False)[1][1]
        return value

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._values.clear()
            self._weight = 0


class IndexedPart:
    """A part whose header was read.

    Attributes:
        part: the header.
        by: its entries by site and kind, each with its layout; with a part that knows of these alone, so that
            who keeps them does not keep all.
    """

    def __init__(self, path: Path) -> None:
        self.part: StoredPart = read_part(path)
        self.by: dict[tuple[str, str], tuple[StoredPart, list[tuple[ShardEntry, Layout]]]] = {}
        index = self.part.index
        bare = replace(index, layouts=(), entries=())
        try:
            layouts = [parse_layout_text(json.dumps(told)) for told in index.layouts]
            for entry in index.entries:
                layout = layouts[entry.layout]
                if entry.layout < 0 or len(entry.shape) != len(layout.dims):
                    raise LayoutError(f"{entry.tensor[:80]} of shape {entry.shape} in {layout.describe()}")
                part, several = self.by.setdefault((entry.site, entry.kind), (StoredPart(path, bare, {}), []))
                several.append((entry, layout))
                if entry.kind != REPLICA:
                    cast(dict[str, Any], part.where)[entry.tensor] = self.part.where[entry.tensor]
        except (LayoutError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DumpError(f"{path}: its index is no dump's: {error}; the file is damaged") from error


@lru_cache(4096)
def parse_layout_text(told: str) -> Layout:
    """A layout, from JSON's text."""
    return layout_from_json(json.loads(told))


class PartFiles:
    """The parts of a dump, opened as they are needed.

    Args:
        check: compare a shard's bytes with its checksum when it is `first` read, when it is first read as a
            `whole`, or `never`.
        most_open: how many files are mapped at once.
        most_entries: how many entries of headers are kept.

    Attributes:
        opened: how many headers were read.
        bytes_read: how many bytes of tensors were copied.
    """

    def __init__(
        self, check: ChecksumPolicy = "whole", most_open: int = MOST_OPEN_FILES, most_entries: int = 1 << 18
    ) -> None:
        if check not in ("first", "whole", "never"):
            raise DumpError(f"check={check!r} is none of first, whole, never")
        self.check = check
        self.bytes_read = self.opened = 0
        self._maps: WeightedCache[Path, mmap.mmap] = WeightedCache(most_open)
        self._headers: WeightedCache[Path, IndexedPart] = WeightedCache(most_entries)
        self._checked: set[tuple[Path, str]] = set()

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
            entry: which.
            where: for each dim the entries wanted.

        Returns:
            A view of the file, which the caller copies at once and does not write to.

        Raises:
            DumpError: the file is gone or has shrunk, or the checksum is wrong.
        """
        if entry.kind == REPLICA:
            raise DumpError(f"{part.path}: {entry.site} is there as a checksum only")
        dtype, shape, start, size = part.where[entry.tensor]
        if size == 0:
            return take_entries(torch.empty(shape, dtype=dtype), where)
        mapped = self._map(part, start, size)
        stored = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=start)
        whole = prod(len(index) for index in where) == prod(shape)
        if self.check == "first" or (self.check == "whole" and whole):
            self.verify(part, entry)
        if start % dtype.itemsize:
            stored = stored.clone()
        small = dtype.itemsize == 1 and dtype is not torch.bool  # not every function knows 8-bit floats
        tensor = stored.view(torch.uint8 if small else dtype).reshape(shape)
        out = take_entries(tensor, where)
        self.bytes_read += out.nbytes
        return out.view(dtype) if small else out

    def verify(self, part: StoredPart, entry: ShardEntry) -> None:
        """Compare a shard's bytes with its checksum, if that was not done before.

        Raises:
            DumpError: they differ.
        """
        key = part.path, entry.tensor
        if key in self._checked:
            return
        _, _, start, size = part.where[entry.tensor]
        found = 0
        if size:
            with memoryview(self._map(part, start, size)) as stored:
                found = zlib.crc32(stored[start : start + size])
        if found != entry.crc:
            raise DumpError(
                f"{part.path}: the bytes of {entry.site} ({entry.kind}, microbatch {entry.microbatch}, rank "
                f"{part.index.rank}) have checksum {found:08x}, and were written with {entry.crc:08x}: the "
                "file is damaged"
            )
        self._checked.add(key)

    def _map(self, part: StoredPart, start: int, size: int) -> mmap.mmap:
        mapped = self._maps.get(part.path, lambda: _map_part_file(part.path))
        if mapped.size() < start + size or len(mapped) < start + size:
            # reading behind a file's end kills the process
            raise DumpError(f"{part.path}: has shrunk to {mapped.size()} bytes since it was opened")
        return mapped

    def close(self) -> None:
        """Let go of all files."""
        self._maps.clear()
        self._headers.clear()


def _index_part(path: Path) -> IndexedPart:
    """The header of a part, which must be of the rank and iteration that its name has."""
    opened, named = IndexedPart(path), (parse_iteration_folder(path.parent.name), parse_part_name(path.name))
    index = opened.part.index
    told = (index.iteration, index.run_of), (index.rank, index.part, index.parts)
    if told != named:
        raise DumpError(f"{path} says that it is of {told}, and its name that it is of {named}: it was moved")
    return opened


def _map_part_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # a private mapping that nobody writes to: torch warns of memory that is read-only
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise DumpError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
