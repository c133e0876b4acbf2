"""Multi-latent attention: the projections down to the latents and up to the heads, and what is between.

The key's rotary part comes out of `linear_kv_down_proj` and goes to all heads. Upstream's gradient of it, on
more than one tensor parallel rank without Transformer Engine's duplicated projection, has each rank's own
heads only; so that gradient, and all behind it, are what upstream computes and not what one device would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.attention import scores
from megatron_flex.adapters.megatron_core.build import SiteBuilder, Kind, ParameterKind
from megatron_flex.adapters.megatron_core.module_classes import is_identity
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.transformer_engine import is_duplicated, norm_inside
from megatron_flex.adapters.taps import ModuleInput, ModuleOutput
from megatron_flex.layout import Layout
from megatron_flex.sites import Site

LATENT_CLASSES = ("MLASelfAttention",)
OWN_HEADS_ONLY = (
    "without sequence parallelism each tensor parallel rank's duplicate of it gets the gradient of its own "
    "heads only; train with --sequence-parallel, or hook linear_kv_up_proj"
)


def latent_attention(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """Self-attention over latents."""
    config, heads = b.config, b.sizes["n"]
    query, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    yield from b.both(path, module, b.of.stream(), "hidden_states", beside=(b.of.bias_beside(),))
    yield from _down_projections(b, path, module)
    for name, rank in (("q", config.q_lora_rank), ("kv", config.kv_lora_rank)):
        norm, up = (getattr(module, n, None) for n in (f"{name}_layernorm", f"linear_{name}_up_proj"))
        yield from _latent_norm_sites(b, f"{path}.{name}_layernorm", norm, up, rank)
    for name, rank, each in (
        ("q_proj", None, query),
        ("q_up_proj", config.q_lora_rank, query),
        ("kv_up_proj", config.kv_lora_rank, config.qk_head_dim + value),
    ):
        linear = getattr(module, f"linear_{name}", None)
        if not is_identity(linear):
            out, width = b.of.features("n*d"), heads * each
            yield from b.column(f"{path}.linear_{name}", linear, out, width, within=rank)
    yield from _latent_core(b, f"{path}.core_attention", module.core_attention, query, value)
    yield from b.row(f"{path}.linear_proj", module.linear_proj, "n*d", heads * value)


def _down_projections(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    config = b.config
    widths = {"q": config.q_lora_rank, "kv": config.kv_lora_rank + config.qk_pos_emb_head_dim}
    for name, width in widths.items():
        at = f"{path}.linear_{name}_down_proj"
        linear: Any = getattr(module, f"linear_{name}_down_proj", None)
        if is_duplicated(linear):
            yield b.site(f"{at}:input", b.of.stream(), ModuleInput(linear, 0, "x"))
            alone = name == "kv" and b.of.tp > 1 and not b.of.sequence_parallel
            fixed = OWN_HEADS_ONLY if alone else ""
            yield b.site(f"{at}:output", b.of.stream(), ModuleOutput(linear), width=width, fixed=fixed)
        elif not is_identity(linear):
            yield from b.column(at, linear, b.of.features("r"), width)
    fused = getattr(module, "linear_qkv_down_proj", None)
    if not is_identity(fused):
        packed = b.of.features("q|kv", tuple(widths.values()))
        yield from b.column(f"{path}.linear_qkv_down_proj", fused, packed, sum(widths.values()))


def _latent_norm_sites(b: SiteBuilder, path: str, norm: Any, up: Any, rank: int) -> Iterator[Site]:
    layout = b.of.stream()
    latents = replace(layout, dims=(*layout.dims[:-1], replace(layout.dims[-1], name="r")))
    yield from norm_inside(b, path, norm, up, latents, rank)
    if not is_identity(norm):
        yield b.site(f"{path}:input", latents, ModuleInput(norm, 0, "x"), width=rank)
        yield b.site(f"{path}:output", latents, ModuleOutput(norm), width=rank)


def _latent_core(b: SiteBuilder, path: str, core: Any, query: int, value: int) -> Iterator[Site]:
    heads = b.of.heads()  # of keys and values too: every head has its own
    arguments = {"q": ("query", query), "k": ("key", query), "v": ("value", value)}
    for index, (name, (keyword, size)) in enumerate(arguments.items()):
        yield b.site(f"{path}:{name}", heads, ModuleInput(core, index, keyword), width=size)
    yield from scores(b, path, core)
    yield b.site(f"{path}:output", b.of.features("n*d"), ModuleOutput(core), width=b.sizes["n"] * value)


def _latent_norm_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.uncut(parameter.ndim, shared=of.sequence_parallel)  # over whole latents, unlike norms of heads


LATENT_KINDS = (Kind(latent_attention, LATENT_CLASSES, ("self_attention",)),)
LATENT_PARAMETERS = (ParameterKind(_latent_norm_layout, roles=("q_layernorm", "kv_layernorm"), inside=LATENT_CLASSES),)
