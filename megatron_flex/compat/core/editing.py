"""What the native hook runs: a person's editing function with compat's save_ctx, kept apart for each hook."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from megatron_flex.compat.core.context import SaveContextReplay
from megatron_flex.compat.core.hook_function import HookFunction, SharedState
from megatron_flex.runtime import Session
from megatron_flex.runtime.hooks import EditingFunction, HookType

GRADIENT_HOOK_TYPES = ("full_backward", "full_backward_pre", "tensor")


def wrap_editing_function(
    hook: HookFunction,
    kind: HookType,
    state: SharedState,
    session: Session,
    rewind: SaveContextReplay,
    label: str,
    divisor: int,
) -> EditingFunction:
    """An editing function as the native hook calls it.

    What it gets is kept under `label`, hook by hook: the second hook at a place sees, and keeps, what the
    first has made. It does not look at the native save_ctx, which then need not be kept up.

    Args:
        hook: whose editing function it is.
        kind: how the hook is registered.
        state: what hooks share.
        session: the native session.
        rewind: save_ctx under recomputation.
        label: what its tensors are kept under.
        divisor: gradients are divided by this before, and multiplied after.
    """
    function, backward = hook.editing_function, kind in GRADIENT_HOOK_TYPES

    def edit(module: nn.Module | None, inputs: Tensor, _context: Any, _modules: Any) -> Tensor:
        __tracebackhide__ = True
        shown = inputs if divisor == 1 else inputs / divisor
        key = session.firing.record(label, shown, replays=not backward)
        replaying = not backward and session.clock.replaying()
        with rewind.replay(key) if replaying else rewind.first(key.step, key):
            made = function(None if kind == "tensor" else module, shown, state.save_ctx, state.modules)
        return made if divisor == 1 or not isinstance(made, Tensor) else made * divisor

    edit.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    with suppress(TypeError, ValueError):  # something built in that does not tell
        vars(edit)["__signature__"] = inspect.signature(function)
    return edit
