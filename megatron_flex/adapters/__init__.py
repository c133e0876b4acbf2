"""How each framework lays out tensors, where hooks can go, and how to follow its schedule."""

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
    Undo,
    replaying,
)
from megatron_flex.adapters.pipelining import opened
from megatron_flex.adapters.registry import find

__all__ = [
    "Adapter",
    "Architecture",
    "Listener",
    "LocalGradient",
    "ParameterSite",
    "Undo",
    "detect",
    "opened",
    "replaying",
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
        FlexError: sizes contradict, or the module can be hooked neither as a framework's nor as a plain one.
    """
    return find(chunks, sizes or {}, process_group).make()
