"""One tensor at a time: to the leader or to everyone, from one rank to all, and whether copies are equal.

For parameters and for checking, which no step waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.edit import assemble_on_all_ranks
from megatron_flex.collectives.leader_gather import PendingShard, is_leader, gather_to_leader
from megatron_flex.layout import Layout
from megatron_flex.mesh import Axis, Mesh

NO_VALUE = -(2**62)  # below every checksum and its negative
CHECKSUM_ENTRIES = 1 << 20  # entries of which a checksum is taken at once


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
        local: this rank's part; None on ranks that do not own it.
        layout: how the parts relate.
        owner: coordinates that the owning ranks have beside their stage.
        like: a tensor without memory (on `meta`), of the whole's shape and dtype.
        mesh: the run's axes.
        everywhere: on all ranks of the stage instead of on its leader.

    Returns:
        The whole on the leader, or everywhere; it may share memory with `local`. None elsewhere.
    """
    dense = {a.name for a in mesh}
    if local is not None and not owner and not everywhere and set(layout.axes) <= dense:
        return gather_to_leader([PendingShard(layout, [local])], mesh, 0)[0]
    whole = None if local is None else assemble_on_all_ranks(local, layout, mesh)[0]
    for axis, coord in ((mesh[name], coord) for name, coord in owner):
        if axis.size > 1:
            whole = _buffer(like, axis) if whole is None else whole
            dist.broadcast(whole, axis.ranks[coord], group=axis.group)
    return whole if everywhere or is_leader(mesh) else None


def send_from_stage(
    whole: Tensor | None, stage: int, like: Tensor, mesh: Mesh, everywhere: bool
) -> Tensor | None:
    """Bring what one stage's leader, or all of the stage, has to the first stage's leader, or to everyone.

    Collective over `pp`: among the leaders of the two stages only, unless `everywhere`.

    Args:
        whole: what `assemble_on_stage` gave on that stage; unused elsewhere.
        stage: the stage.
        like: a tensor without memory (on `meta`), of the whole's shape and dtype.
        mesh: the run's axes.
        everywhere: to all ranks instead of to the leader.
    """
    axis = mesh["pp"]
    if axis.size == 1 or (stage == 0 and not everywhere):
        return whole if axis.coord == stage else None
    if everywhere:
        tensor = whole if axis.coord == stage and whole is not None else _buffer(like, axis)
        dist.broadcast(tensor, axis.ranks[stage], group=axis.group)
        return tensor
    if axis.coord == stage and whole is not None:
        dist.send(_view_as_bytes(whole).to(_device(axis)), axis.ranks[0], group=axis.group)
    elif axis.coord == 0 and is_leader(mesh):
        buffer = _buffer(like, axis)
        dist.recv(_view_as_bytes(buffer), axis.ranks[stage], group=axis.group)
        return buffer
    return None


def join_flat_parts(tensor: Tensor, part: tuple[int, int] | None, group: Any) -> Tensor:
    """The tensor of which each rank of a group has only some entries right.

    Collective over `group`, unless `part` is None or the group has one rank. `tensor` is left as it is.

    Args:
        tensor: as this rank has it.
        part: the entries, counted flat, that are right here; the parts of all ranks do not overlap.
        group: the ranks.
    """
    if part is None or dist.get_world_size(group) == 1:
        return tensor
    out = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    out.view(-1)[slice(*part)] = tensor.reshape(-1)[slice(*part)]
    dist.all_reduce(out, group=group)
    return out


def checksum(tensor: Tensor) -> int:
    """A number that two tensors of the same bits share, and others practically never do."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_floating_point():
        flat = flat + 0.0  # so that both zeros count alike
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(torch.uint8 if flat.is_complex() else widths[flat.element_size()])
    total = 0
    for start in range(0, bits.numel(), CHECKSUM_ENTRIES):
        piece = bits[start : start + CHECKSUM_ENTRIES].to(torch.int64)
        places = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=bits.device)
        weights = (places * 0x9E3779B1 + 0x85EBCA77) ^ (places >> 7)
        total = (total * 31 + int(((piece + 0x27D4EB2F) * weights).sum())) % 2**61
    return total


def find_differing_axes(values: Sequence[Mapping[str, int]], mesh: Mesh, axes: Sequence[str]) -> list[list[str]]:
    """For each item the axes along which ranks have other values, on whichever rank.

    Collective over the mesh and `axes`; all ranks pass equally many items.

    Args:
        values: for each item the value that is compared along each axis; an axis that is missing is not
            compared on this rank.
        mesh: the run's axes.
        axes: the axes that may occur, in the order in which they are compared.
    """
    compared = [mesh[n] for n in axes if mesh[n].size > 1]
    if not compared:
        return [[] for _ in values]
    device = _device(compared[0])
    flags = torch.zeros((len(compared), len(values)), dtype=torch.int32, device=device)
    for row, axis in enumerate(compared):
        mine = [v.get(axis.name, NO_VALUE) for v in values]
        both = torch.tensor([mine, [NO_VALUE if m == NO_VALUE else -m for m in mine]], device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=axis.group)
        flags[row] = ((both[0] != -both[1]) & (both[0] != NO_VALUE)).int()
    for axis in mesh:
        if axis.size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=axis.group)
    found = flags.tolist()
    return [[a.name for a, row in zip(compared, found, strict=True) if row[i]] for i in range(len(values))]


def _buffer(like: Tensor, axis: Axis) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=_device(axis))


def _device(axis: Axis) -> str:
    return "cuda" if dist.get_backend(axis.group) == "nccl" else "cpu"


def _view_as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
