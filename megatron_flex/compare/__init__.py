"""Two dumps compared: where they first differ by more than round-off, and what the error looks like."""

from megatron_flex.compare.comparison import Comparison, ReplicaMismatch, Row, Worst
from megatron_flex.compare.running import compare

__all__ = ["Comparison", "ReplicaMismatch", "Row", "Worst", "compare"]
