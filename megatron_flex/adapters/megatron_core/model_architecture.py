"""The architecture of a Megatron model, read from its configuration."""

from __future__ import annotations

from typing import Any

from megatron_flex.adapters.adapter_base import Architecture
from megatron_flex.adapters.megatron_core.module_classes import is_megatron

DECODERS = ("GPTModel", "HybridModel", "MambaModel")
MEGATRONS_MODULES = ("megatron.core.", "transformer_engine.")
ROTARY = ("rope", "mrope", "yarn")


def read_architecture(root: Any) -> Architecture | None:
    """The properties of a model, from its configuration."""
    if not is_megatron(root, *DECODERS):
        return None
    config = root.config
    return Architecture(
        heads=config.num_attention_heads,
        rms=config.normalization == "RMSNorm",
        epsilon=config.layernorm_epsilon,
        unit_offset=bool(getattr(config, "layernorm_zero_centered_gamma", False)),
        gated=bool(config.gated_linear_unit),
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
