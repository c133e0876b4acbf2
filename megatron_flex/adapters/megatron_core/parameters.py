"""The parameters of one chunk and their layouts, by the module that owns them.

Attributes that Megatron puts on parameters are no help: some are missing, some are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from megatron_flex.adapters.base import ParameterSite
from megatron_flex.adapters.megatron_core import attention, dense, moe
from megatron_flex.adapters.megatron_core.build import ParameterKind, vocabulary
from megatron_flex.adapters.megatron_core.kinds import global_modules
from megatron_flex.adapters.megatron_core.layouts import Layouts
from megatron_flex.layout import Layout, whole_shape
from megatron_flex.mesh import Mesh

KINDS = (*moe.PARAMETERS, *attention.PARAMETERS, *dense.PARAMETERS)
WORDS, LOGITS = "embedding.word_embeddings.weight", "output_layer.weight"
EXPERT = re.compile(r"(.*\.experts\.local_experts\.|.*\.experts\.linear_fc[12]\.\D+)(\d+)(.*)")


def parameters_of(root: Any, mesh: Mesh) -> list[ParameterSite]:
    """The parameters of one chunk, in model order, as far as a kind gives their layout.

    Those of experts are listed on every rank of the stage, whether it has the expert or not.
    """
    of = Layouts(root.config, mesh, vocabulary(root))
    # Where both ends of the model are on one rank, the output layer has no weight of its own.
    tied = bool(getattr(root, "share_embeddings_and_output_weights", False))
    out: list[ParameterSite] = []
    for path, module, kind in _kinds(root):
        if kind is None:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            inside = EXPERT.fullmatch(f"{path}.{name}")
            layout = kind.layout(of, path.rpartition(".")[2], name, parameter)
            layout = of_expert(layout) if inside else layout
            shape = whole_shape(layout, parameter.shape, mesh.sizes)
            copy = WORDS if tied and f"{path}.{name}" == LOGITS else ""
            place = mesh["pp"].coord
            site = ParameterSite(f"{path}.{name}", layout, shape, parameter, place, copy_of=copy)
            out += _of_all_ranks(site, inside, mesh, root.config) if inside else [site]
    return out


def unknown_of(root: nn.Module) -> dict[str, str]:
    """The other parameters of the chunk, with the class of the module that owns each."""
    return {
        f"{path}.{name}": type(module).__name__
        for path, module, kind in _kinds(root)
        if kind is None
        for name, _ in module.named_parameters(recurse=False)
    }


def of_expert(layout: Layout) -> Layout:
    """What cuts a dense linear over `tp` cuts an expert's over `etp`; there is no sequence parallelism."""
    dims = (
        replace(d, cuts=tuple(replace(c, axis="etp") if c.axis == "tp" else c for c in d.cuts))
        for d in layout.dims
    )
    return Layout(tuple(dims))


def _kinds(root: nn.Module) -> Iterator[tuple[str, nn.Module, ParameterKind | None]]:
    for path, module in global_modules(root):
        role = path.rpartition(".")[2]
        yield path, module, next((k for k in KINDS if k.fits(role, module)), None)


def _of_all_ranks(
    mine: ParameterSite, inside: re.Match[str], mesh: Mesh, config: Any
) -> Iterator[ParameterSite]:
    """The parameter of this rank's expert, and those in the same place on the other ranks.

    A module of one expert has the expert's global number in its name already; a grouped linear numbers its
    weights from 0 on each rank.
    """
    each = config.num_moe_experts // mesh["ep"].size
    for rank in range(mesh["ep"].size):
        number = rank * each + int(inside[2]) % each
        site = replace(mine, name=f"{inside[1]}{number}{inside[3]}", owner=(("ep", rank),))
        yield site if rank == mesh["ep"].coord else site.remote()
