"""How each framework lays out tensors, where hooks can go, and how to follow its schedule.

What is here is what an adapter for another framework is made of: docs/adapters.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron_flex.adapters.base import (
    Adapter,
    Architecture,
    Listener,
    LocalGradient,
    ParameterSite,
    Part,
    Undo,
    replaying,
)
from megatron_flex.adapters.composing import compose
from megatron_flex.adapters.detection import Detection
from megatron_flex.adapters.driving import Driving
from megatron_flex.adapters.parameter_storage import Keeping, Kept
from megatron_flex.adapters.leaves import AnyInput, AnyOutput
from megatron_flex.adapters.modules import Modules
from megatron_flex.adapters.pipelining import opened
from megatron_flex.adapters.plain import mesh_of
from megatron_flex.adapters.ranks import axis_of
from megatron_flex.adapters.adapter_registry import Finder, Found, register_adapter
from megatron_flex.adapters.rules import Point, Rule, Rules
from megatron_flex.adapters.searching import find_framework
from megatron_flex.adapters.spread import WHOLE, Spread, Unknown
from megatron_flex.adapters.taps import intercept
from megatron_flex.adapters.writers import training_writers

__all__ = [
    "WHOLE",
    "Adapter",
    "AnyInput",
    "AnyOutput",
    "Architecture",
    "Detection",
    "Driving",
    "Finder",
    "Found",
    "Keeping",
    "Kept",
    "Listener",
    "LocalGradient",
    "Modules",
    "ParameterSite",
    "Part",
    "Point",
    "Rule",
    "Rules",
    "Spread",
    "Undo",
    "Unknown",
    "axis_of",
    "compose",
    "detect",
    "intercept",
    "mesh_of",
    "opened",
    "register_adapter",
    "replaying",
    "training_writers",
]


def detect(
    chunks: list[nn.Module], sizes: Mapping[str, int | None] | None = None, process_group: Any = None
) -> Adapter:
    """Find the framework that a model was built with; a module of none is taken as a plain one.

    Args:
        chunks: the model, or its virtual pipeline chunks; bare or wrapped.
        sizes: what a person says of `tp`, `pp` and `dp`. A framework's must agree; of a plain module they
            are the mesh.
        process_group: the ranks of a plain module; the default group if None.

    Raises:
        FlexError: sizes contradict, the module can be hooked neither as a framework's nor as a plain one, two
            frameworks claim it, or one is of a version that no test has run on.
    """
    return find_framework(chunks, sizes or {}, process_group).make()
