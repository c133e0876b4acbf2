"""The ranks of a model and each rank's coordinates, along tensor, pipeline and data parallelism."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_flex.adapters import detect
from megatron_flex.adapters.pytorch import make_mesh
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.wording import count_words


def _getters(
    axis: str,
) -> tuple[Callable[[ParallelState], int], Callable[[ParallelState], int], Callable[[ParallelState], Any]]:
    """This rank's coordinate on an axis, the size of the axis, and its process group, as methods."""
    return (
        lambda state: state.mesh[axis].coord,
        lambda state: state.mesh[axis].size,
        lambda state: state.mesh[axis].group,
    )


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

    get_tensor_parallel_rank, get_tensor_parallel_world_size, get_tensor_parallel_group = _getters("tp")
    get_pipeline_parallel_rank, get_pipeline_parallel_world_size, get_pipeline_parallel_group = _getters("pp")
    get_data_parallel_rank, get_data_parallel_world_size, get_data_parallel_group = _getters("dp")


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
            f"process_group has {count_words(len(ranks), 'rank')}, and the model runs on {count} "
            f"({mesh.describe()}); give the group of those, or leave it out"
        )
    return ParallelState(mesh, ranks, process_group)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
