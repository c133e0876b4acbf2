"""Selections and reductions applied to the local shard, so that only their result is sent."""

from megatron_flex.runtime.selection import reduce
from megatron_flex.runtime.selection.entry_selection import Select
from megatron_flex.runtime.selection.reduce import INDICES, Reduction
from megatron_flex.runtime.selection.selection_plan import CaptureSelection, SelectionPlan, plan_selection

__all__ = ["INDICES", "CaptureSelection", "Reduction", "Select", "SelectionPlan", "plan_selection", "reduce"]
