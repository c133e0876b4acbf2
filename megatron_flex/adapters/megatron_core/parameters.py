"""The parameters of one chunk and their layouts, by the module that owns them.

Attributes that Megatron puts on parameters are no help: some are missing, some are wrong.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_flex.adapters.base import ParameterSite
from megatron_flex.adapters.megatron_core import attention, bert, dense, mtp, ssm
from megatron_flex.adapters.megatron_core.kinds import global_modules
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.layout import Layout, whole_shape
from megatron_flex.mesh import Mesh

OWNERS = (*ssm.OWNERS, *bert.OWNERS)
KINDS = (*attention.PARAMETERS, *mtp.PARAMETERS, *bert.PARAMETERS, *dense.PARAMETERS)

SUMMED_LATER = (
    "two pipeline stages hold this weight, each with its share of the gradient, and add them up only after "
    "the backward pass; hook the embedding's or the output layer's output instead"
)


def parameters_of(root: nn.Module, mesh: Mesh) -> list[ParameterSite]:
    """The parameters of one chunk, in model order, as far as a kind gives their layout."""
    of = Layouts(root.config, mesh)
    owned = _owned(of, root)
    out = []
    for path, module in global_modules(root):
        role = path.rpartition(".")[2]
        kind = next((k for k in KINDS if k.fits(role, module)), None)
        if getattr(module, "is_expert", False) or ".experts." in path:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            layout = owned.get(parameter)
            if layout is None and kind is not None:
                layout = kind.layout(of, role, name, parameter)
            if layout is None:
                continue
            shape = whole_shape(layout, parameter.shape, mesh.sizes)
            hidden = SUMMED_LATER if _on_two_stages(root, path, mesh) else ""
            out.append(ParameterSite(f"{path}.{name}", layout, shape, parameter, mesh["pp"].coord, hidden))
    return out


def _owned(of: Layouts, root: nn.Module) -> dict[nn.Parameter, Layout]:
    """The layouts that a kind of owner tells; parameters compare by identity."""
    found = [(kind, m) for m in root.modules() for kind in OWNERS if kind.fits("", m)]
    return dict(pair for kind, module in found for pair in kind.layouts(of, module))


def _on_two_stages(root: Any, path: str, mesh: Mesh) -> bool:
    """Whether the first and a later stage hold a copy each: of the embedding, or of a tied output layer."""
    if mesh["pp"].size == 1:
        return False
    tied = bool(getattr(root, "share_embeddings_and_output_weights", False))
    predicts = bool(getattr(root.config, "mtp_num_layers", None))
    shared = {"embedding.word_embeddings", "output_layer"} if tied else set()
    return path in shared or (predicts and path.startswith("embedding."))
