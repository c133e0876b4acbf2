"""The mesh, read from Megatron's own process groups; none is created."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_flex.adapters.megatron_core.module_classes import is_megatron
from megatron_flex.mesh import Axis, Mesh

# From the outermost to the innermost, as ranks are mostly laid out; only for showing and for counting.
DENSE_GETTERS = {
    "pp": "get_pipeline_model_parallel_group",
    "dp": "get_data_parallel_group",
    "cp": "get_context_parallel_group",
    "tp": "get_tensor_model_parallel_group",
}
# The same ranks once more, as layers of experts divide them. The names that collections of groups use differ.
EXPERT_GETTERS = {
    "edp": "get_expert_data_parallel_group",
    "ep": "get_expert_model_parallel_group",
    "etp": "get_expert_tensor_parallel_group",
}
COLLECTION_NAMES = {"edp": "expt_dp", "etp": "expt_tp"}
GETTERS = {**DENSE_GETTERS, **EXPERT_GETTERS}


def megatron_mesh(root: nn.Module) -> Mesh:
    """The axes of the run.

    A group is looked for where Megatron's layers look: on the layers (tensor parallel), in the model's
    collection of process groups, and last in `parallel_state`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Mesh(tuple(map(Axis, DENSE_GETTERS)), tuple(map(Axis, EXPERT_GETTERS)))
    dense = tuple(_axis(name, _group(root, name)) for name in DENSE_GETTERS)
    return Mesh(dense, tuple(_axis(name, _group(root, name)) for name in EXPERT_GETTERS))


def _group(root: nn.Module, name: str) -> Any:
    if name == "tp":
        for module in root.modules():
            if is_megatron(module, "ColumnParallelLinear", "RowParallelLinear") and not getattr(
                module, "is_expert", False
            ):
                group = getattr(module, "tp_group", None)
                if group is not None:
                    return group
    for holder in (root, getattr(root, "decoder", None)):
        for collection in ("pg_collection", "model_comm_pgs"):
            group = getattr(getattr(holder, collection, None), COLLECTION_NAMES.get(name, name), None)
            if group is not None:
                return group
    from megatron.core import parallel_state

    return getattr(parallel_state, GETTERS[name])() if parallel_state.is_initialized() else None


def _axis(name: str, group: Any) -> Axis:
    if group is None or dist.get_world_size(group) == 1:
        return Axis(name, ranks=(dist.get_rank(),))
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), dist.get_rank(group), group, ranks)
