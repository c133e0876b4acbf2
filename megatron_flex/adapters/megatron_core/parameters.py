"""The parameters of Megatron's dense models and their layouts, by the module that owns them.

Attributes that Megatron puts on parameters are no help: some are missing, some are wrong.
"""

from __future__ import annotations

from torch import nn

from megatron_flex.adapters.base import ParameterSite
from megatron_flex.adapters.megatron_core.kinds import global_modules, is_a
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.layout import Layout, whole_shape
from megatron_flex.mesh import Mesh


def parameters_of(root: nn.Module, mesh: Mesh) -> list[ParameterSite]:
    """The parameters of one chunk, in model order, as far as a rule gives their layout."""
    of = Layouts(root.config, mesh)
    out = []
    for path, module in global_modules(root):
        for name, parameter in module.named_parameters(recurse=False):
            layout = _layout(of, path, module, name, parameter)
            if layout is not None:
                shape = whole_shape(layout, parameter.shape, mesh.sizes)
                out.append(ParameterSite(f"{path}.{name}", layout, shape, parameter, mesh["pp"].coord))
    return out


def _layout(of: Layouts, path: str, module: nn.Module, name: str, parameter: nn.Parameter) -> Layout | None:
    role = path.rpartition(".")[2]
    if getattr(module, "is_expert", False) or ".experts." in path:
        return None
    if is_a(module, "ColumnParallelLinear"):
        gated = role == "linear_fc1" and of.config.gated_linear_unit
        return of.rows_cut(parameter.ndim, (1, 1) if gated else (1,))
    if is_a(module, "RowParallelLinear"):
        return of.columns_cut() if name == "weight" else of.uncut(1, shared=of.sequence_parallel)
    if is_a(module, "VocabParallelEmbedding"):
        return of.rows_cut(2)
    if role == "position_embeddings":
        return of.uncut(parameter.ndim, shared=False)
    if role in ("q_layernorm", "k_layernorm"):
        return of.uncut(parameter.ndim, shared=True)
    if role in ("input_layernorm", "pre_mlp_layernorm", "final_layernorm", "final_norm"):
        return of.uncut(parameter.ndim, shared=of.sequence_parallel)
    return None
