"""Models of PyTorch alone: plain modules, and modules in PyTorch's own wrappers.

For an nn.Module without a framework's adapter the user gives the mesh, and where needed the shapes. The
wrappers are DistributedDataParallel, FullyShardedDataParallel and fully_shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_flex.adapters import data_parallel, dtensor_parameters, mesh_axes
from megatron_flex.adapters.adapter_base import AxisSizes
from megatron_flex.adapters.mesh_axes import Ranks, divide_ranks, groups_along_axes
from megatron_flex.adapters.module_adapter import ModuleAdapter, compose
from megatron_flex.adapters.module_names import SHARDED_DDP, is_fairscale, unwrap
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh

RANK_ORDER = ("pp", "dp", "tp")  # from the outermost to the innermost
PARALLEL_PACKAGES = ("megatron.", "transformer_engine.")  # their modules hold shards
# Classes of parallel layers of any package.
PARALLEL_CLASS_NAMES = re.compile(
    r"(Column|Row|Vocab|QKV|Tensor|Model)\w*Parallel|Parallel(Embedding|Linear|MLP|LMHead)"
)


def make_plain_adapter(
    chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any = None
) -> ModuleAdapter:
    """The adapter of a plain module.

    Collective over the group's ranks, the first time that they are divided so.

    Raises:
        FlexError: there are several chunks, the sizes do not fit the number of ranks, or the module has a
            framework's parallel layers and no tensor parallel size is given.
    """
    names = ", ".join(dict.fromkeys(type(c).__name__ for c in chunks)) or "no module"
    if len(chunks) != 1:
        raise FlexError(
            f"{names}: {len(chunks)} virtual chunks that no known framework built as one model; give one "
            "module"
        )
    root = unwrap(chunks[0])
    shards = find_parallel_module(root)
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(process_group) == 1
    if shards is not None and not alone and axis_sizes.get("tp") is None:
        raise FlexError(
            f"{names} holds a {type(shards).__name__} and is not a supported model, as "
            "megatron-core's GPTModel, HybridModel, BertModel, T5Model and a module that holds one are; pass "
            "tensor_parallel_size to have it as a plain module, and expected_shape where tensors are sharded"
        )
    mesh = make_mesh(axis_sizes, process_group)
    _check_tensor_parallel_groups(root, mesh)
    return compose(chunks[0], mesh)


def why_plain(chunks: Iterable[nn.Module]) -> str:
    """Why a model belongs to no framework, for `detect`."""
    shards = next((m for chunk in chunks if (m := find_parallel_module(chunk)) is not None), None)
    if shards is None:
        return "no framework's parallel modules are in it"
    kind = type(shards)
    return (
        f"no adapter supports the full model, though it holds a {kind.__name__} of {kind.__module__}; pass "
        "tensor_parallel_size, and expected_shape where tensors are sharded, or give the part that is known"
    )


def find_parallel_module(root: nn.Module) -> nn.Module | None:
    """The first module that may hold shards, by its name or its parameters; else the first of Megatron's."""
    named = (
        m for m in root.modules() if PARALLEL_CLASS_NAMES.search(type(m).__name__) or _has_marked_parameter(m)
    )
    return next(named, None) or next((m for m in root.modules() if _is_framework_module(m)), None)


def _has_marked_parameter(module: nn.Module) -> bool:
    """Whether a module has its own parameter that is marked as sharded, with Megatron's attribute."""
    return any(getattr(p, "tensor_model_parallel", False) is True for p in module._parameters.values())


def _check_tensor_parallel_groups(root: nn.Module, mesh: Mesh) -> None:
    """Refuse tensor parallel ranks that differ from those of the model's own parallel modules.

    Raises:
        FlexError: they differ.
    """
    for module in root.modules():
        group = (
            getattr(module, "tp_group", None) if PARALLEL_CLASS_NAMES.search(type(module).__name__) else None
        )
        if not isinstance(group, dist.ProcessGroup):
            continue
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks != mesh["tp"].ranks:
            raise FlexError(
                f"a {type(module).__name__} computes over the tensor parallel ranks {list(ranks)}, and "
                f"tensor_parallel_size={mesh['tp'].size} makes them {list(mesh['tp'].ranks)} for this rank; "
                f"pass tensor_parallel_size={len(ranks)}, with ranks that count tensor parallel first"
            )


def make_mesh(axis_sizes: AxisSizes, process_group: Any = None) -> Mesh:
    """The ranks of a group as pipeline, data and tensor parallel ones, with `tp` innermost.

    Args:
        axis_sizes: the sizes; `tp` and `pp` default to 1, and `dp` to the remaining factor.
        process_group: all ranks that take part, in ascending order; the default group if None, or one process
            without any.

    Raises:
        FlexError: the product of the sizes is not the number of ranks, or this rank is not in the group.
    """
    joined = dist.is_available() and dist.is_initialized()
    ranks = tuple(sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD))) if joined else (0,)
    rank = dist.get_rank() if joined else 0
    if rank not in ranks:
        raise FlexError(
            f"rank {rank} is not one of process_group's {list(ranks)}; make the FlexModel on those ranks only"
        )
    tp, pp = axis_sizes.get("tp") or 1, axis_sizes.get("pp") or 1
    dp = axis_sizes.get("dp") or max(1, len(ranks) // (tp * pp))
    if tp * pp * dp != len(ranks):
        raise FlexError(
            f"tensor_parallel_size={tp} x pipeline_parallel_size={pp} x data_parallel_size={dp} make "
            f"{tp * pp * dp} ranks, but there are {len(ranks)}; let the product be that"
        )
    sizes = (pp, dp, tp)
    groups = groups_along_axes(ranks, sizes, process_group) if joined else [None] * len(RANK_ORDER)
    axes = []
    for name, group, lines in zip(RANK_ORDER, groups, divide_ranks(ranks, sizes), strict=True):
        line = next(n for n in lines if rank in n)
        axes.append(Axis(name, len(line), line.index(rank), group, line))
    return Mesh(tuple(axes), ranks=ranks)


def _is_framework_module(module: nn.Module) -> bool:
    return any(c.__module__.startswith(PARALLEL_PACKAGES) for c in type(module).__mro__)


def inspect_wrappers(
    chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any = None
) -> tuple[str, Callable[[], ModuleAdapter]] | None:
    """Why a model is in such a wrapper, and a function that creates its adapter; None if it is in none."""
    if len(chunks) != 1:
        return None
    chunk = chunks[0]
    wrappers = [*data_parallel.ddp_wrappers_of(chunk), *data_parallel.fsdp_wrappers_of(chunk)]
    if dtensor_parameters.has_dtensors(chunk):
        why = (
            "fully_shard was called on it"
            if dtensor_parameters.fully_shard_modules(chunk)
            else "its parameters are DTensors"
        )
        uses = mesh_axes.mesh_uses_in(chunk)
        return why, lambda: compose(
            chunk, mesh_axes.mesh_of_device_meshes(uses, axis_sizes, process_group), name="pytorch"
        )
    if not wrappers:
        return None
    kinds = " and ".join(dict.fromkeys(type(w).__name__ for w in wrappers))
    why = f"it is in {kinds}" if wrappers[0] is chunk else f"parts of it are in {kinds}"
    return why, lambda: compose(chunk, mesh_around(wrappers, axis_sizes, process_group), name="pytorch")


def mesh_around(wrappers: list[Any], axis_sizes: AxisSizes, process_group: Any) -> Mesh:
    """The wrappers' ranks as the data parallel ones; the user gives the axes of other ranks.

    Raises:
        FlexError: that is missing, or wrappers have different ranks.
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
    is_world = list(ranks) == everyone
    if not is_world and not any(axis_sizes.get(n) for n in ("tp", "pp", "dp")):
        raise FlexError(
            f"{kind} is over ranks {list(ranks)} of {len(everyone)}, and what the others are is not known; "
            "pass tensor_parallel_size or pipeline_parallel_size, or give the process_group of those ranks"
        )
    mesh = make_mesh({"dp": len(ranks)} if is_world else axis_sizes, process_group)
    mesh.check_sizes(axis_sizes)
    if mesh["dp"].ranks != ranks:
        raise FlexError(
            f"{kind} is over ranks {list(ranks)}, but with {mesh.describe()} this rank's data parallel ones "
            f"are {list(mesh['dp'].ranks)}: ranks count tensor parallel first, then data, then pipeline "
            "parallel; wrap the model over those"
        )
    group = _wrapper_group(wrappers[0])
    if group is None or dist.get_world_size(group) != len(ranks) or len(ranks) == 1:
        return mesh
    axes = tuple(replace(a, group=group) if a.name == "dp" else a for a in mesh.axes)
    return replace(mesh, axes=axes)


def _wrapper_group(wrapper: Any) -> Any:
    return wrapper._process_group if is_fairscale(wrapper, SHARDED_DDP) else wrapper.process_group


def _wrapper_ranks(wrapper: Any) -> Ranks:
    """The ranks over which a wrapper averages gradients, in their order."""
    inner = tuple(dist.get_process_group_ranks(_wrapper_group(wrapper)))
    outer = getattr(wrapper, "_inter_node_pg", None)  # of FSDP's hybrid strategies: replicas of the shards
    if outer is None or (getattr(wrapper, "_device_mesh", None) is None and len(inner) == 1):
        return tuple(sorted(inner))
    rank = dist.get_rank()
    firsts = dist.get_process_group_ranks(outer)
    return tuple(sorted(r + first - rank for first in firsts for r in inner))
