"""Faults of conversions, planted in a Megatron model, with the site and the words that must find each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import aligned, hugging_face
from tests.support.gpt import Case

LAYER = 2  # the layer that has the fault
AT = f"decoder.layers.{LAYER}"
Change = Callable[[Tensor, dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        family: the architecture.
        site: the site that must be found first.
        words: words of the cause.
        parameters: full parameters to change: from the old value and all old values to the new one.
        config: other settings of the Megatron model.
        model: other arguments of it.
        after: changes the modules of this rank.
    """

    family: str | hugging_face.Family
    site: str
    words: str
    parameters: dict[str, Change] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    after: Callable[[Any], None] | None = None


def _groups(weight: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a fused weight, `[groups, heads, size, ...]`."""
    wide = weight.unflatten(0, (groups, -1, 8))
    return wide[:, :-2], wide[:, -2:-1], wide[:, -1:]


def swap_keys_and_values(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    q, k, v = _groups(weight, 2)
    return torch.cat([q, v, k], 1).flatten(0, 2)


def ungroup(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten(0, 2) for part in _groups(weight, 2)])


def permute_rotary_rows(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    q, k, v = _groups(weight, 2)
    return torch.cat([*(torch.cat([p[:, :, 0::2], p[:, :, 1::2]], 2) for p in (q, k)), v], 1).flatten(0, 2)


def swap_halves(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return weight.roll(len(weight) // 2, 0)


def zeros(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return torch.zeros_like(weight)


def swap_heads(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return weight.roll(weight.shape[1] // 4, 1)


def transposed(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return weight.T.contiguous()


def rounded(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return weight.bfloat16().float()


def of(name: str) -> Change:
    """The value of another parameter."""
    return lambda _, old: old[name].clone()


def shift_rows(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return weight.roll(1, 0)


def shrunk(weight: Tensor, _: dict[str, Tensor]) -> Tensor:
    return weight / 32**0.5


def unbiased_router(chunk: Any) -> None:
    for module in chunk.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias.zero_()


def _expert(number: int, linear: str) -> str:
    return f"{AT}.mlp.experts.local_experts.{number}.linear_{linear}.weight"


QKV, PROJ, FC1, FC2 = (
    f"{AT}.self_attention.linear_qkv.weight",
    f"{AT}.self_attention.linear_proj.weight",
    f"{AT}.mlp.linear_fc1.weight",
    f"{AT}.mlp.linear_fc2.weight",
)
NORM1, NORM2 = f"{AT}.input_layernorm.weight", f"{AT}.pre_mlp_layernorm.weight"
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
SCALED_LLAMA = replace(
    hugging_face.FAMILIES["llama3"],
    settings={
        **hugging_face.FAMILIES["llama3"].settings,
        "rope_parameters": {
            **hugging_face.FAMILIES["llama3"].settings["rope_parameters"],
            "rope_theta": 500000.0,  # so that the slowest frequencies are scaled
        },
    },
)
FAULTS: dict[str, Fault] = {
    "keys and values swapped": Fault(
        "llama",
        f"{AT}.self_attention.linear_qkv:k",
        "q, k and v are in another order",
        {QKV: swap_keys_and_values},
    ),
    "qkv concatenated": Fault(
        "llama", f"{AT}.self_attention.linear_qkv:q", "are concatenated in linear_qkv", {QKV: ungroup}
    ),
    "rotary rows permuted": Fault(
        "llama", f"{AT}.self_attention.linear_qkv:q", "rotary interleaving", {QKV: permute_rotary_rows}
    ),
    "rotary interleaved": Fault(
        "llama",
        "decoder.layers.0.self_attention.core_attention:q",
        "rotary interleaving",
        config={"rotary_interleaved": True},
    ),
    "rotary base": Fault(
        "llama",
        "decoder.layers.0.self_attention.core_attention:q",
        "the rotary base is 10000 in Megatron and 500",
        model={"rotary_base": 10000},
    ),
    "rotary scaling missing": Fault(
        SCALED_LLAMA,
        "decoder.layers.0.self_attention.core_attention:q",
        "scaling of rotary frequencies is missing",
        model={"rope_scaling": False},
    ),
    "no rotary embedding": Fault(
        "llama",
        "decoder.layers.0.self_attention.core_attention:q",
        "rotary position embedding is missing",
        model={"position_embedding_type": "none"},
    ),
    "gate and up swapped": Fault(
        "llama", f"{AT}.mlp.linear_fc1:gate", "gate and up are swapped", {FC1: swap_halves}
    ),
    "epsilon": Fault(
        "qwen2",
        "decoder.layers.0.input_layernorm:output",
        "the epsilon of the norm is 1e-05 in Megatron and 1e-06",
        config={"layernorm_epsilon": 1e-5},
    ),
    "qkv bias missing": Fault(
        "qwen2",
        f"{AT}.self_attention.linear_qkv:q",
        "q_proj.bias is missing",
        {f"{AT}.self_attention.linear_qkv.bias": zeros},
    ),
    "projection bias missing": Fault(
        "gpt2",
        f"{AT}.self_attention.linear_proj:output",
        "attn.c_proj.bias is missing",
        {f"{AT}.self_attention.linear_proj.bias": zeros},
    ),
    "norm bias missing": Fault(
        "gpt2", f"{AT}.pre_mlp_layernorm:output", "the bias", {f"{AT}.pre_mlp_layernorm.bias": zeros}
    ),
    "embedding not scaled": Fault(
        "llama", "embedding.word_embeddings:output", "the embeddings are not scaled", {EMBEDDING: shrunk}
    ),
    "tied weights not tied": Fault(
        "qwen2",
        "output_layer:output",
        "tied weights are not tied",
        {HEAD: shift_rows},
        model={"share_embeddings_and_output_weights": False},
    ),
    "output tied": Fault(
        "llama", "output_layer:output", "is tied to the word embeddings in Megatron", {HEAD: of(EMBEDDING)}
    ),
    "norms swapped": Fault(
        "llama", f"{AT}.input_layernorm:output", "wrong post-norm", {NORM1: of(NORM2), NORM2: of(NORM1)}
    ),
    "query norm has the weight of the key's": Fault(
        "qwen3",
        f"{AT}.self_attention.q_layernorm:output",
        "self_attn.k_norm",
        {f"{AT}.self_attention.q_layernorm.weight": of(f"{AT}.self_attention.k_layernorm.weight")},
    ),
    "vocabulary padding": Fault(
        "llama",
        "embedding.word_embeddings:output",
        "the rows of the vocabulary are shifted by",
        {EMBEDDING: shift_rows},
    ),
    "heads permuted": Fault(
        "llama",
        f"{AT}.self_attention.linear_proj:output",
        "attention heads are in another order",
        {PROJ: swap_heads},
    ),
    "weight transposed": Fault(
        "llama", f"{AT}.self_attention.linear_proj:output", "is transposed", {PROJ: transposed}
    ),
    "weight of another layer": Fault(
        "llama",
        f"{AT}.mlp.linear_fc2:output",
        "the weights are those of layer 1",
        {FC2: of(FC2.replace("layers.2", "layers.1"))},
    ),
    "weight rounded to bf16": Fault(
        "llama", f"{AT}.mlp.linear_fc2:output", "rounded to bf16", {FC2: rounded}
    ),
    "activation": Fault(
        "gpt2",
        "decoder.layers.0.mlp.linear_fc2:input",
        "the activation of Megatron is gelu,",
        config={"activation_func": nn.functional.gelu},
    ),
    "softmax scale": Fault(
        "llama",
        "decoder.layers.0.self_attention.core_attention:scores",
        "the softmax scale differs",
        config={"softmax_scale": 1.0},
    ),
    "window missing": Fault(
        "mistral",
        "decoder.layers.0.self_attention.core_attention:probs",
        "sliding_window=5",
        config={"window_size": None},
    ),
    "experts exchanged": Fault(
        "mixtral",
        f"{AT}.mlp.experts.local_experts.1.linear_fc1:gate",
        "expert 1 has the weights of expert 2",
        {_expert(a, n): of(_expert(b, n)) for n in ("fc1", "fc2") for a, b in ((1, 2), (2, 1))},
    ),
    "router rows permuted": Fault(
        "mixtral",
        f"{AT}.mlp.router:logits",
        "experts are in another order in the router",
        {f"{AT}.mlp.router.weight": shift_rows},
    ),
    "router not normalized": Fault(
        "qwen3_moe",
        "decoder.layers.0.mlp.router:probs",
        "softmax over all experts in Megatron",
        config={"moe_router_pre_softmax": True},
    ),
    "router scaling missing": Fault(
        "deepseek_v3",
        "decoder.layers.1.mlp.router:probs",
        "router's scaling is missing",
        config={"moe_router_topk_scaling_factor": None},
    ),
    "expert bias missing": Fault(
        "deepseek_v3", "decoder.layers.1.mlp.router:probs", "e_score_correction_bias", after=unbiased_router
    ),
}


def find(name: str, case: Case, **options: Any) -> Any:
    """What `align` finds of a fault."""
    from megatron_flex.alignment import align
    from megatron_flex.model import FlexModel

    fault = FAULTS[name]
    hf_model, chunks = aligned.rank_models(fault.family, case, model=fault.model, **fault.config)
    for chunk in chunks:
        if fault.after is not None:
            fault.after(chunk)
    with FlexModel(chunks) as flex:
        if fault.parameters:
            old = dict(flex.named_full_parameters(everywhere=True))
            for parameter, change in fault.parameters.items():
                flex.set_module_parameter(parameter, change(old[parameter], old))
        return align(hf_model, flex, hugging_face.tokens(), **options)
