"""Where parts of one layout, shape and dtype go, and what room they need: found once for each."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.collectives.shared.placing import ShardPlacement, align_tensor_size, place_shard
from megatron_flex.layout import Layout, Sizes

MAX_KNOWN_SPACES = 4096  # that are remembered; sequences of ever new lengths make new ones


@dataclass(frozen=True)
class Member:
    """One of the ranks whose reads go to one leader: its global rank, its place, and its node."""

    rank: int
    coords: dict[str, int]
    node: str


@dataclass(frozen=True, slots=True)
class TensorSpace:
    """What is known of all tensors of one layout, shape and dtype.

    Attributes:
        layout: itself: while it is here no other one is found by its identity.
        words: what all ranks must have in common of them.
        place: where this rank's part goes; None where it has to be gathered.
        size: bytes that a whole needs.
    """

    layout: Layout
    words: str
    place: ShardPlacement | None
    size: int


class TensorSpaceCache:
    """Those that one rank has seen.

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
        self._known: dict[tuple[int, torch.Size, torch.dtype], TensorSpace] = {}

    def of(self, layout: Layout, local: Tensor) -> TensorSpace:
        """What is known of tensors like this one.

        Raises:
            LayoutError: its shape does not fit the layout.
        """
        at = id(layout), local.shape, local.dtype
        found = self._known.get(at)
        if found is None:
            if len(self._known) >= MAX_KNOWN_SPACES:
                self._known.clear()
            found = self._known[at] = self._find(layout, local)
        return found

    def _find(self, layout: Layout, local: Tensor) -> TensorSpace:
        shape = tuple(local.shape)
        if any(d.uneven for d in layout.dims):
            return TensorSpace(layout, "", None, 0)
        words = f"{shape}{local.dtype}"
        if not self._elsewhere.isdisjoint(layout.axes):
            return TensorSpace(layout, words, None, 0)
        place = place_shard(layout, shape, self._member.coords, self._sizes)
        whole = align_tensor_size(place.bytes(local.dtype))
        if not self._one_node:  # each rank's part by itself needs more, if copies of it are sent
            whole = max(whole, self._count * align_tensor_size(local.numel() * local.itemsize))
        return TensorSpace(layout, words, place, whole)
