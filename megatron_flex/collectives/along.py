"""Tensors put together along one axis, sent from rank to rank, or given to all.

For what people send by themselves; hooks do not come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.edit import assemble_on_all_ranks, broadcast_from_first
from megatron_flex.collectives.rank_agreement import gather_objects
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Axis, Mesh


def gather_along(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """Concatenate the tensors of an axis; collective over it, not differentiable.

    Args:
        tensor: this rank's; the ranks' may differ in length along `dim`.
        dim: along which they are put together.
        axis: the ranks, in the order of their parts.

    Returns:
        The same tensor on every rank, in memory of its own.
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
    """Send and receive between ranks of an axis, all at once, and wait for it.

    Args:
        receive: where to put what comes.
        sources: for each the coordinate it comes from.
        send: what to send.
        targets: for each the coordinate it goes to.
        axis: the ranks.
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
    """Give every rank what the first one has. Collective over the mesh.

    Args:
        items: on the first rank picklable tags with tensors on the CPU; ignored elsewhere.
        mesh: the run's axes.
    """
    axes = [a for a in mesh if a.size > 1]
    if not axes:
        return list(items)
    first = mesh.is_first(a.name for a in axes)
    note = [(tag, tuple(t.shape), t.dtype) for tag, t in items] if first else None
    notes = next(n for n in gather_objects(note, mesh, [a.name for a in mesh]) if n is not None)
    device = "cuda" if dist.get_backend(axes[0].group) == "nccl" else "cpu"
    out = []
    for number, (tag, shape, dtype) in enumerate(notes):
        like = items[number][1] if first else torch.empty(shape, dtype=dtype)
        moved = like.to(device).contiguous()
        if moved.nbytes:
            broadcast_from_first(moved.reshape(-1).view(torch.uint8), mesh)
        out.append((tag, moved.cpu()))
    return out
