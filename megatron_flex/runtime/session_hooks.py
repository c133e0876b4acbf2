"""The hooks of a session: registered and removed, in groups, tried before a step, and selected."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from megatron_flex.errors import FlexWarning, HookError, error_attributes
from megatron_flex.handles import Handle
from megatron_flex.runtime.debug.dry_run import DryRun
from megatron_flex.runtime.edit_environment import EditEnvironment
from megatron_flex.runtime.edit_failures import SkipCount
from megatron_flex.runtime.hook_groups import Switches, check_groups, parse_selection, parse_switches
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import HookFunction, HookType
from megatron_flex.runtime.session_taps import SessionTaps


class SessionHooks:
    """Registers hooks, and selects the active ones. Every rank makes the same calls.

    Args:
        registry: the hooks and their sites.
        taps: installs taps where hooks are active.
        dry_run: tries editing functions when they are registered.
        editing: what editing functions run with.
        check_open: raises once the model is restored.
        sink_groups: the groups of dumps and statistics, which have no hooks if they record parameters alone.
    """

    def __init__(
        self,
        registry: HookRegistry,
        taps: SessionTaps,
        dry_run: DryRun,
        editing: EditEnvironment,
        check_open: Callable[[], None],
        sink_groups: Callable[[], set[str]],
    ) -> None:
        self.registry, self.trials = registry, dry_run
        self._taps, self._editing, self._check_open = taps, editing, check_open
        self._sink_groups = sink_groups

    def register(self, hook: HookFunction, kind: HookType) -> Handle:
        """Register a hook with the given hook type, and return a handle that removes the hook."""
        hook.hook_type = kind
        self.add(hook)
        return Handle(partial(self.remove, hook), repr(hook), partial(self.has, hook))

    def add(self, hook: HookFunction, always: bool = False) -> None:
        """Register a hook with its own hook type.

        Args:
            hook: the hook.
            always: whether the hook is active whichever groups are selected.

        Raises:
            HookError: the hook cannot be at this hook point, the dry run rejects its editing function, or the
                model was restored.
        """
        self._check_open()
        with error_attributes(site=hook.where, hook=hook):
            entry = self.registry.add(hook, always)
            self._editing.skips.expect(hook)
            try:
                self.trials.consider(entry)
            except Exception:  # raised again, after the hook is removed
                self.registry.remove(hook)
                raise
        if any(e is entry for e in self.registry.active[-1:]):
            self._taps.tap(entry)

    def remove(self, hook: HookFunction) -> None:
        """Remove a hook, and the taps that no other hook needs.

        Raises:
            HookError: the hook is not registered, or the model was restored.
        """
        self._check_open()
        self.registry.remove(hook)
        self._taps.update_taps()

    def has(self, hook: HookFunction) -> bool:
        """Whether the hook is registered; a restored model has none."""
        return any(entry.hook is hook for entry in self.registry.entries)

    @property
    def groups(self) -> dict[str, list[HookFunction]]:
        return self.registry.groups()

    @property
    def skipped(self) -> dict[HookFunction, SkipCount]:
        """The hooks with `on_error="skip"` that failed, and the number of passes skipped on this rank."""
        return dict(self._editing.skips.skipped)

    def add_to_groups(self, hook: HookFunction, groups: Sequence[str]) -> None:
        self._check_open()
        hook.groups |= check_groups(groups)
        self.registry.groups_changed()

    def remove_from_groups(self, hook: HookFunction, groups: Sequence[str]) -> None:
        """Remove a hook from groups.

        Raises:
            HookError: the hook is not in one of the groups.
        """
        self._check_open()
        missing = check_groups(groups) - hook.groups
        if missing:
            names = ", ".join(sorted(missing))
            raise HookError(
                f"hook ({hook.describe()}) is not in {names}; it is in {sorted(hook.groups)}", hook=hook
            )
        hook.groups -= set(groups)
        self.registry.groups_changed()

    def parse_switches(self, words: Sequence[str]) -> Switches:
        """The switches that words such as `+steer` name.

        Raises:
            HookError: a named group has no hook, or the model was restored.
        """
        self._check_open()
        groups = self.groups
        return parse_switches(words, [*groups, *sorted(self._sink_groups() - set(groups))])

    def select(self, words: Sequence[str]) -> None:
        """Switch groups on and off from the next step on; errors as for `parse_switches`."""
        self.registry.switches = self.parse_switches(words)

    @contextmanager
    def scope(self, groups: Sequence[str], complement: bool) -> Iterator[None]:
        """Select the hooks that are active in a scope."""
        self._check_open()
        before = self.registry.selection
        self.registry.selection = parse_selection(groups, self.groups, complement)
        try:
            yield
        finally:
            self.registry.selection = before

    def dry_run(self) -> None:
        """Run each active editing function once on a small random tensor. Collective.

        Raises:
            HookError: on all ranks, for an error that would occur in a step.
        """
        self._check_open()
        failures = self.trials.all(self.registry.active, self._taps.local_sites, self._editing.modules)
        bad = [f for f, certain in failures if certain]
        if bad:
            raise HookError("; ".join(f.text for f in bad), site=bad[0].site)
        for failure, _ in failures:
            warnings.warn_explicit(failure.text, FlexWarning, *failure.place)
