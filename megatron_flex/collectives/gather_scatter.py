"""Gather the full tensor on every rank, and take the local shard of a full tensor.

Neither is differentiable: `edit_exchange` has the autograd nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.messages import as_bytes, buffer_pool
from megatron_flex.collectives.meter import call_metered
from megatron_flex.layout import (
    Block,
    Layout,
    Lengths,
    ShardCopy,
    blocks,
    copy_from_full,
    count_parts,
    find_joined_dim,
    find_values,
    full_order,
    full_shape,
    padded_shape,
    plan_copy,
    single_device_view,
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


def has_uneven_shards(layout: Layout, mesh: Mesh) -> bool:
    """Whether shards may differ in length."""
    return any(d.uneven and any(mesh[c.axis].size > 1 for c in d.cuts) for d in layout.dims)


def check_shard(shape: torch.Size, layout: Layout, mesh: Mesh) -> None:
    """Validate that a local tensor of this shape can be a shard in its layout. No communication.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    if not has_uneven_shards(layout, mesh):
        blocks(layout, mesh.coords, mesh.sizes, padded_shape(layout, shape, mesh.sizes))
    elif len(shape) != len(layout.dims):
        padded_shape(layout, shape, mesh.sizes)


def split_sum_and_gather_axes(layout: Layout, mesh: Mesh) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The axes to sum over, and those to gather over."""
    sums = tuple(mesh[a] for a in layout.partial if mesh[a].size > 1)
    return sums, tuple(mesh[a] for a in layout.axes if mesh[a].size > 1 and a not in layout.partial)


def assemble_on_all_ranks(
    local: Tensor, layout: Layout, mesh: Mesh, alias: bool = False
) -> tuple[Tensor, Lengths]:
    """The full tensor on every rank, and the lengths of uneven shards; not differentiable.

    Collective over `layout.active_axes(mesh.sizes)`: one all-reduce for each partial axis, one all-gather for
    each axis of sharding, and for uneven dims one more, of the shapes.

    Args:
        local: this rank's tensor.
        layout: the layout of the shards.
        mesh: the run's axes.
        alias: whether the result may share memory with `local`, where `local` is the full tensor.
    """
    local = local.detach()
    if not has_uneven_shards(layout, mesh):
        return EqualShards.from_layout(layout, mesh, local.shape).assemble(local, alias), {}
    shapes = gather_shapes(local, layout, mesh)
    full = assemble_uneven(local, layout, mesh, shapes)
    return full, uneven_lengths(Layout(layout.dims), shapes, mesh.sizes)


@dataclass(frozen=True, slots=True)
class EqualShards:
    """Shards of one layout and shape, without uneven dims: to the full tensor on every rank, and back.

    Attributes:
        layout: the layout of the shards, after the sums.
        shape: the shape of a shard.
        full_size: the shape of the full tensor.
        sums: the axes to sum over, before any gather.
        axes: the axes to gather over, the last counting fastest; empty if each rank has the full tensor.
        count: the number of shards.
        copy: copies all shards into the full tensor; None if each rank has it.
        joined: the dim along which the shards follow one another in the full tensor; None without one.
        values: the blocks of the full tensor that this rank's shard gets.
    """

    layout: Layout
    shape: torch.Size
    full_size: tuple[int, ...]
    sums: tuple[Axis, ...]
    axes: tuple[Axis, ...]
    count: int
    copy: ShardCopy | None
    joined: int | None
    values: tuple[Block, ...]

    @classmethod
    def from_layout(cls, layout: Layout, mesh: Mesh, shape: torch.Size) -> EqualShards:
        """The shards of a shape on a mesh. No communication.

        Raises:
            LayoutError: the shape does not fit the layout.
        """
        sizes, (sums, axes) = mesh.sizes, split_sum_and_gather_axes(layout, mesh)
        rest = Layout(layout.dims, (), layout.shared, layout.permute)
        full_size = full_shape(rest, shape, sizes)
        values = find_values(layout, mesh.coords, sizes, padded_shape(layout, shape, sizes))
        copy = plan_copy(rest, shape, sizes) if axes else None
        joined = find_joined_dim(rest, shape, sizes) if axes else None
        count = prod([a.size for a in axes])
        return cls(rest, shape, full_size, sums, axes, count, copy, joined, values)

    def assemble(self, tensor: Tensor, alias: bool) -> Tensor:
        """The full tensor, not in a graph, from this rank's shard; `alias` as in `assemble_on_all_ranks`."""
        if self.sums:
            tensor = _sum_over_axes(tensor, self.sums)
        if self.copy is None:
            full = single_device_view(self.layout, tensor)
            return _copy_unless_owned(full, tensor, alias, bool(self.sums))
        if self.joined is not None and prod(self.shape[: self.joined]) == 1:
            full = tensor.new_empty(self.full_size)  # the shards, one after the other
            _gather_into(full, tensor, self.axes)
            return full
        if self.joined is not None and len(self.axes) == 1:
            sent = tensor.dtype in SENT_AS_IS and type(tensor) is Tensor
            if sent and 0 < self.count * tensor.nbytes <= SMALL_BYTES:
                return _join_small(tensor, self.count, self.axes[0], self.joined)
        full = tensor.new_empty(self.full_size)
        stacked = buffer_pool.take(self.count * tensor.nbytes, tensor.device)
        _gather_into(stacked, as_bytes(tensor), self.axes)
        self.copy(stacked.view(tensor.dtype).view(self.count, *self.shape), full)
        buffer_pool.give_back(stacked)
        return full

    def extract(self, full: Tensor, alias: bool = False) -> Tensor:
        """This rank's shard of a full tensor, contiguous; with `alias` it may be a view."""
        return copy_from_full(self.layout, full, self.values, self.shape, alias=alias)


def _join_small(tensor: Tensor, count: int, axis: Axis, dim: int) -> Tensor:
    """The full tensor from small shards: received in memory that is kept, and concatenated once."""
    received, shards = buffer_pool.find_receiver(count, tensor)
    call_metered("all_gather", axis, received, getattr(dist, GATHER), received, tensor.contiguous())
    return torch.cat(shards, dim)


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
    joined = find_joined_dim(rest, local.shape, sizes) if len(set(shapes)) == 1 else None
    if joined is not None and prod(local.shape[:joined]) == 1:
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
    plan_copy(rest, shapes[0], sizes, lengths)(shards, full)
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
    order = full_order(layout)
    out = []
    for place, length in zip(order, shape, strict=True):
        dim = layout.dims[place]
        if isinstance(length, int):
            count = count_parts(dim, mesh.sizes) if dim.keep is not None else 1
            out.append(-(-length // count) * count)
    return out
