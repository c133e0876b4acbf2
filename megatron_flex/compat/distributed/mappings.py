"""Collectives along the tensor, pipeline and data parallel ranks of a model.

All ranks along an axis call its collectives. They are not differentiable; hooks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_flex.collectives import broadcast_from_first, exchange_tensors, gather_along, gather_up_pipeline
from megatron_flex.compat.distributed.distributed_state import ParallelState
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.wording import count_words


def unity(tensor: Tensor, fmps: ParallelState) -> Tensor:
    """The tensor itself: what the collectives do along an axis of one rank."""
    return tensor


def all_gather_tensor_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """Concatenate the tensors of all tensor parallel ranks along `dim`; they may differ in that length."""
    return gather_along(tensor, dim, fmps.mesh["tp"])


def all_gather_data_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """Concatenate the tensors of all data parallel ranks along `dim`; they may differ in that length."""
    return gather_along(tensor, dim, fmps.mesh["dp"])


def scatter_tensor_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """This tensor parallel rank's part of a replicated tensor. Sends nothing."""
    return _own_chunk(tensor, dim, fmps.mesh["tp"])


def scatter_data_parallel(tensor: Tensor, dim: int, fmps: ParallelState) -> Tensor:
    """This data parallel rank's part of a replicated tensor. Sends nothing."""
    return _own_chunk(tensor, dim, fmps.mesh["dp"])


def broadcast_tensor_parallel(tensor: Tensor, fmps: ParallelState) -> Tensor:
    """Overwrite `tensor` with that of the first tensor parallel rank, and return it."""
    return _broadcast_along(tensor, fmps.mesh["tp"])


def broadcast_data_parallel(tensor: Tensor, fmps: ParallelState) -> Tensor:
    """Overwrite `tensor` with that of the first data parallel rank, and return it."""
    return _broadcast_along(tensor, fmps.mesh["dp"])


def gather_pipeline_parallel_tensor_dicts(
    fmps: ParallelState, tensor_dict: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Gather the tensors of all stages on the first stage.

    Args:
        fmps: ranks and groups.
        tensor_dict: tensors on the CPU, of any dtype, by names that no other stage uses.

    Returns:
        On the first stage all of them; elsewhere nothing.

    Raises:
        FlexError: two stages have the same name; on the first stage.
    """
    axis = fmps.mesh["pp"]
    came = gather_up_pipeline(list(tensor_dict.items()), Mesh((axis,)))
    out: dict[str, Tensor] = {}
    for name, tensor in came if axis.coord == 0 else []:
        if name in out:
            raise FlexError(f"{name!r} comes from two pipeline stages; give each tensor a name of its own")
        out[name] = tensor
    return out


def batch_isend_irecv_pipeline_parallel(
    fmps: ParallelState,
    recv_tensors: Sequence[Tensor],
    recv_from_ranks: Sequence[int],
    send_tensors: Sequence[Tensor],
    send_to_ranks: Sequence[int],
) -> None:
    """Send and receive between stages concurrently, and wait.

    Args:
        fmps: ranks and groups.
        recv_tensors: the tensors to receive into.
        recv_from_ranks: the source stage of each.
        send_tensors: the tensors to send.
        send_to_ranks: the destination stage of each.

    Raises:
        FlexError: not as many tensors as ranks.
    """
    for tensors, ranks in ((recv_tensors, recv_from_ranks), (send_tensors, send_to_ranks)):
        if len(tensors) != len(ranks):
            both = f"{count_words(len(tensors), 'tensor')} for {count_words(len(ranks), 'rank')}"
            raise FlexError(f"{both}; give one rank for each tensor")
    exchange_tensors(recv_tensors, recv_from_ranks, send_tensors, send_to_ranks, fmps.mesh["pp"])


def _own_chunk(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    if axis.size == 1:
        return tensor
    parts = torch.chunk(tensor, axis.size, dim=dim)
    if len(parts) < axis.size:
        raise FlexError(
            f"dim {dim} of {tensor.shape[dim]} makes {len(parts)} parts and {axis.name} has {axis.size} "
            "ranks; every rank needs one"
        )
    return parts[axis.coord].contiguous()


def _broadcast_along(tensor: Tensor, axis: Axis) -> Tensor:
    if axis.size == 1:
        return tensor
    if tensor.is_contiguous():
        return broadcast_from_first(tensor, Mesh((axis,)))
    return tensor.copy_(broadcast_from_first(tensor.contiguous(), Mesh((axis,))))
