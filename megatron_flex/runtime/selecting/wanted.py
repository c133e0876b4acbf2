"""Wanted: what a hook keeps of what passes, as it is said, checked where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flex.runtime.selection.entry_selection import Select
from megatron_flex.runtime.selection.reduce import Reduction
from megatron_flex.sites import HEAD_DIMS, PACKED_HEAD_DIMS, Site

EVERYTHING = Select()


@dataclass(frozen=True, eq=False, slots=True)
class CaptureSelection:
    """First some entries are selected, then these are reduced.

    Attributes:
        select: the entries.
        reduce: what is made of them; None for themselves.
    """

    select: Select = EVERYTHING
    reduce: Reduction | None = None

    def same(self, other: CaptureSelection | None) -> bool:
        """Whether two are the same wish."""
        return other is not None and self.select == other.select and self.reduce is other.reduce

    def describe(self) -> str:
        """In words."""
        made = None if self.reduce is None else self.reduce.describe()
        if self.select == EVERYTHING:
            return made or "everything"
        return self.select.describe() + (f", then {made}" if made else "")

    def check(self, site: Site) -> bool:
        """Whether everything that can be wrong was seen, before any step has begun.

        Raises:
            HookError: the site has no such dim, or a dim of known length no such entry.
        """
        names = site.dims
        if not names:
            return False
        choices = self.select.choices(names, None, site.name)
        sure = self.select.heads is None or any(c.what == "heads" for c in choices)
        lengths: list[int | str] = list(site.shape) if len(site.shape) == len(names) else list(names)
        if not sure:
            lengths[[n in (*HEAD_DIMS, *PACKED_HEAD_DIMS) for n in names].index(True)] = "heads"  # how many, a step tells
        for choice in choices:
            length = lengths[choice.dim]
            if isinstance(length, int):
                lengths[choice.dim] = len(choice.of(length))
            else:
                sure = sure and choice.always
        if self.reduce is not None:
            last = lengths[self.reduce.places(names, site.name)[-1]]
            if isinstance(last, int):
                self.reduce.check(last)
            else:
                sure = sure and not self.reduce.sized
        return sure
