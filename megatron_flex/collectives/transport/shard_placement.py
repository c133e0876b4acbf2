"""The position of a rank's shard in the full tensor, as slices to copy, and how many bytes it needs;
worked out once for each layout, shape and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.layout import Coords, Layout, Sizes, first_copy, full_shape, padded_shape, spans

ShardSlices = tuple[slice, ...]
TENSOR_ALIGN = 64  # bytes; where tensors begin


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """How one rank's shard goes into the full tensor.

    Attributes:
        shape: of the full tensor, as one device has it.
        planes: how many partial sums the full tensor has, each in a plane of its own.
        plane: which of them this rank writes.
        writes: whether it writes at all; of ranks that hold the same, one does.
        blocks: places in the plane, dims in the shard's order, and in the shard.
        order: the plane's dims in the shard's order.
    """

    shape: tuple[int, ...]
    planes: int
    plane: int
    writes: bool
    blocks: tuple[tuple[ShardSlices, ShardSlices], ...]
    order: tuple[int, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        """How much memory all planes take."""
        return self.planes * prod(self.shape) * dtype.itemsize

    def targets(self, planes: Tensor) -> list[tuple[Tensor, ShardSlices]]:
        """Views of `planes` `[planes, *shape]` to copy to, each with what of the shard to copy."""
        full_tensor = planes[self.plane]
        if self.order != tuple(range(len(self.order))):
            full_tensor = full_tensor.permute(self.order)
        return [(full_tensor[target], source) for target, source in self.blocks]

    def write(self, local: Tensor, planes: Tensor) -> None:
        """Copy a shard to its place in `planes` `[planes, *shape]`."""
        for target, source in self.targets(planes):
            target.copy_(local[source])


def place_shard(layout: Layout, shape: tuple[int, ...], coords: Coords, sizes: Sizes) -> ShardPlacement:
    """How the shard of the rank at `coords` goes into the full tensor.

    Args:
        layout: how the shards relate; without uneven dims.
        shape: of each shard.
        coords: the rank's, on all axes of the ranks that read together.
        sizes: of those axes.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    return _place_shard(layout, shape, tuple(sorted(coords.items())), tuple(sorted(sizes.items())))


@lru_cache(maxsize=4096)
def _place_shard(
    layout: Layout,
    shape: tuple[int, ...],
    coords_: tuple[tuple[str, int], ...],
    sizes_: tuple[tuple[str, int], ...],
) -> ShardPlacement:
    coords, sizes = dict(coords_), dict(sizes_)
    full = padded_shape(layout, shape, sizes)
    order = layout.permute or tuple(range(len(full)))
    planes, plane = _plane_of(layout, coords, sizes)
    first = first_copy(layout, coords, sizes)
    alike = [a for a in sizes if a not in layout.axes]  # on which all hold the same
    writes = all(coords[a] == first[a] for a in layout.axes if sizes.get(a, 1) > 1)
    writes = writes and not any(coords[a] for a in alike)
    rows: list[list[tuple[slice, slice]]] = []
    for dim, length in zip(layout.dims, full, strict=True):
        kept, at, row = length if dim.keep is None else min(dim.keep, length), 0, []
        for start, stop in spans(dim, length, coords, sizes):
            if start < kept:
                row.append((slice(start, min(stop, kept)), slice(at, at + min(stop, kept) - start)))
            at += stop - start
        rows.append(row)
    blocks = tuple((tuple(t for t, _ in combo), tuple(s for _, s in combo)) for combo in product(*rows))
    return ShardPlacement(
        shape=full_shape(layout, shape, sizes),
        planes=planes,
        plane=plane,
        writes=writes,
        blocks=blocks if writes else (),
        order=tuple(order.index(i) for i in range(len(order))),
    )


def _plane_of(layout: Layout, coords: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many partial sums there are, and which one is this rank's, in the order of ranks."""
    count, at = 1, 0
    for cut in (c for d in layout.dims for c in d.cuts):
        if cut.partial and cut.copies > 1 and sizes.get(cut.axis, 1) > 1:
            count, at = count * cut.copies, at * cut.copies + coords[cut.axis] % cut.copies
    for axis in layout.partial:
        if sizes.get(axis, 1) > 1:
            count, at = count * sizes[axis], at * sizes[axis] + coords[axis]
    return count, at


def sum_planes(planes: Tensor) -> None:
    """Add all planes up, in order, into the first; halves in fp32, rounded once."""
    first = planes[0]
    half = planes.dtype.is_floating_point and planes.dtype.itemsize < 4
    total = first.float() if half else first
    for plane in planes[1:]:
        total += plane
    if half:
        first.copy_(total)


def align_tensor_size(size: int) -> int:
    """The size rounded up, so that the next tensor is aligned."""
    return -(-size // TENSOR_ALIGN) * TENSOR_ALIGN


MAX_KNOWN_SPACES = 4096  # that are remembered; sequences of ever new lengths make new ones


@dataclass(frozen=True)
class Member:
    """One of the ranks whose captures go to one leader: its global rank, coordinates and node."""

    rank: int
    coords: dict[str, int]
    node: str


class BlockTarget(NamedTuple):
    """Where one block of a shard goes: a strided view of memory of the tensor's dtype, in entries.

    Attributes:
        shape: of the block.
        stride: of the view.
        offset: of the view, from the beginning of the tensor.
        source: the block in the shard; None for the shard itself.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    source: ShardSlices | None


def find_block_targets(place: ShardPlacement, local: torch.Size) -> tuple[BlockTarget, ...]:
    """Where the blocks of a shard of this shape go."""
    if not place.writes or not local.numel():
        return ()
    planes, every = (
        torch.empty((place.planes, *place.shape), device="meta"),
        tuple(slice(0, n) for n in local),
    )
    return tuple(
        BlockTarget(t.shape, t.stride(), int(t.storage_offset()), None if source == every else source)
        for t, source in place.targets(planes)
    )


@dataclass(frozen=True, slots=True)
class TensorSpace:
    """What is known about all tensors of one layout, shape and dtype.

    Attributes:
        layout: itself: while it is here no other one is found by its identity.
        words: what all ranks must have in common of them.
        place: where the local shard goes; None where it has to be gathered.
        size: bytes that a full tensor needs.
        local: the shape of the local tensor.
        dtype: its dtype.
        targets: where its blocks go, from the beginning of the tensor in memory.
    """

    layout: Layout
    words: str
    place: ShardPlacement | None
    size: int
    local: torch.Size
    dtype: torch.dtype
    targets: tuple[BlockTarget, ...] = ()


class TensorSpaceCache:
    """The spaces of the tensors that one rank has submitted.

    Attributes:
        known: by the layout's identity, shape and dtype.

    Args:
        members: the ranks that read together.
        me: this one's place among them.
        sizes: of the axes that they are spread over.
        elsewhere: axes with other ranks than these.
    """

    def __init__(self, members: Sequence[Member], me: int, sizes: Sizes, elsewhere: AbstractSet[str]) -> None:
        self._member, self._sizes, self._elsewhere = members[me], sizes, elsewhere
        self._count = len(members)
        self._one_node = all(m.node == self._member.node for m in members)
        self.known: dict[tuple[int, torch.Size, torch.dtype], TensorSpace] = {}

    def of(self, layout: Layout, local: Tensor) -> TensorSpace:
        """What is known about tensors like this one.

        Raises:
            LayoutError: its shape does not fit the layout.
        """
        at = id(layout), local.shape, local.dtype
        found = self.known.get(at)
        if found is None:
            if len(self.known) >= MAX_KNOWN_SPACES:
                self.known.clear()
            found = self.known[at] = self._find(layout, local)
        return found

    def _find(self, layout: Layout, local: Tensor) -> TensorSpace:
        shape, like = tuple(local.shape), (local.shape, local.dtype)
        if any(d.uneven for d in layout.dims):
            return TensorSpace(layout, "", None, 0, *like)
        words = f"{shape}{local.dtype}"
        if not self._elsewhere.isdisjoint(layout.axes):
            return TensorSpace(layout, words, None, 0, *like)
        place = place_shard(layout, shape, self._member.coords, self._sizes)
        full_tensor = align_tensor_size(place.bytes(local.dtype))
        if not self._one_node:  # each rank's shard by itself needs more, if copies of it are sent
            full_tensor = max(full_tensor, self._count * align_tensor_size(local.numel() * local.itemsize))
        return TensorSpace(layout, words, place, full_tensor, *like, find_block_targets(place, local.shape))
