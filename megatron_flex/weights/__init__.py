"""Digests of full parameters: whether two sets of weights, in any layouts, are the same."""

from megatron_flex.weights.difference_causes import WeightDifference
from megatron_flex.weights.parameter_digest import ParameterDigest
from megatron_flex.weights.weights_comparison import WeightsComparison, compare_weights
from megatron_flex.weights.weights_digest import WeightsDigest, digest_run, digest_weights, read_digest

__all__ = [
    "ParameterDigest",
    "WeightDifference",
    "WeightsComparison",
    "WeightsDigest",
    "compare_weights",
    "digest_run",
    "digest_weights",
    "read_digest",
]
