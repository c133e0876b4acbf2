"""Conversion of weights between Hugging Face and Megatron: a table of architectures, and its execution."""

from megatron_flex.conversion.architecture_arguments import MegatronArguments
from megatron_flex.conversion.architectures import ARCHITECTURES, REFUSED, HuggingFaceArchitecture, WeightRule
from megatron_flex.conversion.rearrangement import (
    FUSED_QUERY_KEY_VALUE,
    GATE_UP,
    QUERY_KEY_VALUE,
    SAME,
    Heads,
    Join,
)
from megatron_flex.conversion.weights import LoadedWeights, config_from_hf, load_hf, place_full_tensors, to_hf

__all__ = [
    "ARCHITECTURES",
    "FUSED_QUERY_KEY_VALUE",
    "GATE_UP",
    "QUERY_KEY_VALUE",
    "REFUSED",
    "SAME",
    "Heads",
    "HuggingFaceArchitecture",
    "Join",
    "LoadedWeights",
    "MegatronArguments",
    "WeightRule",
    "config_from_hf",
    "load_hf",
    "place_full_tensors",
    "to_hf",
]
