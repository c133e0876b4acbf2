"""Transfers of tensors: gathers along an axis, sends, broadcasts; and comparison of replicas.

For parameters, checks and explicit transfers; hooks do not use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.gather_plan import is_leader
from megatron_flex.collectives.gather_scatter import assemble_on_all_ranks, broadcast_from_first
from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.collectives.host_groups import device_of
from megatron_flex.collectives.leader_gather import gather_to_leader
from megatron_flex.collectives.messages import as_bytes, group_by_size
from megatron_flex.collectives.object_exchange import broadcast_object
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh


def gather_along(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """Concatenate the tensors of an axis; collective over it, not differentiable.

    Args:
        tensor: this rank's tensor; ranks may differ in length along `dim`.
        dim: the dim of the concatenation.
        axis: the axis, in the order of the tensors.

    Returns:
        The concatenated tensor on every rank, in separate memory.
    """
    dim = dim % tensor.dim()
    cut = Dim(cuts=(Cut(axis.name),), uneven=True)
    dims = tuple(cut if i == dim else Dim() for i in range(tensor.dim()))
    return assemble_on_all_ranks(tensor, Layout(dims), Mesh((axis,)))[0]


def exchange_tensors(
    receive: Sequence[Tensor],
    sources: Sequence[int],
    send: Sequence[Tensor],
    targets: Sequence[int],
    axis: Axis,
) -> None:
    """Send and receive between ranks of an axis concurrently, and wait.

    Args:
        receive: the tensors to receive into.
        sources: the source coordinate of each.
        send: the tensors to send.
        targets: the destination coordinate of each.
        axis: the axis.
    """
    landings = [t if t.is_contiguous() else t.contiguous() for t in receive]
    leaving = [t.contiguous() for t in send]
    operations = [
        dist.P2POp(dist.irecv, t, axis.ranks[source], group=axis.group)
        for t, source in zip(landings, sources, strict=True)
    ] + [
        dist.P2POp(dist.isend, t, axis.ranks[target], group=axis.group)
        for t, target in zip(leaving, targets, strict=True)
    ]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for tensor, landing in zip(receive, landings, strict=True):
        if tensor is not landing:
            tensor.copy_(landing)


def broadcast_items(items: Sequence[tuple[Any, Tensor]], mesh: Mesh) -> list[tuple[Any, Tensor]]:
    """Broadcast the items of the first rank to every rank. Collective over the mesh.

    Args:
        items: on the first rank, picklable tags with tensors on the CPU; ignored elsewhere.
        mesh: the run's axes.
    """
    axes = [a for a in mesh if a.size > 1]
    if not axes:
        return list(items)
    first = mesh.is_first(a.name for a in axes)
    notes = broadcast_object([(tag, tuple(t.shape), t.dtype) for tag, t in items] if first else None, mesh)
    device = device_of(axes[0].group)
    out = []
    for number, (tag, shape, dtype) in enumerate(notes):
        like = items[number][1] if first else torch.empty(shape, dtype=dtype)
        moved = like.to(device).contiguous()
        if moved.nbytes:
            broadcast_from_first(as_bytes(moved), mesh)
        out.append((tag, moved.cpu()))
    return out


def broadcast_in_buckets(
    items: Sequence[tuple[Any, Tensor]], mesh: Mesh, bucket_bytes: int
) -> list[tuple[Any, Tensor]]:
    """Broadcast the items of the rank with coordinate 0 on all axes. Collective over the mesh.

    Args:
        items: picklable tags with their tensors, on the CPU; unused on the other ranks.
        mesh: the axes.
        bucket_bytes: tensors of at least this size are sent alone.

    Returns:
        The items, in their order, on the CPU.
    """
    axes = [a for a in mesh if a.size > 1]
    if not axes:
        return list(items)
    first = mesh.is_first(a.name for a in mesh)
    headers = broadcast_object([(tag, tuple(t.shape), t.dtype) for tag, t in items], mesh)
    sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for _, shape, dtype in headers]
    device = device_of(axes[0].group)
    out = []
    for bucket in group_by_size(sizes, bucket_bytes):
        lengths = [sizes[n] for n in bucket]
        if first:
            flat = torch.cat([as_bytes(items[n][1]) for n in bucket])
        else:
            flat = torch.empty(sum(lengths), dtype=torch.uint8)
        flat = broadcast_from_first(flat.to(device), mesh).cpu() if len(flat) else flat
        for n, part in zip(bucket, flat.split(lengths), strict=True):
            tag, shape, dtype = headers[n]
            out.append((tag, part.clone().view(dtype).reshape(shape)))
    return out


NO_VALUE = -(2**62)  # below every checksum and its negative
CHECKSUM_ENTRIES = 1 << 20  # entries of one chunk of a checksum


def assemble_on_stage(
    local: Tensor | None,
    layout: Layout,
    owner: Sequence[tuple[str, int]],
    like: Tensor,
    mesh: Mesh,
    everywhere: bool,
) -> Tensor | None:
    """Assemble one tensor on its pipeline stage.

    Collective over the layout's axes and the owners'.

    Args:
        local: the local shard; None on ranks that do not own it.
        layout: the layout of the shards.
        owner: the coordinates of the owning ranks, apart from their stage.
        like: a tensor without memory (on `meta`), of the full tensor's shape and dtype.
        mesh: the run's axes.
        everywhere: assemble on all ranks of the stage instead of its leader only.

    Returns:
        The full tensor on the leader, or on all ranks of the stage; it may share memory with `local`.
        Otherwise None.
    """
    dense = {a.name for a in mesh}
    if local is not None and not owner and not everywhere and set(layout.axes) <= dense:
        return gather_to_leader([(layout, local)], mesh, 0)[0]
    full = None if local is None else assemble_on_all_ranks(local, layout, mesh)[0]
    for axis, coord in ((mesh[name], coord) for name, coord in owner):
        if axis.size > 1:
            full = _buffer(like, axis) if full is None else full
            run_collective(dist.broadcast, full, axis.ranks[coord], group=axis.group)
    return full if everywhere or is_leader(mesh) else None


def send_from_stage(
    full: Tensor | None, stage: int, like: Tensor, mesh: Mesh, everywhere: bool
) -> Tensor | None:
    """Send the tensor of one stage to the leader of the first stage, or to all ranks.

    Collective over `pp`: among the leaders of the two stages only, unless `everywhere`.

    Args:
        full: the result of `assemble_on_stage` on that stage; unused elsewhere.
        stage: the stage.
        like: a tensor without memory (on `meta`), of the full tensor's shape and dtype.
        mesh: the run's axes.
        everywhere: to all ranks instead of to the leader.
    """
    axis = mesh["pp"]
    if axis.size == 1 or (stage == 0 and not everywhere):
        return full if axis.coord == stage else None
    if everywhere:
        tensor = full if axis.coord == stage and full is not None else _buffer(like, axis)
        run_collective(dist.broadcast, tensor, axis.ranks[stage], group=axis.group)
        return tensor
    if axis.coord == stage and full is not None:
        dist.send(as_bytes(full).to(device_of(axis.group)), axis.ranks[0], group=axis.group)
    elif axis.coord == 0 and is_leader(mesh):
        buffer = _buffer(like, axis)
        dist.recv(as_bytes(buffer), axis.ranks[stage], group=axis.group)
        return buffer
    return None


def join_flat_parts(tensor: Tensor, part: tuple[int, int] | None, group: Any) -> Tensor:
    """Assemble a tensor of which each rank of a group has only some valid entries.

    Collective over `group`, unless `part` is None or the group has one rank. `tensor` is not modified.

    Args:
        tensor: this rank's tensor.
        part: the range of valid entries in the flattened tensor; ranges of different ranks do not overlap.
        group: the process group.
    """
    if part is None or dist.get_world_size(group) == 1:
        return tensor
    out = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    out.view(-1)[slice(*part)] = tensor.reshape(-1)[slice(*part)]
    run_collective(dist.all_reduce, out, group=group)
    return out


def checksum(tensor: Tensor) -> int:
    """A checksum, equal for equal bits (with -0.0 as 0.0), and almost never equal for others."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_floating_point() and flat.element_size() > 1:
        flat = flat + 0.0  # -0.0 becomes 0.0
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(torch.uint8 if flat.is_complex() else widths[flat.element_size()])
    total = 0
    for start in range(0, bits.numel(), CHECKSUM_ENTRIES):
        piece = bits[start : start + CHECKSUM_ENTRIES].to(torch.int64)
        places = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=bits.device)
        weights = (places * 0x9E3779B1 + 0x85EBCA77) ^ (places >> 7)
        total = (total * 31 + int(((piece + 0x27D4EB2F) * weights).sum())) % 2**61
    return total


def find_differing_axes(
    values: Sequence[Mapping[str, int]], mesh: Mesh, axes: Sequence[str]
) -> list[list[str]]:
    """For each item, the axes along which values differ between any ranks.

    Collective over the mesh and `axes`; all ranks pass the same number of items.

    Args:
        values: for each item the value to compare along each axis; this rank does not compare along missing
            axes.
        mesh: the run's axes.
        axes: the axes that may occur, in the order in which they are compared.
    """
    compared = [mesh[n] for n in axes if mesh[n].size > 1]
    if not compared:
        return [[] for _ in values]
    device = device_of(compared[0].group)
    flags = torch.zeros((len(compared), len(values)), dtype=torch.int32, device=device)
    for row, axis in enumerate(compared):
        local_values = [v.get(axis.name, NO_VALUE) for v in values]
        both = torch.tensor(
            [local_values, [NO_VALUE if m == NO_VALUE else -m for m in local_values]], device=device
        )
        run_collective(dist.all_reduce, both, op=dist.ReduceOp.MAX, group=axis.group)
        flags[row] = ((both[0] != -both[1]) & (both[0] != NO_VALUE)).int()
    for axis in mesh:
        if axis.size > 1:
            run_collective(dist.all_reduce, flags, op=dist.ReduceOp.MAX, group=axis.group)
    rows = flags.tolist()
    return [[a.name for a, row in zip(compared, rows, strict=True) if row[i]] for i in range(len(values))]


def _buffer(like: Tensor, axis: Axis) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device_of(axis.group))
