"""HookFunction with the interface of 2023, and groups of hooks.

A hook has a module's name, a shape, an editing function and the index of a tensor in the output. Its groups
are the groups of the native hooks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_flex.compat.distributed.strategies import (
    BaseOffloadStrategy,
    CPUPinnedMemoryOffloadStrategy,
)
from megatron_flex.errors import HookError
from megatron_flex.model import FlexModel as Native
from megatron_flex.runtime import HookFunction as NativeHook
from megatron_flex.runtime.hook_groups import ALL_GROUPS, check_groups
from megatron_flex.runtime.hooks import EditingFunction, HookType

if TYPE_CHECKING:
    from megatron_flex.compat.distributed.distributed_state import ParallelState


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


@dataclass(frozen=True)
class SharedState:
    """The state that all hooks of one FlexModel share.

    Attributes:
        fmps: ranks and groups.
        output_ptr: the user's dict.
        save_ctx: the state that editing functions keep between calls.
        modules: the trainable modules.
    """

    fmps: ParallelState
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
        self._hook_type: HookType | None = None

    @property
    def edits(self) -> bool:
        """Whether the hook has an editing function of the user's."""
        return self.editing_function is not default_editing_function

    def keep(self, tensor: Tensor, output_ptr: dict[str, list[Tensor]]) -> None:
        """Pass one captured tensor to the offload strategy."""
        if isinstance(self.offload_strategy, type):
            self.offload_strategy = self.offload_strategy.initialize(self.module_name, output_ptr)
        self.offload_strategy.execute(tensor)


HookSelection = list[HookFunction] | HookFunction | str


class HookGroups:
    """The groups of hooks. A group without members does not exist.

    Attributes:
        native: the native hook of each registered hook, in the order of registration.
    """

    def __init__(self, flex: Native) -> None:
        self._flex = flex
        self.native: dict[HookFunction, NativeHook] = {}
        self._waiting: dict[HookFunction, set[str]] = {}  # of hooks that are not registered yet

    def registered(self, hook: HookFunction, native: NativeHook) -> None:
        """Add a registered hook, with the groups that were assigned to it before."""
        self.native[hook] = native
        groups = self._waiting.pop(hook, set())
        if groups:
            self._flex.add_to_groups(native, *groups)

    def of(self, hook: HookFunction) -> set[str]:
        """The groups of a hook."""
        if hook in self.native:
            return {ALL_GROUPS, *self.native[hook].groups}
        return set(self._waiting.get(hook, ()))

    @property
    def hook_fn_to_groups_map(self) -> dict[HookFunction, set[str]]:
        """The groups of each hook, in the order of registration."""
        return {hook: self.of(hook) for hook in (*self.native, *self._waiting)}

    @property
    def groups(self) -> set[str]:
        """All groups."""
        return set().union(*self.hook_fn_to_groups_map.values())

    def members(self, group: str) -> list[HookFunction]:
        """The hooks of a group."""
        return [hook for hook, groups in self.hook_fn_to_groups_map.items() if group in groups]

    def update(self, which: HookSelection, group: str) -> None:
        """Add hooks to a group.

        Raises:
            HookError: the selection is empty, or the name of the group is invalid.
        """
        hooks = self._chosen(which)
        groups = check_groups([group]) if group != ALL_GROUPS else set()
        for hook in hooks:
            if hook in self.native:
                self._flex.add_to_groups(self.native[hook], *groups)
            else:
                self._waiting.setdefault(hook, set()).update(groups)

    def remove(self, which: HookSelection, group: str) -> None:
        """Remove hooks from a group; none is removed if one of them is not in the group.

        A text selects among the hooks of the group.

        Raises:
            HookError: the selection is empty, a hook is not in the group, or the group is `all`.
        """
        hooks = self._chosen(which)
        check_groups([group])
        outside = [h.module_name for h in hooks if group not in self.of(h)]
        if isinstance(which, str) and len(outside) < len(hooks):
            hooks, outside = [h for h in hooks if group in self.of(h)], []
        if outside:
            raise HookError(
                f"{', '.join(outside)}: not in the group {group!r}, nothing is removed; its hooks are on "
                f"{', '.join(h.module_name for h in self.members(group)) or 'nothing'}"
            )
        for hook in hooks:
            if hook in self.native:
                self._flex.remove_from_groups(self.native[hook], group)
            else:
                self._waiting[hook].discard(group)

    def _chosen(self, which: HookSelection) -> list[HookFunction]:
        if isinstance(which, str):
            found = [h for h in self.native if which in h.module_name]
            if not found:
                raise HookError(f"no registered hook has {which!r} in its module_name; register hooks first")
            return found
        hooks = list(which) if isinstance(which, Iterable) else [which]
        for hook in hooks:
            if not isinstance(hook, HookFunction):
                raise HookError(
                    f"{type(hook).__name__} cannot be in a group; give HookFunctions, one or a list, or a "
                    "text that is in their module_names"
                )
            if hook._shared_state is not None and hook not in self.native:
                raise HookError(
                    f"the hook on {hook.module_name!r} belongs to another FlexModel; use that one"
                )
        return hooks
