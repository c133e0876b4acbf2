"""Models in PyTorch's own wrappers: DistributedDataParallel, FullyShardedDataParallel, fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_flex.adapters import ddp, device_mesh, fsdp, plain, dtensor_parameters
from megatron_flex.adapters.composing import compose
from megatron_flex.adapters.modules import Modules
from megatron_flex.adapters.plain import AxisSizes
from megatron_flex.adapters.ranks import Ranks
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh


def inspect_wrappers(
    chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any = None
) -> tuple[str, Callable[[], Modules]] | None:
    """Why a model is in such a wrapper, and what makes its adapter; None if it is in none."""
    if len(chunks) != 1:
        return None
    chunk = chunks[0]
    wrappers = [*ddp.ddp_wrappers_of(chunk), *fsdp.fsdp_wrappers_of(chunk)]
    if dtensor_parameters.has_dtensors(chunk):
        why = "fully_shard was called on it" if dtensor_parameters.fully_shard_modules(chunk) else "its parameters are DTensors"
        uses = device_mesh.mesh_uses_in(chunk)
        return why, lambda: compose(chunk, device_mesh.mesh_of_device_meshes(uses, axis_sizes, process_group), name="pytorch")
    if not wrappers:
        return None
    kinds = " and ".join(dict.fromkeys(type(w).__name__ for w in wrappers))
    why = f"it is in {kinds}" if wrappers[0] is chunk else f"parts of it are in {kinds}"
    return why, lambda: compose(chunk, _mesh_around(chunk, wrappers, axis_sizes, process_group), name="pytorch")


def _mesh_around(chunk: nn.Module, wrappers: list[Any], axis_sizes: AxisSizes, process_group: Any) -> Mesh:
    """The ranks of wrappers as data parallel ones; what others are, a person says.

    Raises:
        FlexError: nobody says it, or wrappers have different ranks.
    """
    kind, ranks = type(wrappers[0]).__name__, _wrapper_ranks(wrappers[0])
    for wrapper in wrappers[1:]:
        if _wrapper_ranks(wrapper) != ranks:
            raise FlexError(
                f"{kind} is over ranks {list(ranks)} and a {type(wrapper).__name__} in it over "
                f"{list(_wrapper_ranks(wrapper))}; wrap all parts over the same ranks"
            )
    everyone = sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    if set(ranks) - set(everyone):
        raise FlexError(
            f"{kind} is over ranks {list(ranks)}, which are not all in process_group's {everyone}; give the "
            "group of all ranks that the model is on"
        )
    whole = list(ranks) == everyone
    if not whole and not any(axis_sizes.get(n) for n in ("tp", "pp", "dp")):
        raise FlexError(
            f"{kind} is over ranks {list(ranks)} of {len(everyone)}, and what the others are is not known; "
            "say tensor_parallel_size or pipeline_parallel_size, or give the process_group of those ranks"
        )
    mesh = plain.mesh_of({"dp": len(ranks)} if whole else axis_sizes, process_group)
    mesh.check_sizes(axis_sizes)
    if mesh["dp"].ranks != ranks:
        raise FlexError(
            f"{kind} is over ranks {list(ranks)}, but with {mesh.describe()} this rank's data parallel ones "
            f"are {list(mesh['dp'].ranks)}: ranks count tensor parallel first, then data, then pipeline "
            "parallel; wrap the model over those"
        )
    own = _wrapper_group(wrappers[0])
    if own is None or dist.get_world_size(own) != len(ranks) or len(ranks) == 1:
        return mesh
    axes = tuple(replace(a, group=own) if a.name == "dp" else a for a in mesh.axes)
    return replace(mesh, axes=axes)


def _wrapper_group(wrapper: Any) -> Any:
    return wrapper.process_group


def _wrapper_ranks(wrapper: Any) -> Ranks:
    """The ranks whose gradients a wrapper averages, in their order."""
    inner = tuple(dist.get_process_group_ranks(_wrapper_group(wrapper)))
    outer = getattr(wrapper, "_inter_node_pg", None)  # of FSDP's hybrid strategies: replicas of the shards
    if outer is None or (getattr(wrapper, "_device_mesh", None) is None and len(inner) == 1):
        return tuple(sorted(inner))
    here = dist.get_rank()
    firsts = dist.get_process_group_ranks(outer)
    return tuple(sorted(r + first - here for first in firsts for r in inner))
