"""Attention: the fused projection, queries, keys and values, scores and probabilities, the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.build import COLUMN_LINEARS, SiteBuilder, Kind, ParameterKind
from megatron_flex.adapters.megatron_core.fused import qkv
from megatron_flex.adapters.megatron_core.module_classes import is_identity
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.taps import MethodOutput, ModuleInput, ModuleOutput
from megatron_flex.layout import Layout
from megatron_flex.sites import Site

FUSED_ROPE = "fused_single_qkv_rope=True keeps q, k and v inside one kernel; set it to False to have them"
FLASH = (
    "{kind} keeps attention scores and probabilities inside its kernel; build the layers with the local spec "
    "(--transformer-impl local) to have them as tensors"
)


def attention(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """Self-attention with one fused projection."""
    of, core, config = b.of, module.core_attention, b.config
    gated = bool(getattr(config, "attention_output_gate", False))
    yield from b.both(path, module, of.stream(), "hidden_states", beside=(of.bias_beside(),))
    per_group = config.num_attention_heads // b.sizes["g"] * (2 if gated else 1) + 2
    width = b.sizes["g"] * per_group * config.kv_channels
    yield from b.column(f"{path}.linear_qkv", module.linear_qkv, of.features("qkv"), width)
    yield from qkv(
        b,
        f"{path}.linear_qkv",
        module.linear_qkv,
        b.no_rule(module.linear_qkv, COLUMN_LINEARS),
        gated,
    )
    hidden = FUSED_ROPE if getattr(config, "fused_single_qkv_rope", False) else ""
    parts = {"q": of.heads(), "k": of.groups(), "v": of.groups()}
    if gated:
        parts["gate"] = of.heads()
    for index, (name, layout) in enumerate(parts.items()):
        tap = MethodOutput(module, "get_query_key_value_tensors", index)
        yield b.site(f"{path}:{name}", layout, tap, hidden)
    for role, name in (("q_layernorm", "q"), ("k_layernorm", "k")):
        norm = getattr(module, role, None)
        if not is_identity(norm):
            yield from b.both(f"{path}.{role}", norm, parts[name], "x")
    for index, (name, keyword) in enumerate((("q", "query"), ("k", "key"), ("v", "value"))):
        yield b.site(f"{path}.core_attention:{name}", parts[name], ModuleInput(core, index, keyword))
    yield from scores(b, f"{path}.core_attention", core)
    width = b.sizes["n"] * config.kv_channels
    yield b.site(f"{path}.core_attention:output", of.features("nd"), ModuleOutput(core), width=width)
    yield from b.row(f"{path}.linear_proj", module.linear_proj, "nd", width)


def scores(b: SiteBuilder, path: str, core: Any) -> Iterator[Site]:
    """Attention scores as they enter the softmax, and probabilities as they leave it."""
    softmax = getattr(core, "scale_mask_softmax", None)
    hidden = "" if softmax is not None else FLASH.format(kind=type(core).__name__)
    owner = softmax if softmax is not None else core
    yield b.site(f"{path}:scores", b.of.scores(), ModuleInput(owner, 0, "input"), hidden)
    yield b.site(f"{path}:probs", b.of.scores(), ModuleOutput(owner), hidden)


def _head_norm_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    return of.uncut(parameter.ndim, shared=True)  # each rank applies it to its own heads


ATTENTION_KINDS = (Kind(attention, ("SelfAttention",), ("self_attention",)),)
ATTENTION_PARAMETERS = (ParameterKind(_head_norm_layout, roles=("q_layernorm", "k_layernorm")),)
