"""The table of architectures: which tensors of Hugging Face make up each parameter of Megatron.

One entry an architecture. An entry describes a single device: sharding is the matter of layouts. Names of
Megatron's parameters are those of a GPTModel with the local spec; `parameter_names` maps those of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_flex.conversion import architecture_arguments as arguments
from megatron_flex.conversion.architecture_arguments import MegatronArguments
from megatron_flex.conversion.rearrangement import (
    FUSED_QUERY_KEY_VALUE,
    GATE_UP,
    QUERY_KEY_VALUE,
    SAME,
    Join,
)


class WeightRule(NamedTuple):
    """A parameter of Megatron, and the tensors of Hugging Face that make it up.

    Names may contain `{layer}`, `{expert}` and `{kind}` (weight or bias), which are the same on both sides.

    Attributes:
        ours: the name of Megatron's parameter.
        theirs: the names of Hugging Face's tensors; `name[{expert}]` is one entry of a tensor's first dim.
        join: how their rows make up the parameter's.
        transposed: whether Hugging Face stores matrices as `[in, out]`.
        tied: the rule counts only where the configuration ties the output layer to the embedding (True), or
            does not (False); None for both.

    Examples:
        >>> from megatron_flex.conversion import WeightRule
        >>> WeightRule("decoder.final_layernorm.{kind}", ("model.norm.{kind}",)).theirs
        ('model.norm.{kind}',)
    """

    ours: str
    theirs: tuple[str, ...]
    join: Join = SAME
    transposed: bool = False
    tied: bool | None = None


@dataclass(frozen=True)
class HuggingFaceArchitecture:
    """One architecture of Hugging Face.

    Attributes:
        rules: the rules; of several for one parameter, the first whose tensors exist counts, and the first is
            written to folders.
        arguments: maps a configuration to Megatron's.
        prefix: the prefix of the names in a model with a language modelling head, which a model without one
            lacks.
        unused: patterns (`re.fullmatch`) of tensors that are not loaded; `{num_hidden_layers}` in them is the
            configuration's.

    Examples:
        >>> from megatron_flex.conversion import ARCHITECTURES
        >>> loaded = load_hf(chunks, "llama", architecture=ARCHITECTURES["llama"])
    """

    rules: tuple[WeightRule, ...]
    arguments: Callable[[Any], MegatronArguments]
    prefix: str = "model."
    unused: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)

    def with_rule(self, rule: WeightRule) -> HuggingFaceArchitecture:
        """Return the architecture with a rule in the place of those for the same parameter.

        Examples:
            >>> from megatron_flex.conversion import ARCHITECTURES, WeightRule
            >>> rule = WeightRule("decoder.final_layernorm.{kind}", ("model.last_norm.{kind}",))
            >>> renamed = ARCHITECTURES["llama"].with_rule(rule)
            >>> to_hf(chunks, "out", config="llama", architecture=renamed)
        """
        others = tuple(r for r in self.rules if r.ours != rule.ours)
        return replace(self, rules=(rule, *others))


WORD_EMBEDDINGS, OUTPUT_WEIGHT = "embedding.word_embeddings.weight", "output_layer.weight"
OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


def _in_layers(layer_path: str, *rules: WeightRule) -> tuple[WeightRule, ...]:
    """Rules with names relative to a layer."""
    return tuple(
        rule._replace(ours=OURS + rule.ours, theirs=tuple(layer_path + name for name in rule.theirs))
        for rule in rules
    )


def _ends(embedding: str, norm: str, head: str = "lm_head.weight") -> tuple[WeightRule, ...]:
    """What is before and after the layers. A tied head is the embedding."""
    return (
        WeightRule(WORD_EMBEDDINGS, (embedding,)),
        WeightRule("decoder.final_layernorm.{kind}", (f"{norm}.{{kind}}",)),
        WeightRule(OUTPUT_WEIGHT, (head,), tied=False),
        WeightRule(OUTPUT_WEIGHT, (embedding,), tied=True),
    )


LLAMA_ENDS = _ends("model.embed_tokens.weight", "model.norm")
NORMS = (
    WeightRule("input_layernorm.{kind}", ("input_layernorm.{kind}",)),
    WeightRule("pre_mlp_layernorm.{kind}", ("post_attention_layernorm.{kind}",)),
)
ATTENTION = (
    WeightRule(
        "self_attention.linear_qkv.{kind}",
        ("self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"),
        QUERY_KEY_VALUE,
    ),
    WeightRule("self_attention.linear_proj.{kind}", ("self_attn.o_proj.{kind}",)),
)
HEAD_NORMS = (
    WeightRule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    WeightRule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
LATENT_ATTENTION = (
    WeightRule("self_attention.linear_q_proj.{kind}", ("self_attn.q_proj.{kind}",)),
    WeightRule("self_attention.linear_q_down_proj.{kind}", ("self_attn.q_a_proj.{kind}",)),
    WeightRule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    WeightRule("self_attention.linear_q_up_proj.{kind}", ("self_attn.q_b_proj.{kind}",)),
    WeightRule("self_attention.linear_kv_down_proj.{kind}", ("self_attn.kv_a_proj_with_mqa.{kind}",)),
    WeightRule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    WeightRule("self_attention.linear_kv_up_proj.{kind}", ("self_attn.kv_b_proj.{kind}",)),
    WeightRule("self_attention.linear_proj.{kind}", ("self_attn.o_proj.{kind}",)),
)


def _gated_mlp(path: str, hf_path: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(
            f"{path}.linear_fc1.{{kind}}",
            (f"{hf_path}.gate_proj.{{kind}}", f"{hf_path}.up_proj.{{kind}}"),
            GATE_UP,
        ),
        WeightRule(f"{path}.linear_fc2.{{kind}}", (f"{hf_path}.down_proj.{{kind}}",)),
    )


EXPERT = "mlp.experts.local_experts.{expert}"
# One tensor for all experts, as transformers 5 has them in memory: `[experts, gate and up, h]`.
PACKED_EXPERTS = (
    WeightRule(f"{EXPERT}.linear_fc1.weight", ("mlp.experts.gate_up_proj[{expert}]",)),
    WeightRule(f"{EXPERT}.linear_fc2.weight", ("mlp.experts.down_proj[{expert}]",)),
)
EXPERTS = (
    *_gated_mlp(EXPERT, "mlp.experts.{expert}"),
    WeightRule("mlp.router.weight", ("mlp.gate.weight",)),
    *PACKED_EXPERTS,
)
MIXTRAL_EXPERTS = (
    WeightRule(
        f"{EXPERT}.linear_fc1.weight",
        ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
        GATE_UP,
    ),
    WeightRule(f"{EXPERT}.linear_fc2.weight", ("block_sparse_moe.experts.{expert}.w2.weight",)),
    WeightRule("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    WeightRule("mlp.router.weight", ("mlp.gate.weight",)),
    *PACKED_EXPERTS,
)
DENSE = _gated_mlp("mlp", "mlp")

LLAMA_RULES = (*LLAMA_ENDS, *_in_layers(THEIRS, *NORMS, *ATTENTION, *DENSE))
LLAMA = HuggingFaceArchitecture(LLAMA_RULES, arguments.llama_arguments)

# By `model_type` of the configuration.
ARCHITECTURES: dict[str, HuggingFaceArchitecture] = {
    "gpt2": HuggingFaceArchitecture(
        (
            *_ends("transformer.wte.weight", "transformer.ln_f"),
            WeightRule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
            *_in_layers(
                "transformer.h.{layer}.",
                WeightRule("input_layernorm.{kind}", ("ln_1.{kind}",)),
                WeightRule(
                    "self_attention.linear_qkv.{kind}",
                    ("attn.c_attn.{kind}",),
                    FUSED_QUERY_KEY_VALUE,
                    transposed=True,
                ),
                WeightRule("self_attention.linear_proj.{kind}", ("attn.c_proj.{kind}",), transposed=True),
                WeightRule("pre_mlp_layernorm.{kind}", ("ln_2.{kind}",)),
                WeightRule("mlp.linear_fc1.{kind}", ("mlp.c_fc.{kind}",), transposed=True),
                WeightRule("mlp.linear_fc2.{kind}", ("mlp.c_proj.{kind}",), transposed=True),
            ),
        ),
        arguments.gpt2_arguments,
        prefix="transformer.",
        unused=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
    ),
    "llama": LLAMA,
    "mistral": replace(LLAMA, arguments=arguments.mistral_arguments),
    "qwen2": replace(LLAMA, arguments=arguments.qwen2_arguments),
    "qwen3": HuggingFaceArchitecture(
        (*LLAMA_RULES, *_in_layers(THEIRS, *HEAD_NORMS)), arguments.qwen3_arguments
    ),
    "qwen3_moe": HuggingFaceArchitecture(
        (*LLAMA_RULES, *_in_layers(THEIRS, *HEAD_NORMS, *EXPERTS)), arguments.qwen3_moe_arguments
    ),
    "mixtral": HuggingFaceArchitecture(
        (*LLAMA_ENDS, *_in_layers(THEIRS, *NORMS, *ATTENTION, *MIXTRAL_EXPERTS)),
        arguments.mixtral_arguments,
    ),
    "deepseek_v3": HuggingFaceArchitecture(
        (
            *LLAMA_ENDS,
            *_in_layers(
                THEIRS,
                *NORMS,
                *LATENT_ATTENTION,
                *DENSE,
                *EXPERTS,
                WeightRule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
                *_gated_mlp("mlp.shared_experts", "mlp.shared_experts"),
            ),
        ),
        arguments.deepseek_v3_arguments,
        # The layer that predicts a further token, after the last layer.
        unused=(*LLAMA.unused, r"model\.layers\.{num_hidden_layers}\..*"),
    ),
}

# What Megatron has no modules for, by `model_type`.
SANDWICH = "it normalizes the outputs of attention and MLP, for which Megatron has no modules"
SOFTCAP = "it caps its logits by tanh, and Megatron does not in training"
REFUSED: dict[str, str] = {
    "gemma2": f"{SANDWICH}; {SOFTCAP}",
    "gemma3": SANDWICH,
    "gemma3_text": SANDWICH,
    "olmo2": SANDWICH,
    "olmo3": SANDWICH,
}
