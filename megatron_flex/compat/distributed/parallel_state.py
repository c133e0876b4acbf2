"""The ranks of a model, each rank's coordinates, and collectives along tensor, pipeline and data
parallelism.

All ranks along an axis call its collectives. They are not differentiable; hooks are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters import detect
from megatron_flex.adapters.pytorch import make_mesh
from megatron_flex.collectives import broadcast_from_first, exchange_tensors, gather_along, gather_up_pipeline
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh


class ParallelState:
    """The ranks and groups of one model, as seen by one rank. A group is None where it has one rank.

    Args:
        mesh: the model's axes.
        ranks: the global ranks of the model.
        group: their process group; None for the default one, or none at all.
    """

    def __init__(self, mesh: Mesh, ranks: tuple[int, ...], group: Any) -> None:
        self.mesh, self.ranks, self.group = mesh, ranks, group

    def get_local_rank(self) -> int:
        """This rank's index among those of the model."""
        return self.ranks.index(self.get_subset_rank())

    def get_local_world_size(self) -> int:
        """The number of ranks of the model."""
        return len(self.ranks)

    def get_subset_rank(self) -> int:
        """This rank's global rank."""
        return dist.get_rank() if _is_distributed() else 0

    def get_subset_world_size(self) -> int:
        """The number of ranks of the model."""
        return len(self.ranks)

    def get_subset_process_group(self) -> Any:
        """The process group of the model's ranks."""
        return self.group if self.group is not None or not _is_distributed() else dist.group.WORLD

    def get_tensor_parallel_rank(self) -> int:
        """This rank's tensor parallel coordinate."""
        return self.mesh["tp"].coord

    def get_tensor_parallel_world_size(self) -> int:
        """The tensor parallel size."""
        return self.mesh["tp"].size

    def get_tensor_parallel_group(self) -> Any:
        """The tensor parallel process group."""
        return self.mesh["tp"].group

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.mesh["pp"].coord

    def get_pipeline_parallel_world_size(self) -> int:
        """The number of pipeline stages."""
        return self.mesh["pp"].size

    def get_pipeline_parallel_group(self) -> Any:
        """The process group along the stages."""
        return self.mesh["pp"].group

    def get_data_parallel_rank(self) -> int:
        """This rank's model replica."""
        return self.mesh["dp"].coord

    def get_data_parallel_world_size(self) -> int:
        """The number of replicas."""
        return self.mesh["dp"].size

    def get_data_parallel_group(self) -> Any:
        """The process group over the replicas."""
        return self.mesh["dp"].group


def start_torch_distributed() -> None:
    """Initialize torch.distributed if a launcher started this process; otherwise it is the only one."""
    if not _is_distributed() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def initialize_distributed_state(
    module: nn.Module | Sequence[nn.Module] | None,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    data_parallel_size: int,
    process_group: Any = None,
) -> ParallelState:
    """The ranks of a model along tensor, pipeline and data parallelism. Every rank of the group calls it.

    Args:
        module: a framework's model, whose own ranks and groups are used; or any other module, or None: then
            ranks are laid out as (pipeline, data, tensor), the last counting fastest. Groups of the same
            ranks are created once in a process.
        tensor_parallel_size: the number of ranks that share each tensor.
        pipeline_parallel_size: the number of stages.
        data_parallel_size: the number of replicas.
        process_group: the ranks; None for all.

    Raises:
        FlexError: the sizes are not the model's, or do not multiply to the number of ranks.
    """
    start_torch_distributed()
    sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "dp": data_parallel_size}
    if module is None:
        mesh = make_mesh(sizes, process_group)
    else:
        mesh = detect([module] if isinstance(module, nn.Module) else list(module), sizes, process_group).mesh
    return build_parallel_state(mesh, process_group)


def build_parallel_state(mesh: Mesh, process_group: Any) -> ParallelState:
    """The state of a model whose mesh is known.

    Raises:
        FlexError: the process group has other ranks.
    """
    ranks = (
        tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD)) if _is_distributed() else (0,)
    )
    count = prod(a.size for a in mesh)
    if count != len(ranks):
        raise FlexError(
            f"process_group has {len(ranks)} ranks, and the model runs on {count} ({mesh.describe()}); give "
            "the group of those, or leave it out"
        )
    return ParallelState(mesh, ranks, process_group)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


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
            raise FlexError(f"{len(tensors)} tensors for {len(ranks)} ranks; give one rank for each tensor")
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
