"""The parameters of one chunk and their layouts, by the module that owns them.

Attributes that Megatron puts on parameters are no help: some are missing, some are wrong.
"""

from __future__ import annotations

from torch import nn

from megatron_flex.adapters.base import ParameterSite
from megatron_flex.adapters.megatron_core import attention, dense, latent, transformer_engine
from megatron_flex.adapters.megatron_core.kinds import global_modules
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.layout import whole_shape
from megatron_flex.mesh import Mesh

KINDS = (*latent.PARAMETERS, *attention.PARAMETERS, *dense.PARAMETERS, *transformer_engine.PARAMETERS)


def parameters_of(root: nn.Module, mesh: Mesh) -> list[ParameterSite]:
    """The parameters of one chunk, in model order, as far as a kind gives their layout."""
    of = Layouts(root.config, mesh)
    out = []
    modules = dict(global_modules(root))
    for path, module in modules.items():
        parent, _, role = path.rpartition(".")
        kind = next((k for k in KINDS if k.fits(role, module, modules.get(parent))), None)
        if kind is None or getattr(module, "is_expert", False) or ".experts." in path:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            layout = kind.layout(of, role, name, parameter)
            shape = whole_shape(layout, parameter.shape, mesh.sizes)
            out.append(ParameterSite(f"{path}.{name}", layout, shape, parameter, mesh["pp"].coord))
    return out
