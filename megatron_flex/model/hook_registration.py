"""Registration of hooks for FlexModel: groups of hooks, active hooks, and trials before a step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from megatron_flex.errors import FlexWarning, HookError
from megatron_flex.handles import Handle
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.hook_groups import check_groups, parse_selection
from megatron_flex.runtime.hooks import HookType


class HookRegistration:
    """Registers hooks in a session, and selects the active hooks. `FlexModel` documents each method.

    Args:
        session: the session of the model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def register(self, hook: HookFunction, kind: HookType) -> Handle:
        """Register a hook with the given hook type, and return a handle that removes the hook."""
        hook.hook_type = kind
        self._session.add(hook)
        return Handle(partial(self.remove, hook), repr(hook), partial(self._session.has_hook, hook))

    def remove(self, hook: HookFunction) -> None:
        """Remove a hook."""
        self._session.check_open()
        self._session.remove(hook)

    @property
    def groups(self) -> dict[str, list[HookFunction]]:
        """The hooks of each group."""
        return self._session.registry.groups()

    def add_to_groups(self, hook: HookFunction, groups: Sequence[str]) -> None:
        """Add a hook to groups."""
        self._session.check_open()
        hook.groups |= check_groups(groups)
        self._session.registry.groups_changed()

    def remove_from_groups(self, hook: HookFunction, groups: Sequence[str]) -> None:
        """Remove a hook from groups.

        Raises:
            HookError: the hook is not in one of the groups.
        """
        self._session.check_open()
        missing = check_groups(groups) - hook.groups
        if missing:
            names = ", ".join(sorted(missing))
            raise HookError(f"hook ({hook.describe()}) is not in {names}; it is in {sorted(hook.groups)}")
        hook.groups -= set(groups)
        self._session.registry.groups_changed()

    def select(self, words: Sequence[str]) -> None:
        """Switch groups on and off from the next step on."""
        self._session.registry.switches = self._session.parse_switches(words)

    @contextmanager
    def scope(self, groups: Sequence[str], complement: bool) -> Iterator[None]:
        """Select the hooks that are active in a scope."""
        self._session.check_open()
        registry = self._session.registry
        before = registry.selection
        registry.selection = parse_selection(groups, self.groups, complement)
        try:
            yield
        finally:
            registry.selection = before

    def dry_run(self) -> None:
        """Run each active editing function once on a small random tensor. Collective.

        Raises:
            HookError: on all ranks, for an error that would occur in a step.
        """
        session = self._session
        session.check_open()
        own = session.taps.own
        found = session.dry_run.all(session.registry.active, own, session.edit_runner.modules)
        bad = [f.text for f, certain in found if certain]
        if bad:
            raise HookError("; ".join(bad))
        for failure, _ in found:
            warnings.warn_explicit(failure.text, FlexWarning, *failure.place)
