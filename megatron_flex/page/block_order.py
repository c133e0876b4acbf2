"""The order in which a page has the sites of a model: that of execution, block by block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_flex.sites import Site

LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=[.:])")
# A norm that the spec merges into the next linear has no module where it is executed; its name says where.
NORM_BEFORE = re.compile(r"pre_(.+)_layernorm")
EXECUTED_NEXT = {"mlp": "mlp", "cross_attn": "cross_attention"}
EXPERT_AXES = frozenset(("ep", "etp", "edp"))


@dataclass(slots=True)
class _Block:
    """A module: its own sites, and the modules in it."""

    sites: list[Site] = field(default_factory=list)
    children: dict[str, _Block] = field(default_factory=dict)


def execution_order(sites: Sequence[Site]) -> list[Site]:
    """Sites in the order of execution, as far as their names have it.

    Adapters list the sites of a module before those inside it. Here the output of a stack of layers follows
    its layers, and the norm before a module directly precedes that module.

    Args:
        sites: in model order.
    """
    root = _Block()
    for site in sites:
        at = root
        for step in site.module.split("."):
            at = at.children.setdefault(step, _Block())
        at.sites.append(site)
    out: list[Site] = []
    left: list[_Block | list[Site]] = [root]  # no recursion: a dump's names may be of any depth
    while left:
        block = left.pop()
        if isinstance(block, list):
            out += block
            continue
        ends = [s for s in block.sites if s.point == "output"] if _holds_layers(block) else []
        out += [s for s in block.sites if s not in ends]
        left.append(ends)
        left += [block.children[name] for name in reversed(_executed(list(block.children)))]
    return out


def _holds_layers(block: _Block) -> bool:
    """Whether a module is a stack: it has a list of numbered modules."""
    return any(name.isdigit() for child in block.children.values() for name in child.children)


def _executed(names: list[str]) -> list[str]:
    """Modules of one module in the order of execution."""
    for norm in [n for n in names if NORM_BEFORE.fullmatch(n)]:
        matched = NORM_BEFORE.fullmatch(norm)
        following = EXECUTED_NEXT.get(matched[1], "") if matched is not None else ""
        if following in names:
            names.remove(norm)
            names.insert(names.index(following), norm)
    return names


def has_experts(sites: Sequence[Site]) -> bool:
    """Whether a model has experts: a module of that name, or a tensor that is cut over their axes."""
    return any(
        "experts" in s.module.split(".") or any(c.axis in EXPERT_AXES for d in s.layout.dims for c in d.cuts)
        for s in sites
    )
