"""The arguments of Megatron's configuration and model for a configuration of Hugging Face.

Each function maps the settings of one family of configurations to the fields with the same meaning. A setting
without counterpart is refused by name, because the model would compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    """Llama, Mistral, Qwen2 and Qwen3: RMSNorm, a gated MLP, grouped queries, rotary positions."""
    biased = bool(getattr(config, "attention_bias", False))
    if biased != bool(getattr(config, "mlp_bias", False)):
        refuse_setting(config, "attention_bias", biased, "add_bias_linear gives all linears a bias, or none")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    transformer = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head,
        **_normalized(config),
        "add_bias_linear": biased,
        **_window(config),
    }
    model = {**_vocabulary(config), **_rotary_model(config)}
    return MegatronArguments(transformer, model, experts=(False,) * config.num_hidden_layers)


def _with(base: Callable[[Any], MegatronArguments], **more: Any) -> Callable[[Any], MegatronArguments]:
    def arguments(config: Any) -> MegatronArguments:
        found = base(config)
        return MegatronArguments({**found.transformer, **more}, found.model, found.latent, found.experts)

    arguments.__doc__ = base.__doc__
    return arguments


qwen2_arguments = _with(llama_arguments, add_qkv_bias=True)
qwen3_arguments = _with(llama_arguments, qk_layernorm=True)


def mixtral_arguments(config: Any) -> MegatronArguments:
    """Mixtral: every MLP is a layer of experts, whose weights are normalized over the chosen ones."""
    experts = {
        **_experts(config, config.num_local_experts, config.intermediate_size),
        "moe_router_pre_softmax": False,
    }
    found = llama_arguments(config)
    layers = (True,) * config.num_hidden_layers
    return MegatronArguments({**found.transformer, **experts}, found.model, experts=layers)


def qwen3_moe_arguments(config: Any) -> MegatronArguments:
    """Qwen3-MoE: some or all MLPs are layers of experts."""
    sparse = tuple(
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )
    experts = {
        **_experts(config, config.num_experts, config.moe_intermediate_size),
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": [int(s) for s in sparse],
    }
    found = qwen3_arguments(config)
    return MegatronArguments({**found.transformer, **experts}, found.model, experts=sparse)


def deepseek_v3_arguments(config: Any) -> MegatronArguments:
    """DeepSeek-V3: multi-latent attention; experts chosen by sigmoid scores, with a bias, within groups."""
    if not config.rope_interleave:
        refuse_setting(config, "rope_interleave", False, "multi-latent attention turns neighbouring entries")
    if config.attention_bias:
        refuse_setting(config, "attention_bias", True, "add_bias_linear gives all linears a bias, or none")
    if not config.norm_topk_prob:
        refuse_setting(config, "norm_topk_prob", False, "sigmoid scores of chosen experts are normalized")
    if config.topk_group and config.num_experts_per_tok // config.topk_group != 2:
        refuse_setting(
            config,
            "topk_group",
            config.topk_group,
            f"a group's score is the sum of its best two only for {config.num_experts_per_tok // 2} groups",
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
        **_experts(config, config.n_routed_experts, config.moe_intermediate_size),
        "moe_layer_freq": [int(s) for s in sparse],
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }
    # The configuration has the rotary embedding of multi-latent attention.
    model = {**_vocabulary(config), "position_embedding_type": "rope"}
    return MegatronArguments(transformer, model, latent=True, experts=sparse)


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


def _window(config: Any) -> dict[str, Any]:
    """Sliding windows: a query sees `sliding_window` keys, of which its own is the last."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        return {}
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    sliding = [int(kind == "sliding_attention") for kind in types]
    if not any(sliding):
        return {}
    settings: dict[str, Any] = {"window_size": (window - 1, 0)}
    return settings if all(sliding) else {**settings, "window_attn_skip_freq": sliding}


def _experts(config: Any, count: int, width: int) -> dict[str, Any]:
    return {
        "num_moe_experts": count,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": width,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": float(getattr(config, "router_aux_loss_coef", 0.0)),
    }


def _rotary(config: Any) -> Rotary:
    found = dict(config.rope_parameters or {})
    kind = found.pop("rope_type", "default")
    base = found.pop("rope_theta", getattr(config, "default_theta", 10000.0))
    if found.pop("partial_rotary_factor", 1.0) not in (None, 1.0):
        refuse_setting(config, "partial_rotary_factor", "below 1", "all entries of a head are turned")
    return Rotary(float(base), kind, found)


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
    if given.get("attention_factor") is not None or not given.get("truncate", True):
        refuse_setting(config, "rope_parameters", given, "attention_factor and truncate are fixed")
    # Without both, transformers scales by the factor alone: 0.1 * log(factor) + 1.
    both = bool(given.get("mscale") and given.get("mscale_all_dim"))
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(given["factor"]),
        "original_max_position_embeddings": int(given["original_max_position_embeddings"]),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "mscale": float(given["mscale"]) if both else 1.0,
        "mscale_all_dim": float(given["mscale_all_dim"]) if both else 0.0,
    }


LATENT_SCALINGS: dict[str, Callable[[Any, Rotary], dict[str, Any]]] = {
    "default": lambda config, rotary: {"rope_type": "rope"},
    "yarn": _scaled_as_yarn,
}
