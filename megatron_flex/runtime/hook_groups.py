"""The groups of a hook, and which groups are active."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_flex.errors import HookError, suggest_nearest

ALL_GROUPS = "all"  # contains every hook, with or without other groups
NO_GROUP = "none"


def check_groups(groups: Iterable[str]) -> set[str]:
    """The groups as a set.

    Raises:
        HookError: a name is invalid, or is that of the group that contains every hook.
    """
    names = {groups} if isinstance(groups, str) else set(groups)
    for group in names:
        if not isinstance(group, str) or not group or group.startswith("-"):
            raise HookError(
                f"group {group!r} must be a name that does not begin with '-', which means without"
            )
        if group == ALL_GROUPS:
            raise HookError(
                f"every hook is in the group {ALL_GROUPS!r}, and stays there; choose another name"
            )
    return names


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """A selection of groups.

    Attributes:
        groups: select hooks in one of these groups,
        without: and in none of these.
        complement: select the other hooks instead.
    """

    groups: frozenset[str] = frozenset({ALL_GROUPS})
    without: frozenset[str] = frozenset()
    complement: bool = False

    def selects(self, groups: set[str]) -> bool:
        """Whether a hook in these groups is selected."""
        of = groups | {ALL_GROUPS}
        return (bool(of & self.groups) and not of & self.without) != self.complement


def parse_selection(names: Iterable[str], known: Iterable[str], complement: bool) -> GroupSelection:
    """Parse the arguments of `flex.hooks()`; `"-steer"` excludes a group; without any name no hook is
    selected.

    Raises:
        HookError: no hook is in a named group.
    """
    names, known = list(names), [ALL_GROUPS, *known]
    plain = [n.removeprefix("-") for n in names]
    for name in plain:
        if name not in known:
            raise HookError(f"no hook is in a group {name!r}{suggest_nearest(name, known)}")
    without = frozenset(p for n, p in zip(names, plain, strict=True) if n != p)
    groups = frozenset(p for n, p in zip(names, plain, strict=True) if n == p)
    return GroupSelection(frozenset({ALL_GROUPS}) if without and not groups else groups, without, complement)


@dataclass(frozen=True, slots=True)
class Switches:
    """The groups that are switched on, until switched again.

    Attributes:
        words: `+steer`, `-dump`, `all`, `none`, in order: the last word that matches a hook decides. A hook
            that no word matches keeps the state of its registration.
    """

    words: tuple[str, ...] = ()

    def selects(self, groups: Iterable[str], enabled: bool = True) -> bool:
        """Whether a hook in these groups is on."""
        of, on = {*groups, ALL_GROUPS}, enabled
        for word in self.words:
            if word in (ALL_GROUPS, NO_GROUP):
                on = word == ALL_GROUPS
            elif word[1:] in of:
                on = word[0] == "+"
        return on


def parse_switches(words: Iterable[str], known: Iterable[str]) -> Switches:
    """Parse the words of `flex.select()`.

    Raises:
        HookError: a word is invalid, or names a group that no hook is in.
    """
    words, known = tuple(words), [ALL_GROUPS, *known]
    for word in words:
        if word in (ALL_GROUPS, NO_GROUP):
            continue
        if word[:1] not in ("+", "-"):
            raise HookError(f"{word!r} is not one of +group, -group, all, none{suggest_nearest(word, known)}")
        if word[1:] not in known:
            raise HookError(f"no hook is in a group {word[1:]!r}{suggest_nearest(word[1:], known)}")
    return Switches(words)
