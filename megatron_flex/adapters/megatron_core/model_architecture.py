"""The architecture of a Megatron model, read from its configuration."""

from __future__ import annotations

from typing import Any

from megatron_flex.adapters.adapter_base import Architecture
from megatron_flex.adapters.decoder_paths import DecoderPaths, LayerPoint, NormPoint
from megatron_flex.adapters.megatron_core.module_classes import is_megatron
from megatron_flex.gpt_names import FINAL_NORMS

DECODERS = ("GPTModel", "HybridModel", "MambaModel")
MEGATRONS_MODULES = ("megatron.core.", "transformer_engine.")
ROTARY = ("rope", "mrope", "yarn")


FC1_BIAS, FC2_BIAS = "mlp.linear_fc1.bias", "mlp.linear_fc2.bias"
PLAIN_MLP = {"mlp.hook_pre": LayerPoint("mlp.linear_fc1:output", bias=FC1_BIAS)}
GATED_MLP = {
    "mlp.hook_pre": LayerPoint("mlp.linear_fc1:gate", bias=FC1_BIAS, bias_part=(0, 2)),
    "mlp.hook_pre_linear": LayerPoint("mlp.linear_fc1:up", bias=FC1_BIAS, bias_part=(1, 2)),
}


def megatron_paths(gated: bool) -> DecoderPaths:
    """The paths of a GPTModel, and of a HybridModel, whose layers have one half of them each.

    Megatron adds the bias of a linear after the linear's output, except that of queries, keys and values.
    """
    return DecoderPaths(
        layers="decoder.layers",
        embedding="embedding.word_embeddings",
        head="output_layer",
        final_norms=FINAL_NORMS,
        attention="self_attention",
        attention_points={
            "attn.hook_q": LayerPoint("self_attention.linear_qkv:q"),
            "attn.hook_k": LayerPoint("self_attention.linear_qkv:k"),
            "attn.hook_v": LayerPoint("self_attention.linear_qkv:v"),
            "attn.hook_rot_q": LayerPoint("self_attention.core_attention:q"),
            "attn.hook_rot_k": LayerPoint("self_attention.core_attention:k"),
            "attn.hook_attn_scores": LayerPoint("self_attention.core_attention:scores"),
            "attn.hook_pattern": LayerPoint("self_attention.core_attention:probs"),
            "attn.hook_z": LayerPoint("self_attention.linear_proj:input", heads="n"),
            "hook_attn_out": LayerPoint("self_attention:output", bias="self_attention.linear_proj.bias"),
            "hook_mixer_out": LayerPoint("mixer:output", bias="mixer.out_proj.bias"),
        },
        head_output="self_attention.linear_proj",
        mlp_points={
            **(GATED_MLP if gated else PLAIN_MLP),
            "mlp.hook_post": LayerPoint("mlp.linear_fc2:input"),
            "hook_mlp_out": LayerPoint("mlp:output", bias=FC2_BIAS),
        },
        neuron_output="mlp.linear_fc2",
        norms={"ln1": NormPoint("input_layernorm"), "ln2": NormPoint("pre_mlp_layernorm")},
        position_sum="embedding:output",
        position_table="embedding.position_embeddings.weight",
        fused_norms={"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"},
        sequence_first=True,
    )


def read_architecture(root: Any) -> Architecture | None:
    """The properties of a model, from its configuration."""
    if not is_megatron(root, *DECODERS):
        return None
    config = root.config
    gated = bool(config.gated_linear_unit)
    return Architecture(
        paths=megatron_paths(gated),
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        head_size=config.kv_channels or config.hidden_size // config.num_attention_heads,
        hidden=config.hidden_size,
        neurons=config.ffn_hidden_size or 0,
        vocabulary=root.vocab_size,
        context=getattr(root, "max_sequence_length", None),
        rms=config.normalization == "RMSNorm",
        epsilon=config.layernorm_epsilon,
        unit_offset=bool(getattr(config, "layernorm_zero_centered_gamma", False)),
        gated=gated,
        rotary=getattr(root, "position_embedding_type", "") in ROTARY,
        causal=getattr(config, "window_size", None) is None,
        scaled_by_layer=bool(getattr(config, "apply_query_key_layer_scaling", False)),
        tied=bool(getattr(root, "share_embeddings_and_output_weights", False)),
        embedding_scale=_read_mup(config, "mup_embedding_mult"),
        logit_scale=_read_mup(config, "mup_output_mult"),
        scale_logits=getattr(root, "_scale_logits", None),
        not_linear=_explain_head(root),
    )


def _read_mup(config: Any, name: str) -> float:
    """A multiplier of the maximal update parametrization; 1 without it."""
    return float(getattr(config, name, 1.0)) if getattr(config, "use_mup", False) else 1.0


def _explain_head(root: Any) -> str:
    """Why the logits may be more than a scaled product: a class that is not Megatron's computes them."""
    layer = getattr(root, "output_layer", None)
    if layer is not None and not type(layer).__module__.startswith(MEGATRONS_MODULES):
        return f"output_layer is a {type(layer).__name__}, which may do more than multiply by its weight"
    scale = getattr(type(root), "_scale_logits", None)
    if scale is not None and not scale.__module__.startswith(MEGATRONS_MODULES):
        return f"{type(root).__name__}._scale_logits changes the logits after the output layer"
    return ""
