"""Gather the whole on every rank, scatter it again; forward and backward conjugates side by side.

Every rank of the group runs the same edit on the same whole. So the gradient of the whole is the same on
all of them, and going back means to take one's own part of it, not to sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.messages import as_bytes
from megatron_flex.collectives.meter import call_metered
from megatron_flex.collectives.recipes import split_sum_and_gather_axes, gradient_of, is_stack, find_shard_position, assembly_plan, has_uneven_shards
from megatron_flex.collectives.staging import buffer_pool
from megatron_flex.layout import (
    Layout,
    Lengths,
    assemble,
    copy_shard,
    extract,
    uneven_lengths,
    copy_blocks,
    full_shape,
)
from megatron_flex.mesh import Axis, Mesh

# What torch calls the gathering of equal parts into one tensor, since 2.13 and before.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def gather_full(local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Give every rank the whole.

    Collective over the axes that split the tensor; nothing is sent where none does. Differentiable: the
    whole's gradient, equal on all ranks, goes back as each rank's share under `layout.gradient()`.

    Args:
        local: this rank's tensor, in `layout`.
        layout: how the shards relate.
        mesh: the run's axes.

    Returns:
        The tensor that one device would hold, contiguous, in memory of its own.
    """
    return cast(Tensor, _Gather.apply(local, layout, mesh))  # type: ignore[no-untyped-call]


def scatter_full(whole: Tensor, local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Give every rank its shard of a whole that all of them hold.

    Sends nothing forward; backward it is collective over the axes that split the gradient.

    Args:
        whole: the same tensor on every rank, of the shape that `gather_full` gave.
        local: the shard as it was, for the padding that the layout strips.
        layout: how the shards relate.
        mesh: the run's axes.

    Returns:
        The local tensor in `layout`, contiguous, no view of anything.
    """
    return cast(Tensor, _Scatter.apply(whole, local, layout, mesh))  # type: ignore[no-untyped-call]


def to_edit_rank(whole: Tensor, holders: Mesh) -> Tensor:
    """The whole, where only the leader goes on computing with it.

    Sends nothing forward; backward the leader's gradient goes to all ranks that hold the whole. Each of them
    calls it, and `from_edit_rank` behind it.

    Args:
        whole: the same tensor on all `holders`.
        holders: what `replica_mesh` gives.
    """
    if whole.is_floating_point() and torch.is_grad_enabled() and not whole.requires_grad:
        # What the leader makes may need a gradient even so; then all ranks must go through it backward.
        whole = whole.detach().requires_grad_()
    return cast(Tensor, _ToEditRank.apply(whole, holders))  # type: ignore[no-untyped-call]


def from_edit_rank(made: Tensor, whole: Tensor, holders: Mesh) -> Tensor:
    """Give every rank what the leader made of the whole.

    Collective over `holders`, forward; sends nothing backward.

    Args:
        made: on the leader what it made; elsewhere `whole`, whose shape and dtype it has.
        whole: what `to_edit_rank` gave, whose backward pass runs even if `made` does not depend on it.
        holders: what `replica_mesh` gives.
    """
    return cast(Tensor, _FromEditRank.apply(made, whole, holders))  # type: ignore[no-untyped-call]


def broadcast_from_first(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Give every rank what the rank with coordinate 0 on all axes has. Collective over the mesh.

    Args:
        tensor: contiguous; overwritten on the others.
        mesh: the run's axes.
    """
    axes = list(mesh)
    for index, axis in enumerate(axes):
        # Ranks further along the axes that follow get it later, from those that have it now.
        if axis.size > 1 and mesh.is_first(a.name for a in axes[index + 1 :]):
            call_metered("broadcast", axis, tensor, dist.broadcast, tensor, axis.ranks[0])
    return tensor


def replica_mesh(layout: Layout, mesh: Mesh) -> Mesh:
    """The axes along which ranks hold the same whole, once it is gathered."""
    data = (mesh["dp"],) if "dp" in layout.axes else ()
    return Mesh((*data, mesh["cp"], mesh["tp"]))


class _ToEditRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, holders: Mesh) -> Tensor:
        ctx.holders = holders
        return whole.detach()  # no view, which could not be edited in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return broadcast_from_first(grad.clone(memory_format=torch.contiguous_format), ctx.holders), None


class _FromEditRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, whole: Tensor, holders: Mesh) -> Tensor:
        return broadcast_from_first(made.detach().clone(memory_format=torch.contiguous_format), holders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.zeros_like(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.mesh, ctx.shape = layout, mesh, local.shape
        whole, ctx.lengths = assemble_on_all_ranks(local, layout, mesh)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Like every gradient it may share memory with others: nobody may write to one that he is given.
        layout = gradient_of(ctx.layout)
        return _take_local_shard(grad, layout, ctx.mesh, ctx.shape, ctx.lengths, alias=True), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        shapes = _gather_shapes(local, layout, mesh)
        lengths = uneven_lengths(Layout(layout.dims), shapes, mesh.sizes) if shapes else {}
        return _take_local_shard(whole, layout, mesh, local.shape, lengths, local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        mesh: Mesh = ctx.mesh
        # The whole's gradient is assembled even where the edit's result needs none: were that left to each
        # rank, one whose edit failed would wait for the others for ever.
        whole, lengths = assemble_on_all_ranks(grad, gradient_of(ctx.layout), mesh, alias=True)
        passed = None
        if any(d.keep is not None for d in ctx.layout.dims):  # the padding went by beside the whole
            nothing = whole.new_zeros(1).expand(whole.shape)
            passed = extract(ctx.layout, nothing, mesh.coords, mesh.sizes, grad, lengths)
        return whole, passed, None, None


def _take_local_shard(
    whole: Tensor,
    layout: Layout,
    mesh: Mesh,
    shape: torch.Size,
    lengths: Lengths,
    old: Tensor | None = None,
    alias: bool = False,
) -> Tensor:
    """This rank's part of a whole; `old` has its padding."""
    if lengths:
        return extract(
            layout, whole, mesh.coords, mesh.sizes, old if old is not None else shape, lengths, alias
        )
    return copy_shard(find_shard_position(layout, mesh, whole.shape, shape), whole, old, alias)


def assemble_on_all_ranks(local: Tensor, layout: Layout, mesh: Mesh, alias: bool = False) -> tuple[Tensor, Lengths]:
    """The whole on every rank, and the lengths of uneven parts; not differentiable.

    Collective over `layout.live(mesh.sizes)`: one all-reduce for each summed axis, one all-gather for each
    axis that cuts, and for uneven dims one more, of the shapes.

    Args:
        local: this rank's tensor.
        layout: how the shards relate.
        mesh: the run's axes.
        alias: whether the whole may share memory with `local`, where that is the whole.
    """
    if has_uneven_shards(layout, mesh):
        return _assemble_uneven(local, layout, mesh, alias)
    recipe, tensor = assembly_plan(layout, mesh, local.shape), local.detach()
    if recipe.sums:
        tensor = _sum_over_axes(tensor, recipe.sums)
    if not recipe.axes:
        return _copy_unless_owned(assemble(recipe.rest, [tensor], mesh.sizes), tensor, alias, bool(recipe.sums)), {}
    whole = tensor.new_empty(recipe.whole)
    if recipe.stack:
        _gather_into(whole, tensor, recipe.axes)
        return whole, {}
    stacked = buffer_pool.take(recipe.count * tensor.nbytes, tensor.device)
    _gather_into(stacked, as_bytes(tensor), recipe.axes)
    shards = stacked.view(tensor.dtype).view(recipe.count, *tensor.shape).unbind()
    copy_blocks(recipe.blocks, recipe.rest, shards, whole)
    buffer_pool.give_back(stacked)
    return whole, {}


def _sum_over_axes(tensor: Tensor, axes: Sequence[Axis]) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    for axis in axes:
        call_metered("all_reduce", axis, total, dist.all_reduce, total)
    return total


def _copy_unless_owned(whole: Tensor, tensor: Tensor, alias: bool, ours: bool) -> Tensor:
    """A whole that was `tensor`, or a view of it: in memory of its own, unless it may be another's."""
    given = whole.is_contiguous() and (alias or (ours and whole is tensor))
    return whole if given else whole.clone(memory_format=torch.contiguous_format)


def _assemble_uneven(local: Tensor, layout: Layout, mesh: Mesh, alias: bool) -> tuple[Tensor, Lengths]:
    """The same of parts that may differ in length."""
    sizes = mesh.sizes
    shapes = _gather_shapes(local, layout, mesh)
    lengths = uneven_lengths(Layout(layout.dims), shapes, sizes)
    (sums, axes), tensor = split_sum_and_gather_axes(layout, mesh), local.detach()
    if sums:
        tensor = _sum_over_axes(tensor, sums)
    rest = Layout(layout.dims, (), layout.shared, layout.permute)
    whole = tensor.new_empty(full_shape(rest, local.shape, sizes, lengths))
    if len(set(shapes)) == 1 and is_stack(rest, local.shape, mesh):
        _gather_into(whole, tensor, axes)
        return whole, lengths
    count, width = prod(a.size for a in axes), max(prod(s) for s in shapes) * tensor.itemsize
    flat = as_bytes(tensor)
    if flat.nbytes < width:
        flat = buffer_pool.take(width, tensor.device)
        flat[: tensor.nbytes].copy_(as_bytes(tensor))
    stacked = buffer_pool.take(count * width, tensor.device)
    _gather_into(stacked, flat, axes)
    shards = [
        slot[: prod(shape) * tensor.itemsize].view(tensor.dtype).reshape(shape)
        for slot, shape in zip(stacked.split(width) if width else [stacked] * count, shapes, strict=True)
    ]
    assemble(rest, shards, sizes, out=whole)
    buffer_pool.give_back(stacked)
    return whole, lengths


def _gather_into(out: Tensor, tensor: Tensor, axes: Sequence[Axis]) -> None:
    """Put the equally shaped tensors of all ranks one after the other, the last axis counting fastest."""
    flat, borrowed = as_bytes(tensor), []
    for axis in reversed(axes[1:]):
        borrowed.append(buffer_pool.take(flat.nbytes * axis.size, flat.device))
        call_metered("all_gather", axis, borrowed[-1], getattr(dist, GATHER), borrowed[-1], flat)
        flat = borrowed[-1]
    call_metered("all_gather", axes[0], out, getattr(dist, GATHER), as_bytes(out), flat)
    for buffer in borrowed:
        buffer_pool.give_back(buffer)


def stack_along(tensor: Tensor, axis: Axis) -> Tensor:
    """Stack the equally shaped tensors of an axis along a new first dim."""
    out = torch.empty((axis.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    _gather_into(out, tensor, [axis])
    return out


def _gather_shapes(local: Tensor, layout: Layout, mesh: Mesh) -> list[tuple[int, ...]]:
    """The shapes of all parts where some may be uneven; a collective only then."""
    if not has_uneven_shards(layout, mesh):
        return []
    tensor = torch.tensor(local.shape, dtype=torch.int64, device=local.device)
    for name in reversed(layout.axes):
        if mesh[name].size > 1 and name not in layout.partial:
            tensor = stack_along(tensor, mesh[name])
    return [tuple(int(n) for n in row) for row in tensor.reshape(-1, local.ndim).tolist()]
