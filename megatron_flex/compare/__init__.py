"""Comparison of two dumps: the first difference above round-off, and the pattern of the error."""

from megatron_flex.compare.comparer import compare
from megatron_flex.compare.comparison import Comparison, ReplicaMismatch, Row, Worst

__all__ = ["Comparison", "ReplicaMismatch", "Row", "Worst", "compare"]
