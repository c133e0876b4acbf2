"""How wholes are put together and parts taken out, found once for each layout and shape on a mesh.

Layouts are known again by their identity: to compare them by value costs more than a small copy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megatron_flex.layout import (
    ShardBlock,
    Layout,
    ShardPosition,
    plan_blocks,
    locate_shard,
    count_parts,
    full_shape,
)
from megatron_flex.mesh import Axis, Mesh

MAX_REMEMBERED_PLANS = 4096  # that are remembered; sequences of ever new lengths make new ones


@dataclass(frozen=True, slots=True)
class AssemblyPlan:
    """How the whole comes of parts of one shape.

    Attributes:
        layout: of the parts; while the recipe is here no other one is found by its identity.
        sums: the axes to sum over, before anything is gathered.
        axes: the axes to gather over, the last counting fastest; none where each rank has the whole.
        rest: the layout once it is summed.
        whole: its shape.
        stack: whether the parts, one behind the other in memory, are the whole.
        blocks: what of which part goes where; none of a stack.
    """

    layout: Layout
    sums: tuple[Axis, ...]
    axes: tuple[Axis, ...]
    rest: Layout
    whole: tuple[int, ...]
    stack: bool
    blocks: tuple[ShardBlock, ...]

    @property
    def count(self) -> int:
        """How many parts there are."""
        return prod(a.size for a in self.axes)


def assembly_plan(layout: Layout, mesh: Mesh, shape: torch.Size) -> AssemblyPlan:
    """How the whole comes of parts of this shape, of which none is longer than another.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    at = "whole", id(layout), shape
    found: AssemblyPlan | None = mesh.memo.get(at)
    if found is None:
        found = _make_assembly_plan(layout, mesh, shape)
        _remember(mesh.memo, at, found)
    return found


def find_shard_position(layout: Layout, mesh: Mesh, whole: torch.Size, local: torch.Size) -> ShardPosition:
    """Where this rank's part, of shape `local`, lies in a whole."""
    at = "part", id(layout), whole, local
    found: tuple[Layout, ShardPosition] | None = mesh.memo.get(at)
    if found is None:
        found = layout, locate_shard(layout, whole, mesh.coords, mesh.sizes, local)
        _remember(mesh.memo, at, found)
    return found[1]


def gradient_of(layout: Layout) -> Layout:
    """The gradient's layout, the same object each time."""
    found = _gradients.get(id(layout))
    if found is None:
        found = layout, layout.gradient()
        _remember(_gradients, id(layout), found)
    return found[1]


_gradients: dict[int, tuple[Layout, Layout]] = {}


def _remember(known: dict[Any, Any], at: Any, found: Any) -> None:
    if len(known) >= MAX_REMEMBERED_PLANS:
        known.clear()
    known[at] = found


def has_uneven_shards(layout: Layout, mesh: Mesh) -> bool:
    """Whether parts may differ in length."""
    return any(d.uneven and any(mesh[c.axis].size > 1 for c in d.cuts) for d in layout.dims)


def split_sum_and_gather_axes(layout: Layout, mesh: Mesh) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes to sum over, and those to gather over."""
    sums = tuple(mesh[a] for a in layout.partial if mesh[a].size > 1)
    return sums, tuple(mesh[a] for a in layout.axes if mesh[a].size > 1 and a not in layout.partial)


def is_stack(layout: Layout, local: Sequence[int], mesh: Mesh) -> bool:
    """Whether the shards, one after the other in memory, are the whole."""
    cut = [i for i, d in enumerate(layout.dims) if any(mesh[c.axis].size > 1 for c in d.cuts)]
    if layout.permute is not None or len(cut) != 1 or prod(local[: cut[0]]) != 1:
        return False
    dim = layout.dims[cut[0]]
    plain = all(c.order == "contiguous" and c.copies == 1 for c in dim.cuts if mesh[c.axis].size > 1)
    full = local[cut[0]] * count_parts(dim, mesh.sizes)
    lengths = [full if i == cut[0] else n for i, n in enumerate(local)]
    kept = all(d.keep is None or d.keep >= n for d, n in zip(layout.dims, lengths, strict=True))
    return plain and len(dim.segments) == 1 and kept


def _make_assembly_plan(layout: Layout, mesh: Mesh, shape: torch.Size) -> AssemblyPlan:
    sums, axes = split_sum_and_gather_axes(layout, mesh)
    rest = Layout(layout.dims, (), layout.shared, layout.permute)
    whole = tuple(full_shape(rest, shape, mesh.sizes))
    stack = bool(axes) and is_stack(rest, shape, mesh)
    blocks = plan_blocks(rest, shape, mesh.sizes) if axes and not stack else ()
    return AssemblyPlan(layout, sums, axes, rest, whole, stack, blocks)
