"""Groups of hooks, by the calls that there were; they are the native hooks' tags."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_flex.compat.core.hook_function import HookFunction
from megatron_flex.errors import HookError
from megatron_flex.model import FlexModel as Native
from megatron_flex.runtime import HookFunction as NativeHook
from megatron_flex.runtime.hook_groups import ALL_GROUPS, check_tags

HookSelection = list[HookFunction] | HookFunction | str


class HookGroups:
    """Which hook is in which groups. A group without members does not exist.

    Attributes:
        native: the native hook of each one that is registered, in the order of registration.
    """

    def __init__(self, flex: Native) -> None:
        self._flex = flex
        self.native: dict[HookFunction, NativeHook] = {}
        self._waiting: dict[HookFunction, set[str]] = {}  # of hooks that are not registered yet

    def registered(self, hook: HookFunction, native: NativeHook) -> None:
        """Count a hook in, with the groups that it was given before."""
        self.native[hook] = native
        tags = self._waiting.pop(hook, set())
        if tags:
            self._flex.tag(native, *tags)

    def of(self, hook: HookFunction) -> set[str]:
        """The groups of a hook."""
        if hook in self.native:
            return {ALL_GROUPS, *self.native[hook].tags}
        return set(self._waiting.get(hook, ()))

    @property
    def hook_fn_to_groups_map(self) -> dict[HookFunction, set[str]]:
        """The groups of each hook, in the order of registration."""
        return {hook: self.of(hook) for hook in (*self.native, *self._waiting)}

    @property
    def groups(self) -> set[str]:
        """The groups that there are."""
        return set().union(*self.hook_fn_to_groups_map.values())

    def members(self, group: str) -> list[HookFunction]:
        """The hooks of a group."""
        return [hook for hook, groups in self.hook_fn_to_groups_map.items() if group in groups]

    def update(self, which: HookSelection, group: str) -> None:
        """Put hooks into a group.

        Raises:
            HookError: no hook is meant, or this is no name for a group.
        """
        hooks = self._chosen(which)
        tags = check_tags([group]) if group != ALL_GROUPS else set()
        for hook in hooks:
            if hook in self.native:
                self._flex.tag(self.native[hook], *tags)
            else:
                self._waiting.setdefault(hook, set()).update(tags)

    def remove(self, which: HookSelection, group: str) -> None:
        """Take hooks out of a group; all of them, or, if one is not in it, none.

        A text means those in the group.

        Raises:
            HookError: no hook is meant, one is not in the group, or it is `all`.
        """
        hooks = self._chosen(which)
        check_tags([group])
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
                self._flex.untag(self.native[hook], group)
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
