"""The sites and parameters of one chunk: each module has the first kind that matches.

The layouts of parameters follow from the module that owns them. Megatron's attributes on parameters are not
used: some are missing, some are wrong.
"""

from __future__ import annotations

import re
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
    vision_layers,
)
from megatron_flex.adapters.megatron_core.adapted_linears import linear_roles, whole_adapter_layouts
from megatron_flex.adapters.megatron_core.dense_layers import is_output_layer
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import global_modules
from megatron_flex.adapters.megatron_core.site_builder import (
    KindTable,
    SiteBuilder,
    SiteForm,
    unpadded_vocabulary,
)
from megatron_flex.adapters.module_walk import find_once, own_parameters, walk_modules
from megatron_flex.adapters.taps import method_output
from megatron_flex.layout import Layout, full_shape
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.sites import Site, Tap

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
    *vision_layers.PARTS_WITH_SITES,
)
ENCODER = "encoder"
SITE_KINDS = (
    *attention_layers.LATENT_KINDS,
    *attention_layers.ATTENTION_KINDS,
    *moe_layers.MOE_KINDS,
    *ssm_layers.SSM_KINDS,
    *dense_layers.MTP_KINDS,
    *dense_layers.HEAD_KINDS,
    *vision_layers.VISION_KINDS,
    *dense_layers.DENSE_KINDS,
)


def sites_of(root: nn.Module, mesh: Mesh) -> list[Site]:
    """The sites of one model of one chunk, in model order."""
    site_kinds, out = KindTable(SITE_KINDS), list[Site]()
    main = SiteBuilder(root, mesh)
    encoder_config = getattr(root, "encoder_config", None)  # of T5's encoder, which may differ in everything
    encoder = main if encoder_config is None else SiteBuilder(root, mesh, encoder_config)
    for path, module in global_modules(root):
        role = path.rpartition(".")[2]
        kind = site_kinds.find(role, module) if path.startswith(PARTS_WITH_SITES) else None
        if kind is not None:
            out += kind.sites(encoder if path.partition(".")[0] == ENCODER else main, path, module)
    if main.is_last_stage and is_output_layer(getattr(root, "output_layer", None)):
        tap = Tap(method_output, root, ("compute_language_model_loss",))
        out.append(main.site("loss:output", main.of.loss(), tap))
    return out


OWNER_KINDS = (*ssm_layers.SSM_OWNERS, *dense_layers.BERT_OWNERS)
PARAMETER_KINDS = (
    *moe_layers.MOE_PARAMETERS,
    *attention_layers.LATENT_PARAMETERS,
    *attention_layers.ATTENTION_PARAMETERS,
    *dense_layers.MTP_PARAMETERS,
    *dense_layers.BERT_PARAMETERS,
    *vision_layers.VISION_PARAMETERS,
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
    """The parameters of one model of one chunk, in model order, of the module kinds that declare a layout.

    Those of experts are listed on every rank of the stage, whether it has the expert or not.
    """
    # Where both ends of the model are on one rank, the output layer has no weight of its own.
    tied = bool(getattr(root, "share_embeddings_and_output_weights", False))
    experts = mesh["ep"]
    out: list[ParameterSite] = []
    forms = _ParameterForms(mesh)
    for path, _, name, parameter, rule in find_once(_parameters_with_layouts, root, mesh):
        if rule is None:
            continue
        inside = EXPERT_PARAMETER.fullmatch(full_name := f"{path}.{name}" if path else name)
        form = forms.form_of(rule, parameter, inside is not None)
        if inside:
            out += _sites_on_all_ranks(inside, form, parameter, experts, root.config.num_moe_experts)
            continue
        site = form.make(
            name=full_name,
            parameter=parameter,
            copy_of=WORD_EMBEDDINGS if tied and full_name == OUTPUT_WEIGHT else "",
            hidden=SUMMED_LATER if _on_two_stages(root, path, mesh) else "",
        )
        out.append(site)
    return out


class _ParameterForms:
    """The layouts and shapes of parameters, worked out once for those that have them in common."""

    def __init__(self, mesh: Mesh) -> None:
        self._sizes, self._stage = mesh.sizes, mesh["pp"].coord
        # By the id of the dense layout, which the value holds: to hash a layout takes longer than the rest.
        self._cache: dict[tuple[int, tuple[int, ...], bool], tuple[Layout, SiteForm[ParameterSite]]] = {}

    def form_of(self, rule: Layout, parameter: nn.Parameter, of_expert: bool) -> SiteForm[ParameterSite]:
        """What parameters of that dense layout and that shape have in common."""
        local = tuple(parameter.shape)
        key = id(rule), local, of_expert
        rule_and_form = self._cache.get(key)
        if rule_and_form is None:
            layout = expert_layout(rule) if of_expert else _shared_over_context(rule)
            form = SiteForm(
                ParameterSite,
                layout=layout,
                shape=full_shape(layout, local, self._sizes),
                stage=self._stage,
                hidden=ON_EXPERT_RANKS if of_expert else "",
                local=local,
            )
            rule_and_form = self._cache[key] = rule, form
        return rule_and_form[1]


def parameters_without_layout(root: Any, mesh: Mesh) -> dict[str, str]:
    """The other parameters of the model, with the class of the module that owns each, or of the parameter
    if that is quantized.
    """
    return {
        f"{path}.{name}" if path else name: type(parameter if is_quantized(parameter) else module).__name__
        for path, module, name, parameter, rule in find_once(_parameters_with_layouts, root, mesh)
        if rule is None
    }


def is_quantized(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a quantized tensor of Transformer Engine's (--fp8-param-gather)."""
    return _is_quantized_class(type(parameter))


@lru_cache(64)
def _is_quantized_class(kind: Any) -> bool:
    return any(c.__module__.startswith("transformer_engine") for c in kind.__mro__)


@lru_cache(1024)  # experts have few layouts
def expert_layout(layout: Layout) -> Layout:
    """Sharding over `tp` in a dense linear is over `etp` in an expert's; there is no sequence parallelism."""
    dims = (
        replace(d, cuts=tuple(replace(c, axis="etp") if c.axis == "tp" else c for c in d.cuts))
        for d in layout.dims
    )
    return Layout(tuple(dims))


def _parameters_with_layouts(
    root: Any, mesh: Mesh
) -> list[tuple[str, nn.Module, str, nn.Parameter, Layout | None]]:
    """Every parameter with its module's path, the module, its name there and its dense layout, if known."""
    main = ModelLayouts(root.config, mesh, unpadded_vocabulary(root))
    encoder_config = getattr(root, "encoder_config", None)
    encoder = main if encoder_config is None else ModelLayouts(encoder_config, mesh)
    modules, kinds = dict(global_modules(root)), KindTable(PARAMETER_KINDS)
    owned = _owner_layouts(main, root)
    owned.update((id(p), layout) for p, layout in whole_adapter_layouts(main, modules))
    roles = linear_roles(modules, main.tp)
    # An adapter of a grouped linear is sharded as a dense parameter only where experts' ranks are the same.
    dense_everywhere = not roles or (mesh["ep"].size == 1 and mesh["etp"].size == mesh["tp"].size)
    out: list[tuple[str, nn.Module, str, nn.Parameter, Layout | None]] = []
    for path, module in modules.items():
        if not module._parameters:
            continue
        parent, _, role = path.rpartition(".")
        role = roles.get(path, role)
        kind = kinds.find(role, module, modules.get(parent))
        of = encoder if path.partition(".")[0] == ENCODER else main
        for name, parameter in own_parameters(module):
            layout = owned.get(id(parameter)) if owned else None
            of_all = not dense_everywhere and _is_of_all_experts(f"{path}.{name}")
            if of_all or is_quantized(parameter):  # whose memory is not that of a dense tensor
                layout = None
            elif layout is None and kind is not None:
                layout = kind.layout(of, role, name, parameter)
            out.append((path, module, name, parameter, layout))
    return out


def _is_of_all_experts(name: str) -> bool:
    """Whether a parameter is one that all experts of a rank share."""
    return ".experts." in name and EXPERT_PARAMETER.fullmatch(name) is None


def _owner_layouts(of: ModelLayouts, root: nn.Module) -> dict[int, Layout]:
    """The layouts that a kind of owner declares, by the ids of parameters."""
    walk = walk_modules(root)
    owning = {cls for cls, m in walk.classes.items() if any(kind.fits("", m) for kind in OWNER_KINDS)}
    modules = walk.of_classes(lambda kind: kind in owning)
    owners = [(kind, m) for m in modules for kind in OWNER_KINDS if kind.fits("", m)]
    return {id(p): layout for kind, module in owners for p, layout in kind.layouts(of, module)}


def _on_two_stages(root: Any, path: str, mesh: Mesh) -> bool:
    """Whether the first and a later stage hold a copy each: of the embedding, or of a tied output layer."""
    if mesh["pp"].size == 1:
        return False
    tied = bool(getattr(root, "share_embeddings_and_output_weights", False))
    predicts = bool(getattr(root.config, "mtp_num_layers", None))
    shared = {"embedding.word_embeddings", "output_layer"} if tied else set()
    return path in shared or (predicts and path.startswith("embedding."))


def _sites_on_all_ranks(
    inside: re.Match[str],
    form: SiteForm[ParameterSite],
    parameter: nn.Parameter,
    ranks: Axis,
    expert_count: int,
) -> list[ParameterSite]:
    """The parameter of this rank's expert, and the corresponding ones on the other ranks.

    A module of one expert has the expert's global number in its name already; a grouped linear numbers its
    weights from 0 on each rank.
    """
    each = expert_count // ranks.size
    front, number, end = inside.groups()
    local_expert = int(number) % each
    return [
        form.make(
            name=f"{front}{rank * each + local_expert}{end}",
            parameter=parameter if rank == ranks.coord else None,
            owner=(("ep", rank),),
        )
        for rank in range(ranks.size)
    ]


@lru_cache(1024)
def _shared_over_context(layout: Layout) -> Layout:
    """Context parallel ranks have the same parameters, with partial gradients from their own tokens."""
    return replace(layout, shared=(*layout.shared, "cp"))
