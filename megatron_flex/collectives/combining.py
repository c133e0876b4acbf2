"""Copies of one thing on every rank: what each rank adds to it is put together, the same bits everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.edit import broadcast_from_first
from megatron_flex.mesh import Mesh

SAMPLE_AXES = ("cp", "tp")  # ranks along these compute the same of one sample


def combine_replicas(flat: Tensor, mesh: Mesh) -> Tensor:
    """Sum over pipeline stages, average over data parallel ranks, and give the result to every rank.

    Of the ranks along `tp` and `cp` the first one counts. Every rank gets the same bits: one of them reduces
    and the others get copies. Collective over the mesh: one collective for each axis with more than one rank,
    two for `pp`.

    Args:
        flat: contiguous; overwritten.
        mesh: the run's axes.
    """
    stages, data = mesh["pp"], mesh["dp"]
    if stages.size > 1 and mesh.is_first(SAMPLE_AXES):
        dist.reduce(flat, stages.ranks[0], group=stages.group)
    if data.size > 1 and mesh.is_first(("pp", *SAMPLE_AXES)):
        dist.all_reduce(flat, group=data.group)
        flat /= data.size
    return broadcast_from_first(flat, Mesh(tuple(mesh[n] for n in ("pp", *SAMPLE_AXES))))


def broadcast_copies(tensors: Sequence[Tensor], mesh: Mesh) -> None:
    """Overwrite tensors, of whatever dtype and strides, by those of the mesh's first rank.

    Collective over the mesh; all ranks pass tensors of the same shapes and dtypes.
    """
    for tensor in tensors:
        packed = tensor.detach().clone(memory_format=torch.contiguous_format)
        broadcast_from_first(packed.reshape(-1).view(torch.uint8), mesh)  # as bytes, since not every backend moves bools
        with torch.no_grad():
            tensor.copy_(packed)


def sum_over_ranks(value: Tensor, mesh: Mesh, axes: Sequence[str]) -> float:
    """A number, added over the ranks along `axes`. Collective over those.

    Args:
        value: of any numeric dtype, on the device that the axes' backend uses.
        mesh: the run's axes.
        axes: over which.
    """
    total = value.detach().double().reshape(1).clone()
    for axis in (mesh[n] for n in axes):
        if axis.size > 1:
            dist.all_reduce(total, group=axis.group)
    return float(total)
