"""Selections pushed down: what of a tensor is wanted is taken from the shard, and only that is sent."""

from megatron_flex.runtime.selecting import reduce
from megatron_flex.runtime.selecting.choosing import Select
from megatron_flex.runtime.selecting.pushing import Plan, push
from megatron_flex.runtime.selecting.reduce import INDICES, Reduction
from megatron_flex.runtime.selecting.wanted import Wanted

__all__ = ["INDICES", "Plan", "Reduction", "Select", "Wanted", "push", "reduce"]
