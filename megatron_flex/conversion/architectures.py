"""The table of architectures: which tensors of Hugging Face make up each parameter of Megatron.

One entry an architecture. An entry describes a single device: sharding is the matter of layouts. Names of
Megatron's parameters are those of a GPTModel with the local spec; `parameter_names` maps those of others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_flex.conversion import megatron_arguments as arguments
from megatron_flex.conversion.megatron_arguments import MegatronArguments
from megatron_flex.conversion.rearrangement import (
    FUSED_QUERY_KEY_VALUE,
    GATE_UP,
    QUERY_KEY_VALUE,
    SAME,
    Join,
)


class Rule(NamedTuple):
    """A parameter of Megatron, and the tensors of Hugging Face that make it up.

    Names may contain `{layer}`, `{expert}` and `{kind}` (weight or bias), which are the same on both sides.

    Attributes:
        ours: the name of Megatron's parameter.
        theirs: the names of Hugging Face's tensors; `name[{expert}]` is one entry of a tensor's first dim.
        join: how their rows make up the parameter's.
        transposed: whether Hugging Face stores matrices as `[in, out]`.
        tied: the rule counts only where the configuration ties the output layer to the embedding (True), or
            does not (False); None for both.
    """

    ours: str
    theirs: tuple[str, ...]
    join: Join = SAME
    transposed: bool = False
    tied: bool | None = None


@dataclass(frozen=True)
class Architecture:
    """One architecture of Hugging Face.

    Attributes:
        rules: the rules; of several for one parameter, the first whose tensors exist counts, and the first is
            written to folders.
        arguments: maps a configuration to Megatron's.
        prefix: the prefix of the names in a model with a language modelling head, which a model without one
            lacks.
        unused: patterns (`re.fullmatch`) of tensors that are not loaded; `{num_hidden_layers}` in them is the
            configuration's.
    """

    rules: tuple[Rule, ...]
    arguments: Callable[[Any], MegatronArguments]
    prefix: str = "model."
    unused: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)

    def with_rule(self, rule: Rule) -> Architecture:
        """The architecture with a rule in the place of those for the same parameter."""
        others = tuple(r for r in self.rules if r.ours != rule.ours)
        return replace(self, rules=(rule, *others))


WORD_EMBEDDINGS, OUTPUT_WEIGHT = "embedding.word_embeddings.weight", "output_layer.weight"
OURS, THEIRS = "decoder.layers.{layer}.", "model.layers.{layer}."


def _in_layers(theirs: str, *rules: Rule) -> tuple[Rule, ...]:
    """Rules with names relative to a layer."""
    return tuple(
        rule._replace(ours=OURS + rule.ours, theirs=tuple(theirs + name for name in rule.theirs))
        for rule in rules
    )


def _ends(embedding: str, norm: str, head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """What is before and after the layers. A tied head is the embedding."""
    return (
        Rule(WORD_EMBEDDINGS, (embedding,)),
        Rule("decoder.final_layernorm.{kind}", (f"{norm}.{{kind}}",)),
        Rule(OUTPUT_WEIGHT, (head,), tied=False),
        Rule(OUTPUT_WEIGHT, (embedding,), tied=True),
    )


LLAMA_ENDS = _ends("model.embed_tokens.weight", "model.norm")
NORMS = (
    Rule("input_layernorm.{kind}", ("input_layernorm.{kind}",)),
    Rule("pre_mlp_layernorm.{kind}", ("post_attention_layernorm.{kind}",)),
)
ATTENTION = (
    Rule(
        "self_attention.linear_qkv.{kind}",
        ("self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}"),
        QUERY_KEY_VALUE,
    ),
    Rule("self_attention.linear_proj.{kind}", ("self_attn.o_proj.{kind}",)),
)
HEAD_NORMS = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
LATENT_ATTENTION = (
    Rule("self_attention.linear_q_proj.{kind}", ("self_attn.q_proj.{kind}",)),
    Rule("self_attention.linear_q_down_proj.{kind}", ("self_attn.q_a_proj.{kind}",)),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",)),
    Rule("self_attention.linear_q_up_proj.{kind}", ("self_attn.q_b_proj.{kind}",)),
    Rule("self_attention.linear_kv_down_proj.{kind}", ("self_attn.kv_a_proj_with_mqa.{kind}",)),
    Rule("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",)),
    Rule("self_attention.linear_kv_up_proj.{kind}", ("self_attn.kv_b_proj.{kind}",)),
    Rule("self_attention.linear_proj.{kind}", ("self_attn.o_proj.{kind}",)),
)


def _gated_mlp(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        Rule(
            f"{ours}.linear_fc1.{{kind}}",
            (f"{theirs}.gate_proj.{{kind}}", f"{theirs}.up_proj.{{kind}}"),
            GATE_UP,
        ),
        Rule(f"{ours}.linear_fc2.{{kind}}", (f"{theirs}.down_proj.{{kind}}",)),
    )


EXPERT = "mlp.experts.local_experts.{expert}"
# One tensor for all experts, as transformers 5 has them in memory: `[experts, gate and up, h]`.
PACKED_EXPERTS = (
    Rule(f"{EXPERT}.linear_fc1.weight", ("mlp.experts.gate_up_proj[{expert}]",)),
    Rule(f"{EXPERT}.linear_fc2.weight", ("mlp.experts.down_proj[{expert}]",)),
)
EXPERTS = (
    *_gated_mlp(EXPERT, "mlp.experts.{expert}"),
    Rule("mlp.router.weight", ("mlp.gate.weight",)),
    *PACKED_EXPERTS,
)
MIXTRAL_EXPERTS = (
    Rule(
        f"{EXPERT}.linear_fc1.weight",
        ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
        GATE_UP,
    ),
    Rule(f"{EXPERT}.linear_fc2.weight", ("block_sparse_moe.experts.{expert}.w2.weight",)),
    Rule("mlp.router.weight", ("block_sparse_moe.gate.weight",)),
    Rule("mlp.router.weight", ("mlp.gate.weight",)),
    *PACKED_EXPERTS,
)
DENSE = _gated_mlp("mlp", "mlp")

LLAMA_RULES = (*LLAMA_ENDS, *_in_layers(THEIRS, *NORMS, *ATTENTION, *DENSE))
LLAMA = Architecture(LLAMA_RULES, arguments.llama_arguments)

# By `model_type` of the configuration.
ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        (
            *_ends("transformer.wte.weight", "transformer.ln_f"),
            Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
            *_in_layers(
                "transformer.h.{layer}.",
                Rule("input_layernorm.{kind}", ("ln_1.{kind}",)),
                Rule(
                    "self_attention.linear_qkv.{kind}",
                    ("attn.c_attn.{kind}",),
                    FUSED_QUERY_KEY_VALUE,
                    transposed=True,
                ),
                Rule("self_attention.linear_proj.{kind}", ("attn.c_proj.{kind}",), transposed=True),
                Rule("pre_mlp_layernorm.{kind}", ("ln_2.{kind}",)),
                Rule("mlp.linear_fc1.{kind}", ("mlp.c_fc.{kind}",), transposed=True),
                Rule("mlp.linear_fc2.{kind}", ("mlp.c_proj.{kind}",), transposed=True),
            ),
        ),
        arguments.gpt2_arguments,
        prefix="transformer.",
        unused=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": replace(LLAMA, arguments=arguments.qwen2_arguments),
    "qwen3": Architecture((*LLAMA_RULES, *_in_layers(THEIRS, *HEAD_NORMS)), arguments.qwen3_arguments),
    "qwen3_moe": Architecture(
        (*LLAMA_RULES, *_in_layers(THEIRS, *HEAD_NORMS, *EXPERTS)), arguments.qwen3_moe_arguments
    ),
    "mixtral": Architecture(
        (*LLAMA_ENDS, *_in_layers(THEIRS, *NORMS, *ATTENTION, *MIXTRAL_EXPERTS)),
        arguments.mixtral_arguments,
    ),
    "deepseek_v3": Architecture(
        (
            *LLAMA_ENDS,
            *_in_layers(
                THEIRS,
                *NORMS,
                *LATENT_ATTENTION,
                *DENSE,
                *EXPERTS,
                Rule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
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
