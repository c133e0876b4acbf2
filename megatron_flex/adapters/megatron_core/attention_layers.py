"""Attention, also across stacks and multi-latent: projections, heads, scores and probabilities, output.

Multi-latent attention has projections down to the latents and up to the heads. The key's rotary part is an
output of `linear_kv_down_proj` and is used by all heads. On more than one tensor parallel rank without
Transformer Engine's duplicated projection, upstream's gradient of the rotary part covers each rank's own
heads only. That gradient, and all gradients before it, are therefore those of upstream and not of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.adapted_linears import adapted_sites
from megatron_flex.adapters.megatron_core.megatron_taps import (
    core_attention_output,
    packed_layout,
    without_batch_dim,
)
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import COLUMN_LINEARS, is_identity
from megatron_flex.adapters.megatron_core.site_builder import (
    Kind,
    ParameterKind,
    SiteBuilder,
    heads_of,
    is_duplicated,
    norm_inside,
    qkv,
    used_on_local_heads,
    used_on_local_tokens,
)
from megatron_flex.adapters.taps import method_output, module_input, module_output
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.sites import Site, Tap

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
        tap = Tap(method_output, module, ("get_query_key_value_tensors", index))
        yield b.site(f"{path}:{name}", layout, tap, hidden)
    for role, name in (("q_layernorm", "q"), ("k_layernorm", "k")):
        norm = getattr(module, role, None)
        if not is_identity(norm):
            yield from b.both(f"{path}.{role}", norm, parts[name], "x")
    for index, (name, keyword) in enumerate((("q", "query"), ("k", "key"), ("v", "value"))):
        entry = Tap(module_input, core, (index, keyword))
        yield without_batch_dim(b.site(f"{path}.core_attention:{name}", parts[name], entry))
    yield from scores(b, f"{path}.core_attention", core)
    width = b.sizes["n"] * config.kv_channels
    yield core_output(b, f"{path}.core_attention:output", core, "n*d", width)
    yield from b.row(f"{path}.linear_proj", module.linear_proj, "n*d", width)


def cross_attention(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    """Attention of T5's decoder to the output of its encoder; every head has its own key and value."""
    of, core = b.of, module.core_attention
    width = b.sizes["n"] * b.config.kv_channels
    yield b.site(f"{path}:input", of.stream(), Tap(module_input, module, (0, "hidden_states")))
    yield b.site(f"{path}:context", of.stream(), Tap(module_input, module, (2, "key_value_states")))
    yield b.site(f"{path}:output", of.stream(), Tap(module_output, module), beside=(of.bias_beside(),))
    yield from b.column(f"{path}.linear_q", module.linear_q, of.features("nd"), width)
    yield from b.column(f"{path}.linear_kv", module.linear_kv, of.features("kv"), 2 * width)
    hidden = b.no_rule(module.linear_kv, COLUMN_LINEARS)
    yield from heads_of(b, f"{path}.linear_kv", module.linear_kv, ("k", "v"), hidden)
    for index, name in enumerate(("q", "k", "v")):
        yield b.site(
            f"{path}:{name}", of.heads(), Tap(method_output, module, ("get_query_key_value_tensors", index))
        )
    for index, (name, keyword) in enumerate((("q", "query"), ("k", "key"), ("v", "value"))):
        yield b.site(f"{path}.core_attention:{name}", of.heads(), Tap(module_input, core, (index, keyword)))
    yield from scores(b, f"{path}.core_attention", core)
    yield core_output(b, f"{path}.core_attention:output", core, "nd", width)
    yield from b.row(f"{path}.linear_proj", module.linear_proj, "nd", width)


def core_output(b: SiteBuilder, name: str, core: Any, features: str, width: int) -> Site:
    """The output of core attention, its heads concatenated in a dim of `width` features (full tensor)."""
    layout = b.of.features(features)
    tap = Tap(core_attention_output, core, (packed_layout(layout), b.sizes["n"] // b.of.tp))
    return replace(b.site(name, layout, tap, width=width), unbatched=True)


def scores(b: SiteBuilder, path: str, core: Any) -> Iterator[Site]:
    """Attention scores at the input of the softmax, and probabilities at its output."""
    softmax = getattr(core, "scale_mask_softmax", None)
    hidden = "" if softmax is not None else FLASH.format(kind=type(core).__name__)
    owner = softmax if softmax is not None else core
    yield b.site(f"{path}:scores", b.of.scores(), Tap(module_input, owner, (0, "input")), hidden)
    yield b.site(f"{path}:probs", b.of.scores(), Tap(module_output, owner), hidden)


def _sinks_layout(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    """The logits that `--softmax-type learnable` adds to the softmax of each head."""
    return Layout((Dim("n", (Cut("tp"),)), *(Dim() for _ in range(1, parameter.ndim))))


ATTENTION_KINDS = (
    Kind(attention, ("SelfAttention",), ("self_attention",)),
    Kind(cross_attention, ("CrossAttention",), ("cross_attention",)),
)
ATTENTION_PARAMETERS = (
    ParameterKind(used_on_local_heads, roles=("q_layernorm", "k_layernorm")),
    ParameterKind(_sinks_layout, ("DotProductAttention", "TEDotProductAttention")),
)


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
        yield from map(without_batch_dim, _latent_norm_sites(b, f"{path}.{name}_layernorm", norm, up, rank))
    for name, rank, each in (
        ("q_proj", None, query),
        ("q_up_proj", config.q_lora_rank, query),
        ("kv_up_proj", config.kv_lora_rank, config.qk_head_dim + value),
    ):
        linear = getattr(module, f"linear_{name}", None)
        if not is_identity(linear):
            out, width = b.of.features("n*d"), heads * each
            yield from map(
                without_batch_dim, b.column(f"{path}.linear_{name}", linear, out, width, input_width=rank)
            )
    yield from _latent_core(b, f"{path}.core_attention", module.core_attention, query, value)
    yield from b.row(f"{path}.linear_proj", module.linear_proj, "n*d", heads * value)


def _down_projections(b: SiteBuilder, path: str, module: Any) -> Iterator[Site]:
    config = b.config
    widths = {"q": config.q_lora_rank, "kv": config.kv_lora_rank + config.qk_pos_emb_head_dim}
    for name, width in widths.items():
        at = f"{path}.linear_{name}_down_proj"
        linear: Any = getattr(module, f"linear_{name}_down_proj", None)
        if is_duplicated(linear):
            alone = name == "kv" and b.of.tp > 1 and not b.of.sequence_parallel
            yield from _duplicated(b, at, linear, width, OWN_HEADS_ONLY if alone else "")
        elif not is_identity(linear):
            yield from b.column(at, linear, b.of.features("r"), width)
    fused = getattr(module, "linear_qkv_down_proj", None)
    if not is_identity(fused):
        packed = b.of.features("q|kv", tuple(widths.values()))
        yield from b.column(f"{path}.linear_qkv_down_proj", fused, packed, sum(widths.values()))


def _duplicated(b: SiteBuilder, path: str, linear: Any, width: int, read_only_reason: str) -> Iterator[Site]:
    """The sites of a linear that every tensor parallel rank has in full, for its own tokens."""
    stream = b.of.stream()
    yield b.site(f"{path}:input", stream, Tap(module_input, linear, (0, "x")))
    yield b.site(
        f"{path}:output", stream, Tap(module_output, linear), width=width, read_only_reason=read_only_reason
    )

    def base(at: str, inner: Any) -> Iterator[Site]:
        yield from _duplicated(b, at, inner, width, read_only_reason)

    yield from adapted_sites(b, path, linear, base, (stream, stream), (None, width), "")


def _latent_norm_sites(b: SiteBuilder, path: str, norm: Any, up: Any, rank: int) -> Iterator[Site]:
    layout = b.of.stream()
    latents = replace(layout, dims=(*layout.dims[:-1], replace(layout.dims[-1], name="r")))
    yield from norm_inside(b, path, norm, up, latents, rank)
    if not is_identity(norm):
        yield b.site(f"{path}:input", latents, Tap(module_input, norm, (0, "x")), width=rank)
        yield b.site(f"{path}:output", latents, Tap(module_output, norm), width=rank)


def _latent_core(b: SiteBuilder, path: str, core: Any, query: int, value: int) -> Iterator[Site]:
    heads = b.of.heads()  # of keys and values too: every head has its own
    arguments = {"q": ("query", query), "k": ("key", query), "v": ("value", value)}
    for index, (name, (keyword, size)) in enumerate(arguments.items()):
        yield without_batch_dim(
            b.site(f"{path}:{name}", heads, Tap(module_input, core, (index, keyword)), width=size)
        )
    yield from scores(b, path, core)
    yield core_output(b, f"{path}:output", core, "n*d", b.sizes["n"] * value)


LATENT_KINDS = (Kind(latent_attention, LATENT_CLASSES, ("self_attention",)),)
LATENT_PARAMETERS = (
    # over full latents, unlike the norms of heads above
    ParameterKind(used_on_local_tokens, roles=("q_layernorm", "kv_layernorm"), inside=LATENT_CLASSES),
)
