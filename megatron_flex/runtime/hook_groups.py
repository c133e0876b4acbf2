"""Groups of hooks: tags that a hook carries, and which of them are to be active."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_flex.errors import HookError, suggest_nearest

ALL_GROUPS = "all"  # every hook is in it, whether it has tags or none
NO_GROUP = "none"


def check_tags(tags: Iterable[str]) -> set[str]:
    """The tags as a set.

    Raises:
        HookError: one is no name, or the name of the group that every hook is in anyway.
    """
    found = {tags} if isinstance(tags, str) else set(tags)
    for tag in found:
        if not isinstance(tag, str) or not tag or tag.startswith("-"):
            raise HookError(f"tag {tag!r} must be a name that does not begin with '-', which means without")
        if tag == ALL_GROUPS:
            raise HookError(f"every hook is in the group {ALL_GROUPS!r}, and stays there; choose another name")
    return found


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Which groups are active.

    Attributes:
        groups: a hook is wanted if it is in one of these.
        without: and in none of these.
        complement: the other hooks instead.
    """

    groups: frozenset[str] = frozenset({ALL_GROUPS})
    without: frozenset[str] = frozenset()
    complement: bool = False

    def takes(self, tags: set[str]) -> bool:
        """Whether a hook with these tags is selected."""
        of = tags | {ALL_GROUPS}
        return (bool(of & self.groups) and not of & self.without) != self.complement


def parse_selection(names: Iterable[str], known: Iterable[str], complement: bool) -> GroupSelection:
    """What was asked for, `"-steer"` meaning without that group; without any name no hook.

    Raises:
        HookError: a group that no hook is in.
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
    """Which groups are on for as long as nobody says otherwise.

    Attributes:
        words: `+steer`, `-dump`, `all`, `none`, one after the other: of those that mean a hook the last
            counts. One that none of them means is as it was registered.
    """

    words: tuple[str, ...] = ()

    def takes(self, tags: Iterable[str], enabled: bool = True) -> bool:
        """Whether a hook with these tags is on."""
        of, on = {*tags, ALL_GROUPS}, enabled
        for word in self.words:
            if word in (ALL_GROUPS, NO_GROUP):
                on = word == ALL_GROUPS
            elif word[1:] in of:
                on = word[0] == "+"
        return on


def parse_switches(words: Iterable[str], known: Iterable[str]) -> Switches:
    """What words say.

    Raises:
        HookError: one is no such word, or names a group that no hook is in.
    """
    words, known = tuple(words), [ALL_GROUPS, *known]
    for word in words:
        if word in (ALL_GROUPS, NO_GROUP):
            continue
        if word[:1] not in ("+", "-"):
            raise HookError(f"{word!r} is none of +group, -group, all, none{suggest_nearest(word, known)}")
        if word[1:] not in known:
            raise HookError(f"no hook is in a group {word[1:]!r}{suggest_nearest(word[1:], known)}")
    return Switches(words)
