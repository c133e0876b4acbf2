"""Estimates: what hooks send, over which link, and the memory they use, from layouts alone."""

from megatron_flex.estimate.hook_estimate import (
    AddedCollective,
    Links,
    PassEstimate,
    Placement,
    Traffic,
    estimate_pass,
)
from megatron_flex.estimate.hook_notation import HookSpec, parse_edit_hook, parse_read_hook
from megatron_flex.estimate.run_estimate import HookEstimate, RankEstimate, RunEstimate, estimate_run

__all__ = [
    "AddedCollective",
    "HookEstimate",
    "HookSpec",
    "Links",
    "PassEstimate",
    "Placement",
    "RankEstimate",
    "RunEstimate",
    "Traffic",
    "estimate_pass",
    "estimate_run",
    "parse_edit_hook",
    "parse_read_hook",
]
