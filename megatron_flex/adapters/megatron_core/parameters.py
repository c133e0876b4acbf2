"""The parameters of one chunk and their layouts, by the module that owns them.

Attributes that Megatron puts on parameters are no help: some are missing, some are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.base import ParameterSite
from megatron_flex.adapters.megatron_core import attention, dense
from megatron_flex.adapters.megatron_core.build import ParameterKind, vocabulary
from megatron_flex.adapters.megatron_core.kinds import global_modules
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.layout import whole_shape
from megatron_flex.mesh import Mesh

KINDS = (*attention.PARAMETERS, *dense.PARAMETERS)
WORDS, LOGITS = "embedding.word_embeddings.weight", "output_layer.weight"


def parameters_of(root: Any, mesh: Mesh) -> list[ParameterSite]:
    """The parameters of one chunk, in model order, as far as a kind gives their layout."""
    of = Layouts(root.config, mesh, vocabulary(root))
    # Where both ends of the model are on one rank, the output layer has no weight of its own.
    tied = bool(getattr(root, "share_embeddings_and_output_weights", False))
    out = []
    for path, module, kind in _kinds(root):
        if kind is None:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            layout = kind.layout(of, path.rpartition(".")[2], name, parameter)
            shape = whole_shape(layout, parameter.shape, mesh.sizes)
            copy = WORDS if tied and f"{path}.{name}" == LOGITS else ""
            place = mesh["pp"].coord
            out.append(ParameterSite(f"{path}.{name}", layout, shape, parameter, place, copy_of=copy))
    return out


def unknown_of(root: nn.Module) -> dict[str, str]:
    """The other parameters of the chunk, with the class of the module that owns each."""
    return {
        f"{path}.{name}": type(module).__name__
        for path, module, kind in _kinds(root)
        if kind is None
        for name, _ in module.named_parameters(recurse=False)
    }


def _kinds(root: nn.Module) -> Iterator[tuple[str, nn.Module, ParameterKind | None]]:
    for path, module in global_modules(root):
        role = path.rpartition(".")[2]
        expert = getattr(module, "is_expert", False) or ".experts." in path
        yield path, module, None if expert else next((k for k in KINDS if k.fits(role, module)), None)
