"""The model as a tree in the terminal: where hooks can be, and where they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from megatron_flex.errors import FlexError, SiteError, nearest
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.hooks import name_of
from megatron_flex.sites import Pattern
from megatron_flex.view import Hooked, Node, chosen, folded, tree

NO_RICH = "showing needs rich, which is not installed: pip install megatron-flex[cli]"


class Showing:
    """What FlexModel shows of itself."""

    session: Session

    def show(
        self,
        pattern: Pattern = "**",
        *,
        group: str | None = None,
        stage: int | None = None,
        every: bool = False,
        file: TextIO | None = None,
    ) -> None:
        """Print the model as a tree, with layouts, shapes, stages and hooks.

        Communicates nothing. On the leader it prints; on other ranks it does nothing, unless `file` is given.

        Args:
            pattern: of the sites that are shown, as for `sites()`.
            group: only places where a hook of this group stands.
            stage: only what this pipeline stage owns.
            every: each layer by itself, also where they are alike.
            file: where to; the terminal if None.

        Raises:
            SiteError: the pattern matches nothing, or nothing is left.
            FlexError: rich is not installed.
        """
        root = self.tree(pattern, group=group, stage=stage)
        if file is None and not self.session.is_leader:
            return
        try:
            from megatron_flex.view.terminal import show
        except ImportError as error:
            raise FlexError(NO_RICH) from error
        head = headline(self.session)
        show(root if every else folded(root), head, sys.stdout if file is None else file)

    def tree(self, pattern: Pattern = "**", *, group: str | None = None, stage: int | None = None) -> Node:
        """What `show()` shows, as data; `to_json()` of it is plain values."""
        session = self.session
        hooks = standing(session)
        sites = chosen(session.sites.match(pattern), stage)
        if group is not None:
            tags = {t for hs in hooks.values() for h in hs for t in h.tags}
            if group not in tags:
                raise SiteError(f"no hook is in a group {group!r}{nearest(group, tags)}")
            named = {n for n, hs in hooks.items() if any(group in h.tags for h in hs)}
            sites = [s for s in sites if s.name in named]
            if not sites:
                raise SiteError(f"no hook of group {group!r} stands at a site that is meant; say less")
        return tree(sites, session.mesh.sizes, hooks)


def headline(session: Session) -> str:
    """The mesh, and how many sites and hooks there are."""
    hidden = sum(bool(s.hidden) for s in session.sites)
    stands = len([e for e in session.registry.entries if e.hook.taker is None])
    return f"{session.mesh.describe()}: {len(session.sites)} sites, {hidden} of them hidden; {stands} hook(s)"


def standing(session: Session) -> Mapping[str, Sequence[Hooked]]:
    """What stands at each site, of all stages."""
    active = {e.hook for e in session.registry.active}
    out: dict[str, list[Hooked]] = {}
    for entry in session.registry.entries:
        kind, what = _kind(entry.hook)
        told = Hooked(kind, what, tuple(sorted(entry.hook.tags)), entry.hook.backward, entry.hook in active)
        for site in entry.sites:
            out.setdefault(site.place, []).append(told)
    return out


def _kind(hook: HookFunction) -> tuple[str, str]:
    if hook.taker is not None:
        return ("dump" if hasattr(hook.taker, "dump") else "statistics"), ""
    if hook.editing_function is not None:
        return "edits", name_of(hook.editing_function)
    return "reads", ""
