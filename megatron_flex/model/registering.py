"""Hooks go in and out, carry tags, and are chosen by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_flex.errors import HookError
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.hook_groups import Switches, check_tags, parse_selection, parse_switches
from megatron_flex.runtime.hooks import HookType
from megatron_flex.runtime.skipping import SkipCount


class Registering:
    """What FlexModel does with hooks; the `register_*` methods have the names of torch's."""

    session: Session

    def register_forward_hook(self, hook: HookFunction) -> None:
        """See, and perhaps edit, what a module returns."""
        self._register(hook, "forward")

    def register_forward_pre_hook(self, hook: HookFunction) -> None:
        """See, and perhaps edit, what a module gets."""
        self._register(hook, "forward_pre")

    def register_full_backward_hook(self, hook: HookFunction) -> None:
        """See, and perhaps edit, the gradient of what a module gets."""
        self._register(hook, "full_backward")

    def register_full_backward_pre_hook(self, hook: HookFunction) -> None:
        """See, and perhaps edit, the gradient of what a module returns."""
        self._register(hook, "full_backward_pre")

    def register_hook(self, hook: HookFunction) -> None:
        """See, and perhaps edit, the gradient of a parameter or site."""
        self._register(hook, "tensor")

    def remove_hook(self, hook: HookFunction) -> None:
        """Take one hook out."""
        self.session.remove(hook)

    def _register(self, hook: HookFunction, kind: HookType) -> None:
        hook.hook_type = kind
        self.session.add(hook)

    @property
    def groups(self) -> dict[str, list[HookFunction]]:
        """The hooks of each tag; a tag that no hook carries is not there. `all` is every hook."""
        return self.session.registry.groups()

    @property
    def skipped(self) -> dict[HookFunction, SkipCount]:
        """Of hooks with `on_error="skip"` those that failed: in how many passes on this rank, and why first.

        A pass in which another rank failed that holds the same tensor counts too. All that is told once on
        the first rank when it happens, and summed up there by `restore()`.
        """
        return dict(self.session.editing.skipping.skipped)

    def tag(self, hook: HookFunction, *tags: str) -> None:
        """Put a registered hook into further groups, on every rank alike."""
        hook.tags |= check_tags(tags)
        self.session.registry.retagged()

    def untag(self, hook: HookFunction, *tags: str) -> None:
        """Take a hook out of groups, on every rank alike.

        Raises:
            HookError: it is not in one of them.
        """
        missing = check_tags(tags) - hook.tags
        if missing:
            names = ", ".join(sorted(missing))
            raise HookError(f"hook ({hook.describe()}) is not in {names}; it is in {sorted(hook.tags)}")
        hook.tags -= set(tags)
        self.session.registry.retagged()

    def select(self, *words: str) -> None:
        """Switch groups on and off from the next step on, on every rank alike.

        It stays so until the next call, which says all of it anew; scopes of `hooks()` choose among what is
        on. A hook that no word means is as it was made: on, unless `enabled=False`.

        Args:
            words: `+steer` is on, `-dump` is off, `all` and `none` say it of every hook; where several mean
                a hook the last counts. None at all: as the hooks were made.

        Raises:
            HookError: no hook is in such a group.
        """
        self.session.registry.switches = self.understood(*words)

    def understood(self, *words: str) -> Switches:
        """What `select()` would do with these words; raises what it would."""
        return parse_switches(words, [*self.groups, *sorted(self.session.sinks.tags - set(self.groups))])

    @contextmanager
    def hooks(self, *groups: str, complement: bool = False) -> Iterator[None]:
        """Choose which hooks are active in a scope, on every rank alike.

        It counts for the steps, and calls of the model, that begin inside, with their backward passes. Where
        no hook is active the model runs as if none were there. Scopes may be nested; the inner one counts.

        Args:
            groups: names of groups, whose union it is: without any name, no hook is active. With a `-` in
                front, without those. `all` is every hook, and what is meant where only groups to leave out
                are named.
            complement: the other hooks instead.

        Raises:
            HookError: no hook is in such a group.
        """
        registry = self.session.registry
        before = registry.selection
        registry.selection = parse_selection(groups, self.groups, complement)
        try:
            yield
        finally:
            registry.selection = before
