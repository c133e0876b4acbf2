"""HookFunction with the interface of 2023, and groups of hooks.

A hook has a module's name, a shape, an editing function and the index of a tensor in the output. Its groups
are the groups of the native hooks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron_flex.compat.distributed.strategies import (
    BaseOffloadStrategy,
    CPUPinnedMemoryOffloadStrategy,
)
from megatron_flex.errors import HookError
from megatron_flex.model import FlexModel as Native
from megatron_flex.runtime import HookFunction as NativeHook
from megatron_flex.runtime.hook_groups import ALL_GROUPS, check_groups
from megatron_flex.runtime.hooks import EditingFunction


def default_editing_function(
    current_module: nn.Module | None, inputs: Tensor, save_ctx: Namespace, modules: nn.ModuleDict
) -> Tensor:
    """Return the tensor unchanged: the editing function of a HookFunction without one."""
    return inputs


class SaveContext(Namespace):
    """`save_ctx`: a Namespace that knows which names a call of an editing function may have changed.

    Attributes:
        touched: the names assigned, and those read whose list, dict or set may have been changed in place.
    """

    __slots__ = ("touched",)
    touched: set[str]

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "touched", set())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.touched.add(name)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, (list, dict, set)) and name not in ("__dict__", "touched"):
            self.touched.add(name)
        return value


class SharedState(NamedTuple):
    """What all hooks of one FlexModel share: the user's dict, `save_ctx`, and the trainable modules."""

    output_ptr: dict[str, list[Tensor]]
    save_ctx: SaveContext
    modules: nn.ModuleDict


class HookFunction:
    """A hook on one module, or on one parameter's gradient. It can be registered once.

    Args:
        module_name: the name of the module or parameter, with layers counted over the full model; prefixes of
            wrappers (`module.`) are allowed. The name is the key in `output_ptr`.
        expected_shape: the shape of the full tensor, None for a dim of any length. Only validated. The batch
            dim may be that of one data parallel rank or of all.
        editing_function: `(current_module, inputs, save_ctx, modules) -> Tensor`, called with positional
            arguments on the full tensor; it returns a tensor of the same shape. `current_module` is None for
            `register_hook`.
        unpack_idx: the index of the tensor in an output with several, depth first; None and numbers are not
            counted.

    Attributes:
        offload_strategy: the storage of captures; may be set until the first tensor is captured.
    """

    def __init__(
        self,
        module_name: str,
        expected_shape: Sequence[int | None] | None = None,
        editing_function: EditingFunction | None = None,
        unpack_idx: int = 0,
    ) -> None:
        if not isinstance(module_name, str) or any(c in module_name for c in "*?["):
            raise HookError(
                f"module_name {module_name!r} must be one module's name; create_hook_group() makes a hook "
                "for each of many"
            )
        self.module_name = module_name
        self.expected_shape = None if expected_shape is None else tuple(expected_shape)
        self.editing_function: EditingFunction = editing_function or default_editing_function
        self.unpack_idx = unpack_idx
        self.offload_strategy: BaseOffloadStrategy | type[BaseOffloadStrategy] = (
            CPUPinnedMemoryOffloadStrategy
        )
        self._shared_state: SharedState | None = None
        self._native: NativeHook | None = None
        self._groups: set[str] = set()  # until it is registered; the native hook's from then on

    def keep(self, tensor: Tensor) -> None:
        """Pass one captured tensor to the offload strategy."""
        if isinstance(self.offload_strategy, type):
            assert self._shared_state is not None
            self.offload_strategy = self.offload_strategy.initialize(
                self.module_name, self._shared_state.output_ptr
            )
        self.offload_strategy.execute(tensor)


HookSelection = list[HookFunction] | HookFunction | str


class HookGroups:
    """The groups of hooks. A group without members does not exist.

    Attributes:
        registered: the registered hooks, in the order of registration.
    """

    def __init__(self, flex: Native, state: SharedState) -> None:
        self._flex, self._state = flex, state
        self.registered: list[HookFunction] = []
        self._waiting: dict[HookFunction, None] = {}  # in groups, and not registered yet

    def add(self, hook: HookFunction) -> None:
        self._waiting.pop(hook, None)
        self.registered.append(hook)

    def groups_of(self, hook: HookFunction) -> set[str]:
        return set(hook._groups) if hook._native is None else {ALL_GROUPS, *hook._native.groups}

    @property
    def hook_fn_to_groups_map(self) -> dict[HookFunction, set[str]]:
        """The groups of each hook, in the order of registration."""
        return {hook: self.groups_of(hook) for hook in (*self.registered, *self._waiting)}

    @property
    def groups(self) -> set[str]:
        return set().union(*self.hook_fn_to_groups_map.values())

    def members(self, group: str) -> list[HookFunction]:
        return [hook for hook, groups in self.hook_fn_to_groups_map.items() if group in groups]

    def update(self, which: HookSelection, group: str) -> None:
        """Add hooks to a group; errors as in `update_hook_groups`."""
        hooks = self._select(which)
        groups = check_groups([group]) if group != ALL_GROUPS else set()
        for hook in hooks:
            if hook._native is not None:
                self._flex.add_to_groups(hook._native, *groups)
            else:
                hook._groups |= groups
                self._waiting[hook] = None

    def remove(self, which: HookSelection, group: str) -> None:
        """Remove hooks from a group; errors as in `remove_hook_groups`."""
        hooks = self._select(which)
        check_groups([group])
        outside = [h for h in hooks if group not in self.groups_of(h)]
        if isinstance(which, str) and len(outside) < len(hooks):
            hooks, outside = [h for h in hooks if h not in outside], []
        if outside:
            names, members = (", ".join(h.module_name for h in hs) for hs in (outside, self.members(group)))
            raise HookError(
                f"{names}: not in the group {group!r}, nothing is removed; its hooks are on "
                f"{members or 'nothing'}"
            )
        for hook in hooks:
            if hook._native is not None:
                self._flex.remove_from_groups(hook._native, group)
            else:
                hook._groups.discard(group)

    def _select(self, which: HookSelection) -> list[HookFunction]:
        if isinstance(which, str):
            hooks = [h for h in self.registered if which in h.module_name]
            if not hooks:
                raise HookError(f"no registered hook has {which!r} in its module_name; register hooks first")
            return hooks
        hooks = list(which) if isinstance(which, Iterable) else [which]
        for hook in hooks:
            if not isinstance(hook, HookFunction):
                raise HookError(
                    f"{type(hook).__name__} cannot be in a group; give HookFunctions, one or a list, or a "
                    "text that is in their module_names"
                )
            if hook._shared_state is not None and hook._shared_state is not self._state:
                raise HookError(
                    f"the hook on {hook.module_name!r} belongs to another FlexModel; use that one"
                )
        return hooks
