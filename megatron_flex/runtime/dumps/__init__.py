"""Dumps at work: what is taken on the way of a tensor, when an iteration begins and ends, who writes."""

from megatron_flex.runtime.dumps.describing import manifest_of
from megatron_flex.runtime.dumps.dumped import Chosen, Dumped
from megatron_flex.runtime.dumps.dumping import Dumping
from megatron_flex.runtime.dumps.parameters import chosen_parameters

__all__ = ["Chosen", "Dumped", "Dumping", "chosen_parameters", "manifest_of"]
