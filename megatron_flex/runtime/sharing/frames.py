"""One call of an editing function as shared values see it, and what that call changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.sharing.graphs import MicrobatchValues
from megatron_flex.runtime.sharing.values import ContextEntry, CallNamespace


class CallMode(Enum):
    """What a call of an editing function is part of."""

    PLAIN = auto()  # a forward pass that is differentiated
    FIRST = auto()  # the first pass of a region that will be recomputed
    REPLAY = auto()  # its recomputation
    APART = auto()  # no graph: evaluation, and hooks on gradients


@dataclass(slots=True)
class CallFrame:
    """One call of an editing function."""

    hook: HookFunction
    index: int
    key: Key
    mode: CallMode
    micro: MicrobatchValues
    values: CallNamespace
    run: CallNamespace


@dataclass(slots=True)
class CallChanges:
    """What one call has changed."""

    written: dict[str, ContextEntry] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    run: dict[str, Any] = field(default_factory=dict)
    run_removed: set[str] = field(default_factory=set)
