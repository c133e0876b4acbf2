"""Costs: what hooks send, by which link, and what memory they take, told from layouts alone."""

from megatron_flex.costs.charging import Charge, Sent, charge
from megatron_flex.costs.hooking import PlannedHook, edit_said, read_said
from megatron_flex.costs.links import Links, Placement, Traffic
from megatron_flex.costs.table import Cost, Costs, RankCost, costs_of

__all__ = [
    "Charge",
    "Cost",
    "Costs",
    "Links",
    "Placement",
    "PlannedHook",
    "RankCost",
    "Sent",
    "Traffic",
    "charge",
    "costs_of",
    "edit_said",
    "read_said",
]
