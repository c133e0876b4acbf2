"""Settings of a Megatron model that differ from those that a configuration of Hugging Face asks for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.nn.functional import gelu

from megatron_flex.conversion.architecture_arguments import ACTIVATIONS, MegatronArguments
from megatron_flex.errors import FlexError

# What only training depends on, and what a caller may choose.
FREE = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "moe_aux_loss_coeff",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
}
# The attributes of a model for arguments of its constructor; the vocabulary may be padded.
ATTRIBUTES = {
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rope_scaling": "rotary_scaling",
    "share_embeddings_and_output_weights": "share_embeddings_and_output_weights",
}
OF_ROWS = ("num_attention_heads", "num_query_groups")  # on which the order of rows depends
OF_TENSORS = ("num_layers", "num_moe_experts", "share_embeddings_and_output_weights")  # and which there are
DEFAULTS = {"rope_scaling": False}
GROUPS = ("moe_router_num_groups", "moe_router_group_topk")  # which limit nothing where all are chosen
OF_PATTERN = "moe_layer_freq"  # which a HybridModel's pattern says


def compare_settings(arguments: MegatronArguments, root: Any) -> tuple[str, ...]:
    """The settings in which a model differs, such as `layernorm_epsilon is 1e-05, not 1e-06`.

    Args:
        arguments: what the configuration of Hugging Face asks for.
        root: the model of Megatron, unwrapped.
    """
    hybrid = bool(getattr(root, "hybrid_layer_pattern", None))
    expected = {k: v for k, v in arguments.transformer.items() if k not in FREE}
    if hybrid:
        expected.pop(OF_PATTERN, None)
        expected["num_layers"] = len(arguments.hybrid_layer_pattern)
    actual = {name: getattr(root.config, name, None) for name in expected}
    if actual.get(GROUPS[0]) == actual.get(GROUPS[1]):
        actual |= {name: None for name in GROUPS if name in actual}
    for name, attribute in ATTRIBUTES.items():
        if hasattr(root, attribute) and not (arguments.latent and name.startswith("ro")):
            expected[name] = arguments.model.get(name, DEFAULTS.get(name))
            actual[name] = getattr(root, attribute)
    if arguments.model["position_embedding_type"] == "learned_absolute":
        expected.pop("rotary_base", None)
    if actual["activation_func"] is gelu and getattr(root.config, "bias_activation_fusion", False):
        actual["activation_func"] = ACTIVATIONS[
            "gelu_new"
        ]  # what the fused function computes (fused_bias_gelu.py)
    layers = len(arguments.experts)
    out = []
    for name, value in expected.items():
        if _plain(name, actual[name], layers) != _plain(name, value, layers):
            out.append(f"{name} is {_text(actual[name])}, not {_text(value)}")
    return tuple(out)


def check_structure(differences: Sequence[str], writing: bool = False) -> None:
    """Refuse a model whose heads are divided otherwise: shapes may fit, and rows would be of other heads.

    Args:
        differences: the result of `compare_settings`.
        writing: refuse a model with other tensors, too, which only a checkpoint that is read shows.

    Raises:
        FlexError: the heads, or the tensors, differ.
    """
    names = (*OF_ROWS, *OF_TENSORS) if writing else OF_ROWS
    difference = next((d for d in differences if d.startswith(names)), None)
    if difference is not None:
        raise FlexError(f"{difference}: build the Megatron model with the arguments of config_from_hf")


def _plain(name: str, value: Any, layers: int) -> Any:
    """A form in which equal settings are equal."""
    if isinstance(value, partial):
        return value.func, tuple(sorted(value.keywords.items()))
    if name == "moe_layer_freq" and isinstance(value, int):
        return [int(n % value == 0) for n in range(layers)]
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, partial):
        return f"{value.func.__name__}({', '.join(f'{k}={v!r}' for k, v in value.keywords.items())})"
    return str(getattr(value, "__name__", value))
