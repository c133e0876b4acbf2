"""Costs: what hooks send, by which link, and what memory they take, told from layouts alone."""

from megatron_flex.costs.charging import PassEstimate, AddedCollective, estimate_pass
from megatron_flex.costs.hook_notation import PlannedHook, parse_edit_hook, parse_read_hook
from megatron_flex.costs.links import Links, Placement, Traffic
from megatron_flex.costs.run_estimate import HookEstimate, RunEstimate, RankEstimate, estimate_run

__all__ = [
    "PassEstimate",
    "HookEstimate",
    "RunEstimate",
    "Links",
    "Placement",
    "PlannedHook",
    "RankEstimate",
    "AddedCollective",
    "Traffic",
    "estimate_pass",
    "estimate_run",
    "parse_edit_hook",
    "parse_read_hook",
]
