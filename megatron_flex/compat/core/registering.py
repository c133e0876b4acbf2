"""Hooks go in: each becomes a native one, and its captures find their way to `output_ptr`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from megatron_flex.compat.core.context import SaveContextReplay
from megatron_flex.compat.core.delivery import CaptureDelivery, capture_name
from megatron_flex.compat.core.editing import GRADIENT_HOOK_TYPES, wrap_editing_function
from megatron_flex.compat.core.groups import HookGroups
from megatron_flex.compat.core.hook_function import HookFunction, SharedState
from megatron_flex.compat.core.names import ModuleNames
from megatron_flex.errors import HookError
from megatron_flex.model import FlexModel as Native
from megatron_flex.runtime import HookFunction as NativeHook
from megatron_flex.runtime.hooks import POINT_OF_TYPE, HookType, check_signature


class HookRegistrationMethods:
    """What FlexModel does to register hooks; each HookFunction is registered once."""

    _flex: Native
    _names: ModuleNames
    _shared_state: SharedState
    _hook_fn_group_manager: HookGroups
    _delivery: CaptureDelivery
    _rewind: SaveContextReplay
    _divisor: int
    _finalizer: weakref.finalize[Any, Any]

    def register_forward_hook(self, hook_function: HookFunction) -> None:
        """See, and perhaps edit, what a module returns."""
        self._register(hook_function, "forward")

    def register_forward_pre_hook(self, hook_function: HookFunction) -> None:
        """See, and perhaps edit, what a module gets."""
        self._register(hook_function, "forward_pre")

    def register_full_backward_hook(self, hook_function: HookFunction) -> None:
        """See, and perhaps edit, the gradient of what a module gets."""
        self._register(hook_function, "full_backward")

    def register_full_backward_pre_hook(self, hook_function: HookFunction) -> None:
        """See, and perhaps edit, the gradient of what a module returns."""
        self._register(hook_function, "full_backward_pre")

    def register_hook(self, hook_function: HookFunction) -> None:
        """See, and perhaps edit, the gradient of a parameter, named by `module_name`.

        It is each data parallel replica's own; what is kept is the first replica's.
        """
        self._register(hook_function, "tensor")

    def _check_kind(self, kind: str) -> None:
        if kind not in POINT_OF_TYPE:
            raise HookError(f"hook_type {kind!r} is none of {', '.join(POINT_OF_TYPE)}")

    def _register(self, hook: HookFunction, kind: HookType) -> None:
        if not isinstance(hook, HookFunction):
            raise HookError(f"a {type(hook).__name__} cannot be registered; make a compat HookFunction")
        if hook._shared_state is not None:
            raise HookError(f"the hook on {hook.module_name!r} is registered already; make another one")
        if not self._finalizer.alive:
            raise HookError("restore() has ended this FlexModel; make another one")
        session = self._flex.session
        divisor = self._divisor if kind in GRADIENT_HOOK_TYPES and kind != "tensor" else 1
        name, places = self._places(hook, kind)
        expected = self._expected(hook, kind, places)
        check_signature(hook.editing_function)
        native = NativeHook(name, expected, None, hook.unpack_idx, hook_type=kind)
        number = len(self._hook_fn_group_manager.native)
        label = f"hook {number}: {hook.module_name}"
        alone = not hook.edits and not any(self._edited(n, kind) for n in places)
        if not alone:
            native.save, native.records = False, True
            native.editing_function = wrap_editing_function(
                hook, kind, self._shared_state, session, self._rewind, label, divisor
            )
        session.add(native)
        for place in session.registry.entries[-1].names if alone else (label,):
            captured = capture_name(place, kind) if alone else place
            self._delivery.add(captured, hook, native, kind, divisor if alone else 1)
        hook._shared_state, hook._hook_type = self._shared_state, kind
        self._hook_fn_group_manager.registered(hook, native)

    def _places(self, hook: HookFunction, kind: HookType) -> tuple[str, list[str]]:
        """The global name of what a hook is on, and those of the sites that this means."""
        name, session = self._names.resolve(hook.module_name), self._flex.session
        if kind == "tensor" and name in session.survey.sites:
            return name, [name]
        return name, [s.name for s in session.sites.match(name, POINT_OF_TYPE[kind])]

    def _edited(self, name: str, kind: HookType) -> bool:
        """Whether a hook before this one edits there: what this one sees is not what the native one keeps."""
        backward = kind in GRADIENT_HOOK_TYPES
        return any(
            name in e.names and e.hook.backward == backward and e.hook.editing_function is not None
            for e in self._flex.session.registry.entries
        )

    def _expected(
        self, hook: HookFunction, kind: HookType, places: Sequence[str]
    ) -> tuple[int | None, ...] | None:
        """The whole's shape as far as it is to be compared: people wrote their own replica's batch."""
        want = hook.expected_shape
        if want is None or all(n is None for n in want):
            return None
        session = self._flex.session
        if session.mesh["dp"].size == 1:
            return want
        layouts = [session.sites[n].layout for n in places if n in session.sites]
        batches = {i for layout in layouts for i, d in enumerate(layout.dims) if d.name == "b"}
        if kind != "tensor" and any(session.sites[n].inferred for n in places):
            batches = {0}
        return tuple(None if i in batches else n for i, n in enumerate(want))
