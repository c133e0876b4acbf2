"""The connection between a hook of the 2023 interface and the native hook that implements it.

The user's editing function runs with compat's save_ctx, which recomputation sees in the same state as the
first pass; captures are appended to the user's dict, by hook and in order.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_flex.collectives import broadcast_items
from megatron_flex.compat.core.hook_function import HookFunction, SaveContext, SharedState
from megatron_flex.runtime import HookFunction as NativeHook
from megatron_flex.runtime import Key, Session
from megatron_flex.runtime.context.context_scopes import ContextScopes
from megatron_flex.runtime.edit_traits import EditTraits
from megatron_flex.runtime.function_analysis import uses_context
from megatron_flex.runtime.hooks import EditingFunction, HookType
from megatron_flex.sites import GRADIENT_SUFFIX


class SaveContextReplay:
    """Records, during a step, the content of save_ctx before each call of an editing function.

    Values that a replay writes are discarded after the replay. Later calls in the same replay see them
    instead of the first pass's values, so that gradients flow through them. Lists, dicts and sets are copied
    one level deep.
    """

    def __init__(self, context: SaveContext) -> None:
        self.context = context
        self._step = -1
        self._before: dict[Hashable, dict[str, Any]] = {}
        self._wrote: dict[Hashable, dict[str, Any]] = {}
        self._instead: dict[int, tuple[Any, Any]] = {}  # by id: the first pass's value, and the replay's

    @contextmanager
    def first(self, step: int, key: Hashable) -> Iterator[None]:
        """The first pass through a hook point."""
        if step != self._step:
            self._step = step
            self._before.clear()
            self._wrote.clear()
            self._instead.clear()
        before = _copy_containers(vars(self.context))
        self._before[key] = before
        yield
        now = vars(self.context)
        self._wrote[key] = {n: v for n, v in now.items() if n not in before or before[n] is not v}

    @contextmanager
    def replay(self, key: Hashable) -> Iterator[None]:
        """The pass through the same hook point in recomputation."""
        if key not in self._before:
            yield
            return
        live = vars(self.context).copy()
        self._set({n: self._now(v) for n, v in _copy_containers(self._before[key]).items()})
        try:
            yield
            for name, old in self._wrote.get(key, {}).items():
                if hasattr(self.context, name):
                    self._instead[id(old)] = (old, getattr(self.context, name))
        finally:
            self._set(live)

    def _now(self, value: Any) -> Any:
        old, new = self._instead.get(id(value), (None, None))
        return new if old is value and old is not None else value

    def _set(self, values: dict[str, Any]) -> None:
        vars(self.context).clear()
        vars(self.context).update(values)


def _copy_containers(values: dict[str, Any]) -> dict[str, Any]:
    return {n: v.copy() if isinstance(v, (list, dict, set)) else v for n, v in values.items()}


@contextmanager
def share_between_stages(context: SaveContext, scopes: ContextScopes) -> Iterator[None]:
    """Let a call of an editing function see what functions on other virtual stages saved for the microbatch.

    These values are put into save_ctx before the call; what the call assigns, changes in a list, dict or set,
    or deletes there is passed on. Values of earlier microbatches stay on the stage that has them.

    Args:
        context: the save_ctx of one FlexModel.
        scopes: the native values, which are sent from stage to stage; inside a call.
    """
    assert scopes.frame is not None
    shared, attributes = scopes.frame.values, vars(context)
    attributes.update(shared)
    before = set(attributes)
    context.touched.clear()
    yield
    for name in before - attributes.keys():
        if name in shared:
            del shared[name]
    for name in attributes.keys() & (context.touched | (attributes.keys() - before)):
        shared[name] = attributes[name]


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
    """An editing function with the signature of native hooks.

    Its input is captured under `label`, for each hook: the second hook at a hook point sees, and captures,
    the result of the first. The native save_ctx only brings values from one pipeline stage to another.

    Args:
        hook: the hook with the editing function.
        kind: the kind of its registration.
        state: the shared state of hooks.
        session: the native session.
        rewind: the replay of save_ctx under recomputation.
        label: the name of the captures.
        divisor: gradients are divided by this before the edit, and multiplied by it after the edit.
    """
    function, backward = hook.editing_function, kind in GRADIENT_HOOK_TYPES
    uses = session.mesh["pp"].size > 1 and uses_context(function)

    def edit(module: nn.Module | None, inputs: Tensor, _context: Any, _modules: Any) -> Tensor:
        __tracebackhide__ = True
        shown = inputs if divisor == 1 else inputs / divisor
        key = session.dispatcher.captures.record_inner_tensor(label, shown, replays=not backward)
        replaying = not backward and session.clock.replaying()
        scopes, with_stages = session.editing.scopes, session.context_relay.joins_stages
        share = share_between_stages(state.save_ctx, scopes) if uses and with_stages else nullcontext()
        with rewind.replay(key) if replaying else rewind.first(key.step, key), share:
            edited = function(None if kind == "tensor" else module, shown, state.save_ctx, state.modules)
        return edited if divisor == 1 or not isinstance(edited, Tensor) else edited * divisor

    vars(edit)["edit_traits"] = EditTraits(user_functions=(function,), uses_context=uses)
    edit.__qualname__ = getattr(function, "__qualname__", type(function).__name__)
    with suppress(TypeError, ValueError):  # a built-in function without a signature
        vars(edit)["__signature__"] = inspect.signature(function)
    return edit


logger = logging.getLogger("megatron_flex.compat")
# The order of several hooks under one name, in a forward and in a backward pass.
HOOK_TYPE_ORDER: tuple[HookType, ...] = (
    "forward_pre",
    "forward",
    "full_backward_pre",
    "full_backward",
    "tensor",
)


class CaptureRecipient(NamedTuple):
    """The recipient of captures: a hook, and its number, as hooks at one hook point run in that order.

    Gradients that are not divided yet are divided by `divisor`.
    """

    hook: HookFunction
    native: NativeHook
    number: int
    divisor: int

    def order(self, key: Key) -> tuple[bool, int, int, int, int]:
        """The place of a capture in the output."""
        kind = self.native.hook_type
        return self.native.backward, key.microbatch, key.call, HOOK_TYPE_ORDER.index(kind), self.number


class CaptureDelivery:
    """Moves native captures to the hooks' offload strategies whenever captures have arrived.

    Attributes:
        recipients: by the name of a capture.
    """

    def __init__(self, session: Session, everywhere: bool) -> None:
        self.session, self.everywhere = session, everywhere
        self.recipients: dict[str, list[CaptureRecipient]] = {}
        session.delivered = self.deliver

    def deliver(self) -> None:
        """Move the captures that have arrived. Collective over the mesh if they go to every rank."""
        captures = self.session.captures
        is_leader = self.session.is_leader
        items = [
            (k, t) for n in captures if is_leader for k, t in zip(captures[n].keys, captures[n], strict=True)
        ]
        captures.clear()
        if self.everywhere:
            items = broadcast_items(items, self.session.mesh)
        active = {entry.hook for entry in self.session.registry.active}
        arrived = [(r, k, t) for k, t in items for r in self.recipients.get(k.site, ()) if r.native in active]
        uses = Counter(id(t) for _, _, t in arrived)
        for reader, _, tensor in sorted(arrived, key=lambda item: item[0].order(item[1])):
            divided = tensor if reader.divisor == 1 else tensor / reader.divisor
            delivered = divided.clone() if divided is tensor and uses[id(tensor)] > 1 else divided
            logger.debug("%s: a tensor of shape %s", reader.hook.module_name, tuple(delivered.shape))
            reader.hook.keep(delivered)


def capture_name(name: str, kind: HookType) -> str:
    """The name of a native hook's captures at a site or parameter."""
    return name + GRADIENT_SUFFIX if kind in GRADIENT_HOOK_TYPES else name
