"""Gather the full tensor on every rank, and take the local shard of a full tensor; outside of any graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.assembly_plans import (
    AssemblyPlan,
    assembly_plan,
    find_shard_position,
    has_uneven_shards,
    is_stack,
    split_sum_and_gather_axes,
)
from megatron_flex.collectives.messages import as_bytes, buffer_pool
from megatron_flex.collectives.meter import call_metered
from megatron_flex.layout import (
    Layout,
    Lengths,
    assemble,
    copy_blocks,
    copy_shard,
    count_parts,
    extract,
    full_shape,
    uneven_lengths,
)
from megatron_flex.mesh import Axis, Mesh

SMALL_BYTES = 1 << 16  # bytes; a smaller buffer is allocated faster than it is found in the pool
SENT_AS_IS = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))  # by every backend

# torch's name of the gather of equal shards into one tensor, since 2.13 and before.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def broadcast_from_first(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Broadcast the tensor of the rank with coordinate 0 on all axes to every rank. Collective over the mesh.

    Args:
        tensor: contiguous; overwritten on the other ranks.
        mesh: the run's axes.
    """
    axes = list(mesh)
    for index, axis in enumerate(axes):
        # Broadcasts along the next axes reach the ranks with other coordinates there.
        if axis.size > 1 and mesh.is_first(a.name for a in axes[index + 1 :]):
            call_metered("broadcast", axis, tensor, dist.broadcast, tensor, axis.ranks[0])
    return tensor


def replica_mesh(layout: Layout, mesh: Mesh) -> Mesh:
    """The axes along which ranks hold the same full tensor after a gather."""
    data = (mesh["dp"],) if "dp" in layout.axes else ()
    return Mesh((*data, mesh["cp"], mesh["tp"]))


def take_local_shard(
    full: Tensor,
    layout: Layout,
    mesh: Mesh,
    shape: torch.Size,
    lengths: Lengths,
    old: Tensor | None = None,
    alias: bool = False,
) -> Tensor:
    """The local shard of a full tensor; `old` has its padding."""
    if lengths:
        return extract(
            layout, full, mesh.coords, mesh.sizes, old if old is not None else shape, lengths, alias
        )
    return copy_shard(find_shard_position(layout, mesh, full.shape, shape), full, old, alias)


def assemble_on_all_ranks(
    local: Tensor, layout: Layout, mesh: Mesh, alias: bool = False
) -> tuple[Tensor, Lengths]:
    """The full tensor on every rank, and the lengths of uneven shards; not differentiable.

    Collective over `layout.live(mesh.sizes)`: one all-reduce for each partial axis, one all-gather for each
    axis of sharding, and for uneven dims one more, of the shapes.

    Args:
        local: this rank's tensor.
        layout: the layout of the shards.
        mesh: the run's axes.
        alias: whether the result may share memory with `local`, where `local` is the full tensor.
    """
    local = local.detach()
    if not has_uneven_shards(layout, mesh):
        return assemble_equal(assembly_plan(layout, mesh, local.shape), local, alias), {}
    shapes = gather_shapes(local, layout, mesh)
    full = assemble_uneven(local, layout, mesh, shapes)
    return full, uneven_lengths(Layout(layout.dims), shapes, mesh.sizes)


def assemble_equal(recipe: AssemblyPlan, tensor: Tensor, alias: bool) -> Tensor:
    """The full tensor from shards of one shape, not in a graph; `alias` as in `assemble_on_all_ranks`."""
    if recipe.sums:
        tensor = _sum_over_axes(tensor, recipe.sums)
    if not recipe.axes:
        full = assemble(recipe.rest, [tensor], recipe.sizes)
        return _copy_unless_owned(full, tensor, alias, bool(recipe.sums))
    if recipe.slots is not None and recipe.joined is not None and len(recipe.axes) == 1:
        sent = tensor.dtype in SENT_AS_IS and type(tensor) is Tensor
        if sent and 0 < recipe.count * tensor.nbytes <= SMALL_BYTES:
            return _join_small(recipe, tensor)
    full = tensor.new_empty(recipe.full_size)
    if recipe.stack:
        _gather_into(full, tensor, recipe.axes)
        return full
    slots, nbytes = recipe.slots, recipe.count * tensor.nbytes
    stacked = buffer_pool.take(nbytes, tensor.device)
    _gather_into(stacked, as_bytes(tensor), recipe.axes)
    if slots is not None:
        full.as_strided(slots.shape, slots.stride).copy_(stacked.view(tensor.dtype).view(slots.shape))
    else:
        shards = stacked.view(tensor.dtype).view(recipe.count, *tensor.shape).unbind()
        copy_blocks(recipe.blocks, recipe.rest, shards, full)
    buffer_pool.give_back(stacked)
    return full


def _join_small(recipe: AssemblyPlan, tensor: Tensor) -> Tensor:
    """The full tensor from small shards: received in memory that is kept, and concatenated once."""
    assert recipe.joined is not None
    received, shards = buffer_pool.find_receiver(recipe.count, tensor)
    axis, gather = recipe.axes[0], getattr(dist, GATHER)
    call_metered("all_gather", axis, received, gather, received, tensor.contiguous())
    return torch.cat(shards, recipe.joined)


def _sum_over_axes(tensor: Tensor, axes: Sequence[Axis]) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    for axis in axes:
        call_metered("all_reduce", axis, total, dist.all_reduce, total)
    return total


def _copy_unless_owned(full: Tensor, tensor: Tensor, alias: bool, ours: bool) -> Tensor:
    """A full tensor that is `tensor` or a view of it: copied, unless it may share memory."""
    given = full.is_contiguous() and (alias or (ours and full is tensor))
    return full if given else full.clone(memory_format=torch.contiguous_format)


def assemble_uneven(local: Tensor, layout: Layout, mesh: Mesh, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """The full tensor from shards of these shapes, those of all ranks; collective as `assemble_on_all_ranks`.

    The tensors are not in a graph.
    """
    sizes = mesh.sizes
    lengths = uneven_lengths(Layout(layout.dims), shapes, sizes)
    (sums, axes), tensor = split_sum_and_gather_axes(layout, mesh), local
    if sums:
        tensor = _sum_over_axes(tensor, sums)
    rest = Layout(layout.dims, (), layout.shared, layout.permute)
    full = tensor.new_empty(full_shape(rest, local.shape, sizes, lengths))
    if len(set(shapes)) == 1 and is_stack(rest, local.shape, mesh):
        _gather_into(full, tensor, axes)
        return full
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
    assemble(rest, shards, sizes, out=full)
    buffer_pool.give_back(stacked)
    return full


def _gather_into(out: Tensor, tensor: Tensor, axes: Sequence[Axis]) -> None:
    """Concatenate the equally shaped tensors of all ranks, the last axis counting fastest."""
    flat = as_bytes(tensor)
    if len(axes) == 1:
        call_metered("all_gather", axes[0], out, getattr(dist, GATHER), as_bytes(out), flat)
        return
    borrowed = []
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


def gather_shapes(local: Tensor, layout: Layout, mesh: Mesh) -> list[tuple[int, ...]]:
    """The shapes of all shards if they may be uneven, otherwise none. Collective only if they may be."""
    if not has_uneven_shards(layout, mesh):
        return []
    # The host need not wait for the few bytes: the driver has taken them when the call returns.
    tensor = torch.tensor(local.shape, dtype=torch.int64).to(local.device, non_blocking=True)
    for name in reversed(layout.axes):
        if mesh[name].size > 1 and name not in layout.partial:
            tensor = stack_along(tensor, mesh[name])
    return [tuple(int(n) for n in row) for row in tensor.reshape(-1, local.ndim).tolist()]


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One planned collective.

    Attributes:
        op: its name.
        axis: the axis of its group.
        number: bytes of its result on one rank, for each combination of the dims in `names`.
        names: dims whose length depends on the data.
    """

    op: str
    axis: str
    number: float
    names: tuple[str, ...]

    def nbytes(self, lengths: Mapping[str, int]) -> float:
        """The bytes for given lengths."""
        return self.number * prod(lengths[n] for n in self.names)

    def describe(self) -> str:
        """A text such as `all_gather along tp, 128*s*b bytes`."""
        amount = "*".join([f"{self.number:g}", *self.names])
        return f"{self.op} along {self.axis}, {amount} bytes"


def plan_full_gather(
    layout: Layout, shape: Sequence[int | str], itemsize: int, mesh: Mesh
) -> list[PlannedCollective]:
    """The collectives that assemble the full tensor on every rank.

    Args:
        layout: the layout of the shards.
        shape: the full tensor's shape; a name for each dim whose length depends on the data.
        itemsize: bytes of an entry.
        mesh: the run's axes.
    """
    cut = prod(count_parts(d, mesh.sizes) for d in layout.dims)
    number = itemsize * prod(_pad_known_lengths(layout, shape, mesh)) / cut
    names = tuple(n for n in shape if isinstance(n, str))
    live = layout.active_axes(mesh.sizes)
    out = [PlannedCollective("all_reduce", a, number, names) for a in live if a in layout.partial]
    for axis in (a for a in reversed(live) if a not in layout.partial):
        number *= mesh[axis].size
        out.append(PlannedCollective("all_gather", axis, number, names))
    return out


def plan_result_broadcast(
    layout: Layout, shape: Sequence[int | str], itemsize: int, mesh: Mesh
) -> list[PlannedCollective]:
    """The collectives that broadcast the result of one rank to the others, or the gradient back.

    Args:
        layout: the layout of the shards.
        shape: the full tensor's shape.
        itemsize: bytes of an entry.
        mesh: the run's axes.
    """
    number = float(itemsize * prod(n for n in shape if isinstance(n, int)))
    names = tuple(n for n in shape if isinstance(n, str))
    axes = list(replica_mesh(layout, mesh))
    return [
        PlannedCollective("broadcast", a.name, number, names)
        for i, a in enumerate(axes)
        if a.size > 1 and mesh.is_first(later.name for later in axes[i + 1 :])
    ]


def _pad_known_lengths(layout: Layout, shape: Sequence[int | str], mesh: Mesh) -> list[int]:
    """The known lengths of dims, with the least padding that their sharding requires."""
    order = layout.permute or tuple(range(len(layout.dims)))
    out = []
    for place, length in zip(order, shape, strict=True):
        dim = layout.dims[place]
        if isinstance(length, int):
            count = count_parts(dim, mesh.sizes) if dim.keep is not None else 1
            out.append(-(-length // count) * count)
    return out
