"""Selections pushed down: what of a tensor is wanted is taken from the shard, and only that is sent."""

from megatron_flex.runtime.selection import reduce
from megatron_flex.runtime.selection.entry_selection import Select
from megatron_flex.runtime.selecting.pushing import SelectionPlan, plan_selection
from megatron_flex.runtime.selection.reduce import INDICES, Reduction
from megatron_flex.runtime.selecting.wanted import CaptureSelection

__all__ = ["INDICES", "SelectionPlan", "Reduction", "Select", "CaptureSelection", "plan_selection", "reduce"]
