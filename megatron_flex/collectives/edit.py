"""Gather the whole on every rank, scatter it again; forward and backward conjugates side by side.

Every rank of the group runs the same edit on the same whole. So the gradient of the whole is the same on
all of them, and going back means to take one's own part of it, not to sum.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.meter import counted
from megatron_flex.layout import Layout, Lengths, assemble, extract, part_lengths
from megatron_flex.mesh import Axis, Mesh

# What torch calls the gathering of equal parts into one tensor, since 2.13 and before.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def gather_whole(local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
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


def scatter_whole(whole: Tensor, local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """Give every rank its shard of a whole that all of them hold.

    Sends nothing forward; backward it is collective over the axes that split the gradient.

    Args:
        whole: the same tensor on every rank, of the shape that `gather_whole` gave.
        local: the shard as it was, for the padding that the layout strips.
        layout: how the shards relate.
        mesh: the run's axes.

    Returns:
        The local tensor in `layout`, contiguous, no view of anything.
    """
    return cast(Tensor, _Scatter.apply(whole, local, layout, mesh))  # type: ignore[no-untyped-call]


def towards_leader(whole: Tensor, holders: Mesh) -> Tensor:
    """The whole, where only the leader goes on computing with it.

    Sends nothing forward; backward the leader's gradient goes to all ranks that hold the whole. Each of them
    calls it, and `from_leader` behind it.

    Args:
        whole: the same tensor on all `holders`.
        holders: what `replicas` gives.
    """
    if whole.is_floating_point() and torch.is_grad_enabled() and not whole.requires_grad:
        # What the leader makes may need a gradient even so; then all ranks must go through it backward.
        whole = whole.detach().requires_grad_()
    return cast(Tensor, _TowardsLeader.apply(whole, holders))  # type: ignore[no-untyped-call]


def from_leader(made: Tensor, whole: Tensor, holders: Mesh) -> Tensor:
    """Give every rank what the leader made of the whole.

    Collective over `holders`, forward; sends nothing backward.

    Args:
        made: on the leader what it made; elsewhere `whole`, whose shape and dtype it has.
        whole: what `towards_leader` gave, whose backward pass runs even if `made` does not depend on it.
        holders: what `replicas` gives.
    """
    return cast(Tensor, _FromLeader.apply(made, whole, holders))  # type: ignore[no-untyped-call]


def spread(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Give every rank what the rank with coordinate 0 on all axes has. Collective over the mesh.

    Args:
        tensor: contiguous; overwritten on the others.
        mesh: the run's axes.
    """
    axes = list(mesh)
    for index, axis in enumerate(axes):
        # Ranks further along the axes that follow get it later, from those that have it now.
        if axis.size > 1 and mesh.is_first(a.name for a in axes[index + 1 :]):
            counted("broadcast", axis, tensor, dist.broadcast, tensor, axis.ranks[0])
    return tensor


def replicas(layout: Layout, mesh: Mesh) -> Mesh:
    """The axes along which ranks hold the same whole, once it is gathered."""
    data = (mesh["dp"],) if "dp" in layout.axes else ()
    return Mesh((*data, mesh["cp"], mesh["tp"]))


class _TowardsLeader(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, holders: Mesh) -> Tensor:
        ctx.holders = holders
        return whole.detach()  # no view, which could not be edited in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return spread(grad.clone(memory_format=torch.contiguous_format), ctx.holders), None


class _FromLeader(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, whole: Tensor, holders: Mesh) -> Tensor:
        return spread(made.detach().clone(memory_format=torch.contiguous_format), holders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.zeros_like(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.mesh, ctx.shape = layout, mesh, tuple(local.shape)
        whole, ctx.lengths = all_assemble(local, layout, mesh)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        mesh: Mesh = ctx.mesh
        own = extract(ctx.layout.gradient(), grad, mesh.coords, mesh.sizes, ctx.shape, ctx.lengths)
        return own, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.layout, ctx.mesh = layout, mesh
        lengths = _lengths(local, layout, mesh)
        return extract(layout, whole, mesh.coords, mesh.sizes, local, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        mesh, gradient = ctx.mesh, ctx.layout.gradient()
        # The whole's gradient is assembled even where the edit's result needs none: were that left to each
        # rank, one whose edit failed would wait for the others for ever.
        whole, lengths = all_assemble(grad, gradient, mesh)
        passed = None
        if any(d.keep is not None for d in gradient.dims):
            kept = extract(
                gradient, torch.ones_like(whole), mesh.coords, mesh.sizes, tuple(grad.shape), lengths
            )
            passed = grad * (1 - kept)
        return whole, passed, None, None


def all_assemble(local: Tensor, layout: Layout, mesh: Mesh) -> tuple[Tensor, Lengths]:
    """The whole on every rank, and the lengths of uneven parts; not differentiable.

    Collective over `layout.live(mesh.sizes)`: one all-reduce for each summed axis, one all-gather for each
    axis that cuts, and for uneven dims one more, of the shapes.
    """
    sizes = mesh.sizes
    lengths = _lengths(local, layout, mesh)
    tensor = local.detach().contiguous()
    for name in layout.partial:
        if mesh[name].size > 1:
            tensor = tensor.clone() if tensor.data_ptr() == local.data_ptr() else tensor
            counted("all_reduce", mesh[name], tensor, dist.all_reduce, tensor)
    axes = [mesh[a] for a in layout.axes if mesh[a].size > 1 and a not in layout.partial]
    rest = Layout(layout.dims, (), layout.shared, layout.permute)
    if axes and lengths:
        shards = _all_gather_uneven(tensor, rest, axes, lengths, mesh)
    else:
        for axis in reversed(axes):
            tensor = stack_along(tensor, axis)
        shards = list(tensor.reshape(prod(a.size for a in axes), *local.shape))
    whole = assemble(rest, shards, sizes).contiguous()
    return (whole.clone() if whole.data_ptr() == local.data_ptr() else whole), lengths


def stack_along(tensor: Tensor, axis: Axis) -> Tensor:
    """Stack the equally shaped tensors of an axis along a new first dim."""
    out = torch.empty((axis.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    # As bytes, since not every backend moves every dtype.
    flat, mine = out.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
    counted("all_gather", axis, out, getattr(dist, GATHER), flat, mine)
    return out


def _all_gather_uneven(
    tensor: Tensor, layout: Layout, axes: list[Axis], lengths: Lengths, mesh: Mesh
) -> list[Tensor]:
    """Pad to the longest part, gather, and cut the padding off again."""
    shapes = _all_shapes(tuple(tensor.shape), layout, mesh, tensor.device)
    most = [max(column) for column in zip(*shapes, strict=True)]
    padded = tensor.new_zeros(most)
    padded[tuple(slice(0, n) for n in tensor.shape)] = tensor
    for axis in reversed(axes):
        padded = stack_along(padded, axis)
    stacked = padded.reshape(len(shapes), *most)
    return [s[tuple(slice(0, n) for n in shape)] for s, shape in zip(stacked, shapes, strict=True)]


def _lengths(local: Tensor, layout: Layout, mesh: Mesh) -> Lengths:
    """The lengths of uneven parts; a collective only if the layout has such a dim on this mesh."""
    uneven = any(d.uneven and any(mesh[c.axis].size > 1 for c in d.cuts) for d in layout.dims)
    if not uneven:
        return {}
    cut = Layout(layout.dims)
    return part_lengths(cut, _all_shapes(tuple(local.shape), cut, mesh, local.device), mesh.sizes)


def _all_shapes(
    shape: tuple[int, ...], layout: Layout, mesh: Mesh, device: torch.device
) -> list[tuple[int, ...]]:
    tensor = torch.tensor(shape, dtype=torch.int64, device=device)
    for name in reversed(layout.axes):
        if mesh[name].size > 1 and name not in layout.partial:
            tensor = stack_along(tensor, mesh[name])
    return [tuple(int(n) for n in row) for row in tensor.reshape(-1, len(shape)).tolist()]
