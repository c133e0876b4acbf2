"""The plans of gathers and scatters: how a full tensor is assembled, worked out once without communication.

A plan is computed for each layout and shape on a mesh. Plans are looked up by the identity of the layout:
comparing layouts by value costs more than a small copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megatron_flex.layout import (
    Layout,
    ShardBlock,
    ShardPosition,
    count_parts,
    full_shape,
    is_plain,
    locate_shard,
    padded_shape,
    plan_blocks,
)
from megatron_flex.mesh import Axis, Mesh

MAX_REMEMBERED_PLANS = 4096  # a bound, because each new sequence length adds a plan


@dataclass(frozen=True, slots=True)
class AssemblyPlan:
    """The plan of the assembly of a full tensor from shards of one shape.

    Attributes:
        layout: the layout of the shards; the reference keeps the layout's identity unique.
        sums: the axes to sum over, before any gather.
        axes: the axes to gather over, the last counting fastest; empty if each rank has the full tensor.
        rest: the layout after the sums.
        full_size: the shape of the full tensor.
        stack: whether the shards, concatenated in memory, are the full tensor.
        blocks: the source and destination slices of each shard; empty for a stack.
        slots: the same as one view, which one copy fills; None where there is none.
        joined: the dim along which the shards follow one another in the full tensor, in the order in which
            they are received; None where there is none.
        count: the number of shards.
        sizes: the sizes of the mesh axes.
    """

    layout: Layout
    sums: tuple[Axis, ...]
    axes: tuple[Axis, ...]
    rest: Layout
    full_size: tuple[int, ...]
    stack: bool
    blocks: tuple[ShardBlock, ...]
    slots: StridedSlots | None
    joined: int | None
    count: int
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StridedSlots:
    """The places of all shards in the full tensor as one strided view `[shards, *shard]`.

    Attributes:
        shape: the shape of the view.
        stride: its strides, in entries.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def assembly_plan(layout: Layout, mesh: Mesh, shape: torch.Size) -> AssemblyPlan:
    """The plan of the assembly of the full tensor from equal shards of this shape. No communication.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    at = "whole", id(layout), shape
    found: AssemblyPlan | None = mesh.cache.get(at)
    if found is None:
        found = _make_assembly_plan(layout, mesh, shape)
        _remember(mesh.cache, at, found)
    return found


def find_shard_position(
    layout: Layout, mesh: Mesh, full_size: torch.Size, local: torch.Size
) -> ShardPosition:
    """The position of the local shard, of shape `local`, in a full tensor of shape `full_size`."""
    at = "part", id(layout), full_size, local
    found: tuple[Layout, ShardPosition] | None = mesh.cache.get(at)
    if found is None:
        found = layout, locate_shard(layout, full_size, mesh.coords, mesh.sizes, local)
        _remember(mesh.cache, at, found)
    return found[1]


def _remember(known: dict[Any, Any], at: Any, found: Any) -> None:
    if len(known) >= MAX_REMEMBERED_PLANS:
        known.clear()
    known[at] = found


def check_shard(shape: torch.Size, layout: Layout, mesh: Mesh) -> None:
    """Validate that a local tensor of this shape can be a shard in its layout. No communication.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    if not has_uneven_shards(layout, mesh):
        assembly_plan(layout, mesh, shape)
    elif len(shape) != len(layout.dims):
        padded_shape(layout, shape, mesh.sizes)


def has_uneven_shards(layout: Layout, mesh: Mesh) -> bool:
    """Whether shards may differ in length."""
    return any(d.uneven and any(mesh[c.axis].size > 1 for c in d.cuts) for d in layout.dims)


def split_sum_and_gather_axes(layout: Layout, mesh: Mesh) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes to sum over, and those to gather over."""
    sums = tuple(mesh[a] for a in layout.partial if mesh[a].size > 1)
    return sums, tuple(mesh[a] for a in layout.axes if mesh[a].size > 1 and a not in layout.partial)


def find_cut_dims(layout: Layout, mesh: Mesh) -> list[int]:
    """The dims that are sharded over axes of more than one rank."""
    return [i for i, d in enumerate(layout.dims) if any(mesh[c.axis].size > 1 for c in d.cuts)]


def is_stack(layout: Layout, local: Sequence[int], mesh: Mesh) -> bool:
    """Whether the shards, concatenated in memory, are the full tensor."""
    cut = find_cut_dims(layout, mesh)
    if layout.permute is not None or len(cut) != 1 or prod(local[: cut[0]]) != 1:
        return False
    dim = layout.dims[cut[0]]
    plain = all(is_plain(c) for c in dim.cuts if mesh[c.axis].size > 1)
    full = local[cut[0]] * count_parts(dim, mesh.sizes)
    lengths = [full if i == cut[0] else n for i, n in enumerate(local)]
    kept = all(d.keep is None or d.keep >= n for d, n in zip(layout.dims, lengths, strict=True))
    return plain and len(dim.segments) == 1 and kept


def _make_assembly_plan(layout: Layout, mesh: Mesh, shape: torch.Size) -> AssemblyPlan:
    sums, axes = split_sum_and_gather_axes(layout, mesh)
    rest = Layout(layout.dims, (), layout.shared, layout.permute)
    full_size = tuple(full_shape(rest, shape, mesh.sizes))
    stack = bool(axes) and is_stack(rest, shape, mesh)
    blocks = plan_blocks(rest, shape, mesh.sizes) if axes and not stack else ()
    count = prod(a.size for a in axes)
    slots = _find_slots(rest, full_size, shape, blocks, count)
    joined = find_cut_dims(rest, mesh)[0] if stack else None
    if slots is not None:
        joined = _find_joined_dim(rest, full_size, shape, slots)
    return AssemblyPlan(layout, sums, axes, rest, full_size, stack, blocks, slots, joined, count, mesh.sizes)


def _find_slots(
    rest: Layout, full_size: Sequence[int], shape: Sequence[int], blocks: Sequence[ShardBlock], count: int
) -> StridedSlots | None:
    """The view of all shards' places, if each shard is one block and they follow at equal distances."""
    entire = all(s.start == 0 and s.stop == n for b in blocks for s, n in zip(b.source, shape, strict=True))
    if len(blocks) != count or not blocks or not entire or any(b.add for b in blocks):
        return None
    full = torch.empty(tuple(full_size), device="meta")
    order = rest.permute
    inner = full if order is None else full.permute([order.index(i) for i in range(len(order))])
    offsets = [
        sum(t.start * n for t, n in zip(b.target, inner.stride(), strict=True))
        for b in sorted(blocks, key=lambda b: b.shard)
    ]
    step = offsets[1] - offsets[0] if count > 1 else 0
    if offsets != [n * step for n in range(count)]:
        return None
    return StridedSlots((count, *shape), (step, *inner.stride()))


def _find_joined_dim(
    rest: Layout, whole: Sequence[int], shape: Sequence[int], slots: StridedSlots
) -> int | None:
    """The dim along which `torch.cat` of the shards is the full tensor."""
    if rest.permute is not None:
        return None
    count, step, strides = slots.shape[0], slots.stride[0], slots.stride[1:]
    for dim, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        if step == length * stride and whole[dim] == count * length:
            return dim
    return None
