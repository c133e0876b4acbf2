"""The sites and parameters of one chunk: each module has the first kind that matches.

The layouts of parameters follow from the module that owns them. Megatron's attributes on parameters are not
used: some are missing, some are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from megatron_flex.adapters.adapter_base import ParameterSite
from megatron_flex.adapters.megatron_core import (
    attention_layers,
    dense_layers,
    moe_layers,
    site_builder,
    ssm_layers,
)
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import global_modules
from megatron_flex.adapters.megatron_core.site_builder import KindTable, SiteBuilder, unpadded_vocabulary
from megatron_flex.adapters.module_names import all_modules
from megatron_flex.adapters.taps import MethodOutput
from megatron_flex.layout import Layout, full_shape
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.sites import Site

# the parts of a model whose modules have sites
PARTS_WITH_SITES = (
    "embedding",
    "encoder",
    "decoder",
    "mtp",
    "pooler",
    "lm_head",
    "output_layer",
    "binary_head",
)
SITE_KINDS = (
    *attention_layers.LATENT_KINDS,
    *attention_layers.ATTENTION_KINDS,
    *moe_layers.MOE_KINDS,
    *ssm_layers.SSM_KINDS,
    *dense_layers.MTP_KINDS,
    *dense_layers.BERT_KINDS,
    *dense_layers.DENSE_KINDS,
)


def sites_of(root: nn.Module, mesh: Mesh) -> list[Site]:
    """The sites of one chunk in model order."""
    return list(_walk_sites(SiteBuilder(root, mesh)))


def _walk_sites(b: SiteBuilder) -> Iterator[Site]:
    site_kinds = KindTable(SITE_KINDS)
    for path, module in global_modules(b.root):
        role = path.rpartition(".")[2]
        kind = site_kinds.find(role, module) if path.startswith(PARTS_WITH_SITES) else None
        if kind is not None:
            yield from kind.sites(b, path, module)
    if b.root.post_process:
        tap = MethodOutput(b.root, "compute_language_model_loss")
        yield b.site("loss:output", b.of.loss(), tap)


OWNER_KINDS = (*ssm_layers.SSM_OWNERS, *dense_layers.BERT_OWNERS)
PARAMETER_KINDS = (
    *moe_layers.MOE_PARAMETERS,
    *attention_layers.LATENT_PARAMETERS,
    *attention_layers.ATTENTION_PARAMETERS,
    *dense_layers.MTP_PARAMETERS,
    *dense_layers.BERT_PARAMETERS,
    *dense_layers.DENSE_PARAMETERS,
    *site_builder.TRANSFORMER_ENGINE_PARAMETERS,
)
WORD_EMBEDDINGS, OUTPUT_WEIGHT = "embedding.word_embeddings.weight", "output_layer.weight"
EXPERT_PARAMETER = re.compile(r"(.*\.experts\.local_experts\.|.*\.experts\.linear_fc[12]\.\D+)(\d+)(.*)")

SUMMED_LATER = (
    "two pipeline stages hold this weight, each with its share of the gradient, and add them up only after "
    "the backward pass; after the step, get_module_parameter(name, gradient=True) has it"
)
ON_EXPERT_RANKS = (
    "it comes to be on the ranks of that expert only; after the step, "
    "get_module_parameter(name, gradient=True) has it"
)


def parameters_of(root: Any, mesh: Mesh) -> list[ParameterSite]:
    """The parameters of one chunk, in model order, of the module kinds that declare a layout.

    Those of experts are listed on every rank of the stage, whether it has the expert or not.
    """
    of = ModelLayouts(root.config, mesh, unpadded_vocabulary(root))
    # Where both ends of the model are on one rank, the output layer has no weight of its own.
    tied = bool(getattr(root, "share_embeddings_and_output_weights", False))
    stage, experts = mesh["pp"].coord, mesh["ep"]
    out: list[ParameterSite] = []
    for path, _, name, parameter, rule in _parameters_with_layouts(root, of):
        if rule is None:
            continue
        inside = EXPERT_PARAMETER.fullmatch(f"{path}.{name}")
        layout = expert_layout(rule) if inside else _shared_over_context(rule)
        shape = full_shape(layout, parameter.shape, mesh.sizes)
        site = ParameterSite(
            f"{path}.{name}",
            layout,
            shape,
            parameter,
            stage,
            copy_of=WORD_EMBEDDINGS if tied and f"{path}.{name}" == OUTPUT_WEIGHT else "",
            hidden=SUMMED_LATER if _on_two_stages(root, path, mesh) else "",
            local=tuple(parameter.shape),
        )
        out += _sites_on_all_ranks(site, inside, experts, root.config) if inside else [site]
    return out


def parameters_without_layout(root: Any, mesh: Mesh) -> dict[str, str]:
    """The other parameters of the chunk, with the class of the module that owns each, or of the parameter
    if that is quantized.
    """
    return {
        f"{path}.{name}": type(parameter if is_quantized(parameter) else module).__name__
        for path, module, name, parameter, rule in _parameters_with_layouts(
            root, ModelLayouts(root.config, mesh)
        )
        if rule is None
    }


def is_quantized(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a quantized tensor of Transformer Engine's (--fp8-param-gather)."""
    return any(c.__module__.startswith("transformer_engine") for c in type(parameter).__mro__)


@lru_cache(1024)  # experts have few layouts
def expert_layout(layout: Layout) -> Layout:
    """Sharding over `tp` in a dense linear is over `etp` in an expert's; there is no sequence parallelism."""
    dims = (
        replace(d, cuts=tuple(replace(c, axis="etp") if c.axis == "tp" else c for c in d.cuts))
        for d in layout.dims
    )
    return Layout(tuple(dims))


def _parameters_with_layouts(
    root: Any, of: ModelLayouts
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter, Layout | None]]:
    """Every parameter with its module's path, the module, its name there and its dense layout, if known."""
    owned = _owner_layouts(of, root)
    modules, kinds = dict(global_modules(root)), KindTable(PARAMETER_KINDS)
    for path, module in modules.items():
        parent, _, role = path.rpartition(".")
        kind = kinds.find(role, module, modules.get(parent))
        for name, parameter in module.named_parameters(recurse=False):
            layout = owned.get(parameter)
            if is_quantized(parameter):  # its memory is not that of a dense tensor
                layout = None
            elif layout is None and kind is not None:
                layout = kind.layout(of, role, name, parameter)
            yield path, module, name, parameter, layout


def _owner_layouts(of: ModelLayouts, root: nn.Module) -> dict[nn.Parameter, Layout]:
    """The layouts that a kind of owner declares; parameters compare by identity."""
    modules = all_modules(root)
    samples = {type(m): m for m in modules}
    owning = {cls for cls, m in samples.items() if any(kind.fits("", m) for kind in OWNER_KINDS)}
    found = [(kind, m) for m in modules if type(m) in owning for kind in OWNER_KINDS if kind.fits("", m)]
    return dict(pair for kind, module in found for pair in kind.layouts(of, module))


def _on_two_stages(root: Any, path: str, mesh: Mesh) -> bool:
    """Whether the first and a later stage hold a copy each: of the embedding, or of a tied output layer."""
    if mesh["pp"].size == 1:
        return False
    tied = bool(getattr(root, "share_embeddings_and_output_weights", False))
    predicts = bool(getattr(root.config, "mtp_num_layers", None))
    shared = {"embedding.word_embeddings", "output_layer"} if tied else set()
    return path in shared or (predicts and path.startswith("embedding."))


def _sites_on_all_ranks(
    mine: ParameterSite, inside: re.Match[str], ranks: Axis, config: Any
) -> Iterator[ParameterSite]:
    """The parameter of this rank's expert, and the corresponding ones on the other ranks.

    A module of one expert has the expert's global number in its name already; a grouped linear numbers its
    weights from 0 on each rank.
    """
    each = config.num_moe_experts // ranks.size
    for rank in range(ranks.size):
        number = rank * each + int(inside[2]) % each
        site = replace(
            mine, name=f"{inside[1]}{number}{inside[3]}", owner=(("ep", rank),), hidden=ON_EXPERT_RANKS
        )
        yield site if rank == ranks.coord else site.remote()


@lru_cache(1024)
def _shared_over_context(layout: Layout) -> Layout:
    """Context parallel ranks have the same parameters, with partial gradients from their own tokens."""
    return replace(layout, shared=(*layout.shared, "cp"))
