"""Likely causes of the first difference: hypotheses, tried on the tensors and reported if they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from megatron_flex.alignment import linear_causes, norm_causes, rotary_causes, routing_causes, tensor_causes
from megatron_flex.alignment.evidence import Evidence

Hypothesis = Callable[[Evidence], str]
# Where a hypothesis may hold (globs over the first site that differs), the most specific first.
HYPOTHESES: tuple[tuple[tuple[str, ...], Hypothesis], ...] = (
    (("embedding.word_embeddings:output",), tensor_causes.shifted_vocabulary),
    (("embedding:output",), tensor_causes.wrong_positions),
    (("embedding*:output",), tensor_causes.scaled_embeddings),
    (("*.linear_qkv:[qkv]", "*.self_attention:[qkv]"), linear_causes.swapped_projections),
    (("*.linear_qkv:[qkv]",), linear_causes.concatenated_projections),
    (("*.linear_qkv:[qkv]", "*_proj:output"), linear_causes.rotary_row_order),
    (("*_layernorm:output", "*_norm:output"), norm_causes.other_epsilon),
    (("*_layernorm:output", "*_norm:output"), norm_causes.other_weight),
    (("*_layernorm:output", "*_norm:output"), norm_causes.other_form),
    (("*.core_attention:[qk]",), rotary_causes.no_rotation),
    (("*.core_attention:[qk]",), rotary_causes.interleaved_rotation),
    (("*.core_attention:[qk]",), rotary_causes.other_frequencies),
    (("*.core_attention:scores",), tensor_causes.other_softmax_scale),
    (("*.core_attention:probs",), tensor_causes.other_mask),
    (("*.linear_fc1:gate", "*.linear_fc1:up", "*.linear_fc1:output"), linear_causes.swapped_gate),
    (("*.linear_fc2:input",), linear_causes.other_activation),
    (("*.local_experts.*",), routing_causes.other_expert),
    (("*.router:logits",), routing_causes.router_order),
    (("*.router:probs", "*.experts:weights"), routing_causes.missing_router_scaling),
    (("*.router:probs", "*.router:map", "*.experts:*"), routing_causes.missing_expert_bias),
    (("*.router:probs", "*.experts:weights"), routing_causes.other_normalization),
    (("*.mlp:output",), routing_causes.missing_shared_experts),
    (("output_layer:output",), linear_causes.untied_output),
    (("*:q", "*:k", "*:v", "*:output", "*:gate", "*:up"), linear_causes.other_layer),
    (("*:output",), linear_causes.input_order),
)
# Tried anywhere, and only where none of the above holds: they follow from some of them.
GENERAL: tuple[Hypothesis, ...] = (
    tensor_causes.missing_bias,
    tensor_causes.other_order,
    tensor_causes.constant_factor,
    tensor_causes.bf16_values,
)


def find_causes(evidence: Evidence) -> list[str]:
    """The hypotheses that the tensors confirm, in words, the most specific first.

    Args:
        evidence: the tensors around the first difference.
    """
    return list(dict.fromkeys(_confirmed(evidence))) or [cause for h in GENERAL if (cause := h(evidence))]


def _confirmed(evidence: Evidence) -> Iterator[str]:
    for patterns, hypothesis in HYPOTHESES:
        if any(fnmatchcase(evidence.site, p) for p in patterns) and (cause := hypothesis(evidence)):
            yield cause
