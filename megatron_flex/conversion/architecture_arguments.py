"""The arguments of Megatron's configuration and model for a configuration of Hugging Face.

Each function maps the settings of one family of configurations to the fields with the same meaning. A setting
without counterpart is refused by name, because the model would compute something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import nn

from megatron_flex.errors import FlexError

# transformers' names of activation functions; gelu_new is the approximation by tanh, as in GPT-2.
_TANH_GELU = partial(nn.functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": nn.functional.silu,
    "swish": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": nn.functional.relu,
}
# Constants of Megatron's RotaryEmbedding with rope_scaling=True (rotary_pos_embedding.py, _apply_scaling).
LLAMA3_SCALING = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
LATENT_EPSILON = 1e-6  # of transformers' q_a_layernorm and kv_a_layernorm, whatever the configuration has
# Resolves norms of multi-latent attention, newer Megatron versions only: without q_lora_rank, linear_q_proj
# has one, too.
QUERY_NORM_RESOLVER = "megatron.core.transformer.mla_qk_norm_config"


@dataclass(frozen=True)
class MegatronArguments:
    """The arguments that build a model of Megatron like one of Hugging Face.

    Attributes:
        transformer: arguments of `TransformerConfig`, or of `MLATransformerConfig` if `latent`; the caller
            adds sizes of the mesh and dtypes.
        model: arguments of `GPTModel` besides the configuration and the layer spec.
        latent: whether attention is multi-latent.
        experts: for each layer, whether its MLP is a layer of experts.

    Examples:
        >>> arguments = config_from_hf("llama")
        >>> arguments.transformer["num_query_groups"], arguments.latent
        (2, False)
    """

    transformer: dict[str, Any]
    model: dict[str, Any]
    latent: bool = False
    experts: tuple[bool, ...] = ()

    def __str__(self) -> str:
        """The arguments of both, a line for each."""
        config = "MLATransformerConfig" if self.latent else "TransformerConfig"
        lines = [f"{config}: {name} = {value!r}" for name, value in self.transformer.items()]
        return "\n".join([*lines, *(f"GPTModel: {name} = {value!r}" for name, value in self.model.items())])

    @property
    def hybrid_layer_pattern(self) -> str:
        """The layers as `HybridModel` writes them, which has attention and MLP as layers of their own.

        Its configuration needs `num_layers=len(hybrid_layer_pattern)`.
        """
        attention = "+" if self.latent else "*"
        return "".join(attention + ("E" if experts else "-") for experts in self.experts)


class Rotary(NamedTuple):
    """Rotary position embedding in a configuration of Hugging Face.

    Attributes:
        base: the base of the frequencies.
        kind: the kind of scaling, `default` for none.
        parameters: the parameters of the scaling.
    """

    base: float
    kind: str
    parameters: dict[str, Any]


def refuse_setting(config: Any, name: str, value: Any, why: str) -> None:
    """Raise the error of a setting without counterpart.

    Raises:
        FlexError: always.
    """
    raise FlexError(f"{config.model_type} with {name}={value!r} has no counterpart in Megatron: {why}")


def gpt2_arguments(config: Any) -> MegatronArguments:
    """GPT-2: learned positions, LayerNorm, biases, tied embeddings."""
    if config.scale_attn_by_inverse_layer_idx:
        refuse_setting(config, "scale_attn_by_inverse_layer_idx", True, "scores are not divided by the layer")
    if not config.scale_attn_weights:
        refuse_setting(config, "scale_attn_weights", False, "scores are divided by the root of the head size")
    if config.add_cross_attention:
        refuse_setting(config, "add_cross_attention", True, "GPTModel is a decoder only")
    transformer = {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "num_attention_heads": config.n_head,
        "num_query_groups": config.n_head,
        "kv_channels": config.n_embd // config.n_head,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "gated_linear_unit": False,
        "activation_func": _activation(config, "activation_function"),
        "add_bias_linear": True,
        "hidden_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "init_method_std": config.initializer_range,
    }
    model = {**_vocabulary(config), "position_embedding_type": "learned_absolute"}
    return MegatronArguments(transformer, model, experts=(False,) * config.n_layer)


def llama_arguments(config: Any) -> MegatronArguments:
    """Llama: RMSNorm, a gated MLP, grouped queries, rotary positions; biases everywhere or nowhere."""
    if config.attention_bias != config.mlp_bias:
        name = "attention_bias" if config.attention_bias else "mlp_bias"
        refuse_setting(config, name, True, "add_bias_linear gives all linears a bias, or none")
    return _decoder_arguments(config, add_bias_linear=config.attention_bias)


def mistral_arguments(config: Any) -> MegatronArguments:
    """Mistral: as Llama, with sliding windows in all layers."""
    return _decoder_arguments(config, **_window(config, [True] * config.num_hidden_layers))


def qwen2_arguments(config: Any) -> MegatronArguments:
    """Qwen2: biases of queries, keys and values, and sliding windows in some layers."""
    return _decoder_arguments(config, add_qkv_bias=True, **_window_by_layer(config))


def qwen3_arguments(config: Any) -> MegatronArguments:
    """Qwen3: norms of queries and keys, and sliding windows in some layers."""
    _refuse_attention_bias(config)
    return _decoder_arguments(config, qk_layernorm=True, **_window_by_layer(config))


def mixtral_arguments(config: Any) -> MegatronArguments:
    """Mixtral: every MLP is a layer of experts, whose weights are normalized over the chosen ones."""
    if config.router_jitter_noise:
        refuse_setting(
            config, "router_jitter_noise", config.router_jitter_noise, "it is on the input of experts, too"
        )
    experts = _experts(config, config.num_local_experts, config.intermediate_size)
    return replace(
        _decoder_arguments(
            config,
            **_window(config, [True] * config.num_hidden_layers),
            **experts,
            **_softmax_weights(config, normalized=True),
        ),
        experts=(True,) * config.num_hidden_layers,
    )


def qwen3_moe_arguments(config: Any) -> MegatronArguments:
    """Qwen3-MoE: some or all MLPs are layers of experts; sliding windows in all layers."""
    _refuse_attention_bias(config)
    sparse = tuple(
        config.num_experts > 0
        and layer not in config.mlp_only_layers
        and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )
    more: dict[str, Any] = _window(config, [True] * config.num_hidden_layers)
    if any(sparse):
        more |= {
            **_experts(config, config.num_experts, config.moe_intermediate_size),
            **_softmax_weights(config, normalized=config.norm_topk_prob),
            "moe_layer_freq": [int(s) for s in sparse],
        }
    return replace(_decoder_arguments(config, qk_layernorm=True, **more), experts=sparse)


def _decoder_arguments(config: Any, **more: Any) -> MegatronArguments:
    """What Llama and the models after it have in common.

    Args:
        config: the configuration.
        more: further arguments of `TransformerConfig`.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    transformer = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head,
        **_normalized(config),
        "add_bias_linear": False,
        **more,
    }
    model = {**_vocabulary(config), **_rotary_model(config)}
    return MegatronArguments(transformer, model, experts=(False,) * config.num_hidden_layers)


def _refuse_attention_bias(config: Any) -> None:
    if config.attention_bias:
        refuse_setting(config, "attention_bias", True, "add_bias_linear gives all linears a bias, or none")


def _softmax_weights(config: Any, normalized: bool) -> dict[str, Any]:
    """How the softmax of the router's logits becomes weights: over the chosen experts, or over all."""
    if normalized and config.num_experts_per_tok == 1:
        refuse_setting(
            config,
            "num_experts_per_tok",
            1,
            "the weight of a single expert is its probability, where this architecture has 1",
        )
    return {"moe_router_pre_softmax": not normalized}


def deepseek_v3_arguments(config: Any) -> MegatronArguments:
    """DeepSeek-V3: multi-latent attention; experts chosen by sigmoid scores, with a bias, within groups."""
    if not config.rope_interleave:
        refuse_setting(config, "rope_interleave", False, "multi-latent attention turns neighbouring entries")
    if config.attention_bias:
        refuse_setting(config, "attention_bias", True, "add_bias_linear gives all linears a bias, or none")
    if config.rms_norm_eps != LATENT_EPSILON:
        refuse_setting(
            config,
            "rms_norm_eps",
            config.rms_norm_eps,
            f"q_a_layernorm and kv_a_layernorm add {LATENT_EPSILON}, and Megatron adds the same in all",
        )
    if config.q_lora_rank is None and _has_module(QUERY_NORM_RESOLVER):
        refuse_setting(
            config, "q_lora_rank", None, "this version has a norm in linear_q_proj where keys have one"
        )
    sparse = tuple(n >= config.first_k_dense_replace for n in range(config.num_hidden_layers))
    transformer = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.qk_nope_head_dim + config.qk_rope_head_dim,
        **_normalized(config),
        "add_bias_linear": False,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        **_rotary_latent(config),
        **(_sigmoid_experts(config, sparse) if any(sparse) else {}),
    }
    # The configuration has the rotary embedding of multi-latent attention.
    model = {**_vocabulary(config), "position_embedding_type": "rope"}
    return MegatronArguments(transformer, model, latent=True, experts=sparse)


def _sigmoid_experts(config: Any, sparse: tuple[bool, ...]) -> dict[str, Any]:
    """Experts chosen by sigmoid scores with a bias, within groups, beside shared experts."""
    count, normalized = config.num_experts_per_tok, config.norm_topk_prob
    if normalized != (count > 1):
        refuse_setting(
            config,
            "norm_topk_prob",
            normalized,
            "sigmoid scores of chosen experts are normalized if there are two or more, "
            f"and num_experts_per_tok is {count}",
        )
    if not config.n_shared_experts:
        refuse_setting(config, "n_shared_experts", 0, "there is no layer of experts without them")
    grouped = config.n_group > config.topk_group  # else all groups are chosen
    if grouped and count // config.topk_group != 2:
        refuse_setting(
            config,
            "topk_group",
            config.topk_group,
            f"a group's score is the sum of its best two only for {count // 2} groups",
        )
    return {
        **_experts(config, config.n_routed_experts, config.moe_intermediate_size),
        "moe_layer_freq": [int(s) for s in sparse],
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": config.n_group if grouped else None,
        "moe_router_group_topk": config.topk_group if grouped else None,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package is not installed
        return False


def _vocabulary(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
    }


def _normalized(config: Any) -> dict[str, Any]:
    """Norms, the gated activation, dropout and initialization, as models after Llama have them."""
    return {
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": _activation(config, "hidden_act"),
        "hidden_dropout": 0.0,
        "attention_dropout": float(config.attention_dropout or 0.0),
        "init_method_std": config.initializer_range,
    }


def _activation(config: Any, name: str) -> Callable[..., Any]:
    value = getattr(config, name)
    if value not in ACTIVATIONS:
        refuse_setting(config, name, value, f"the activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _window(config: Any, sliding: Sequence[bool]) -> dict[str, Any]:
    """Sliding windows in some layers: a query sees `sliding_window` keys, of which its own is the last."""
    if config.sliding_window is None or not any(sliding):
        return {}
    settings: dict[str, Any] = {"window_size": (config.sliding_window - 1, 0)}
    return settings if all(sliding) else {**settings, "window_attn_skip_freq": [int(s) for s in sliding]}


def _window_by_layer(config: Any) -> dict[str, Any]:
    return _window(config, [kind == "sliding_attention" for kind in config.layer_types])


def _experts(config: Any, count: int, width: int) -> dict[str, Any]:
    return {
        "num_moe_experts": count,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": width,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": float(getattr(config, "router_aux_loss_coef", 0.0)),
    }


def _rotary(config: Any) -> Rotary:
    settings = dict(config.rope_parameters or {})
    kind = settings.pop("rope_type", "default")
    base = settings.pop("rope_theta", getattr(config, "default_theta", 10000.0))
    if settings.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        refuse_setting(config, "partial_rotary_factor", "below 1", "all entries of a head are turned")
    return Rotary(float(base), kind, settings)


def _rotary_model(config: Any) -> dict[str, Any]:
    """Rotary embedding, which GPTModel itself has."""
    rotary = _rotary(config)
    settings = {"position_embedding_type": "rope", "rotary_base": rotary.base}
    if rotary.kind not in MODEL_SCALINGS:
        refuse_setting(
            config, "rope_type", rotary.kind, f"GPTModel has the kinds {', '.join(MODEL_SCALINGS)}"
        )
    return {**settings, **MODEL_SCALINGS[rotary.kind](config, rotary)}


def _scaled_as_llama3(config: Any, rotary: Rotary) -> dict[str, Any]:
    given = {name: rotary.parameters.get(name) for name in LLAMA3_SCALING}
    if given != LLAMA3_SCALING:
        refuse_setting(config, "rope_parameters", given, f"rope_scaling takes {LLAMA3_SCALING} as given")
    return {"rope_scaling": True, "rope_scaling_factor": float(rotary.parameters["factor"])}


MODEL_SCALINGS: dict[str, Callable[[Any, Rotary], dict[str, Any]]] = {
    "default": lambda config, rotary: {},
    "linear": lambda config, rotary: {"seq_len_interpolation_factor": float(rotary.parameters["factor"])},
    "llama3": _scaled_as_llama3,
}


def _rotary_latent(config: Any) -> dict[str, Any]:
    """Rotary embedding of multi-latent attention, which the configuration has."""
    rotary = _rotary(config)
    if rotary.kind not in LATENT_SCALINGS:
        refuse_setting(
            config, "rope_type", rotary.kind, f"multi-latent attention has {', '.join(LATENT_SCALINGS)}"
        )
    return {"rotary_base": rotary.base, **LATENT_SCALINGS[rotary.kind](config, rotary)}


def _scaled_as_yarn(config: Any, rotary: Rotary) -> dict[str, Any]:
    given = rotary.parameters
    if not given.get("truncate", True):
        refuse_setting(config, "rope_parameters", given, "truncate=False is not")
    original = int(given["original_max_position_embeddings"])
    factor = float(given["factor"] or config.max_position_embeddings / original)
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        **_yarn_scales(config, given, factor),
    }


def _yarn_scales(config: Any, given: dict[str, Any], factor: float) -> dict[str, float]:
    """The `mscale`s with which Megatron scales rotary embeddings, and scores, as transformers does.

    With `scale(m) = 0.1 * m * log(factor) + 1`, both scale scores by `scale(mscale_all_dim) ** 2`, and
    Megatron rotary embeddings by `scale(mscale) / scale(mscale_all_dim)`. Transformers takes this ratio only
    where both are given, and otherwise `attention_factor`, or `scale(1)`.
    """
    unit = 0.1 * math.log(factor) if factor > 1 else 0.0
    all_dims = float(given.get("mscale_all_dim") or 0.0)
    attention = given.get("attention_factor")
    if attention is None and given.get("mscale") and all_dims:
        return {"mscale": float(given["mscale"]), "mscale_all_dim": all_dims}
    if attention is None and not all_dims:
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    rotary_factor = 1.0 + unit if attention is None else float(attention)
    if not unit:
        if rotary_factor != 1.0:
            refuse_setting(config, "attention_factor", rotary_factor, "it is 1 for a factor of 1")
        return {"mscale": 1.0, "mscale_all_dim": all_dims}
    return {"mscale": (rotary_factor * (1.0 + unit * all_dims) - 1.0) / unit, "mscale_all_dim": all_dims}


LATENT_SCALINGS: dict[str, Callable[[Any, Rotary], dict[str, Any]]] = {
    "default": lambda config, rotary: {"rope_type": "rope"},
    "yarn": _scaled_as_yarn,
}
