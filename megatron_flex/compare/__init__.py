"""Comparison of two dumps: the first difference above round-off, and the pattern of the error."""

from megatron_flex.compare.comparer import compare
from megatron_flex.compare.comparison import Comparison, Power, ReplicaMismatch, Row, Worst
from megatron_flex.compare.isolation import load_parameters

__all__ = ["Comparison", "Power", "ReplicaMismatch", "Row", "Worst", "compare", "load_parameters"]
