"""The model as a tree in the terminal: where hooks can be, and where they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import nn

from megatron_flex.errors import FlexError, SiteError, suggest_nearest
from megatron_flex.notebook_html import PAGE_BYTES
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.hooks import describe_edit
from megatron_flex.sites import Pattern
from megatron_flex.statistics.reading import OpenStatistics, open_statistics
from megatron_flex.view import TreeHook, TreeNode, sites_of_stage, fold_layers, build_tree

if TYPE_CHECKING:
    from megatron_flex.page.page_builder import DumpOrPath

OTHER_STAGES_NOTE = (
    "hooks on other stages that bring nothing to the leader are shown as active: "
    "only those stages know whether they have fired"
)
RICH_MISSING = "showing needs rich, which is not installed: pip install megatron-flex[cli]"


class Showing:
    """What FlexModel shows of itself."""

    session: Session
    chunks: nn.ModuleList

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
            from megatron_flex.view.tree_terminal import print_tree
        except ImportError as error:
            raise FlexError(RICH_MISSING) from error
        head = format_headline(self.session)
        print_tree(root if every else fold_layers(root), head, sys.stdout if file is None else file)

    def tree(self, pattern: Pattern = "**", *, group: str | None = None, stage: int | None = None) -> TreeNode:
        """What `show()` shows, as data; `to_json()` of it is plain values."""
        session = self.session
        hooks = collect_site_hooks(session)
        sites = sites_of_stage(session.sites.match(pattern), stage)
        if group is not None:
            tags = {t for hs in hooks.values() for h in hs for t in h.tags}
            if group not in tags:
                raise SiteError(f"no hook is in a group {group!r}{suggest_nearest(group, tags)}")
            named = {n for n, hs in hooks.items() if any(group in h.tags for h in hs)}
            sites = [s for s in sites if s.name in named]
            if not sites:
                raise SiteError(f"no hook of group {group!r} stands at a site that is meant; say less")
        return build_tree(sites, session.mesh.sizes, hooks)

    def to_html(
        self,
        path: str | PathLike[str],
        dumps: Sequence[DumpOrPath] | DumpOrPath = (),
        statistics: OpenStatistics | str | PathLike[str] | None = None,
        comparison: Any = None,
        *,
        pattern: Pattern = "**",
        lengths: Mapping[str, int] | None = None,
        title: str = "",
        most_bytes: int | None = PAGE_BYTES,
    ) -> Path | None:
        """Write a page, one HTML file, of the model, its ranks, hooks, and of what dumps and statistics saw.

        Communicates nothing. The leader of the first data parallel replica writes; on other ranks it does
        nothing. `docs/view.md` says what there is to see.

        Args:
            path: of the file; one that is there is replaced.
            dumps: one, or two side by side; whole iterations of one that is being written are shown.
            statistics: a folder of them.
            comparison: what `compare` found between the two dumps.
            pattern: of the sites that are shown, as for `sites()`.
            lengths: of dims that only the data tell, such as `{"s": 4096, "b": 1}`; else as in what was read.
            title: of the page; else the model's class.
            most_bytes: how large it may be; None for any size.

        Returns:
            The file, on the rank that wrote it.

        Raises:
            SiteError: the pattern matches nothing.
            FlexError: on the rank that writes: a dump or statistics cannot be opened, more than two sources,
                the page would be larger, or cannot be written.
        """
        session = self.session
        sites = session.sites.match(pattern)
        if not session.is_leader or session.mesh["dp"].coord:
            return None
        from megatron_flex.page import Page, grid_of_mesh, write  # needs numpy, which nothing else here does
        from megatron_flex.page.site_estimates import tensor_at_site, estimate_sites
        from megatron_flex.page.page_builder import fill_page

        grid = grid_of_mesh(session.mesh)
        known = _captured_lengths(session) | dict(lengths or {})
        weight = next((p.element_size() for p in self.chunks.parameters() if p.is_floating_point()), None)
        fired = _fired_sites(session)
        page = Page(
            title or type(self.chunks[0]).__name__,
            grid,
            [replace(s, tap=None) for s in sites],
            collect_site_hooks(session),
            fired,
            estimate_sites(sites, lambda s: tensor_at_site(s, grid.sizes, weight, known), grid),
            notes=[("info", OTHER_STAGES_NOTE)] if _has_unknown_hooks(session, fired) else (),
        )
        if isinstance(statistics, (str, PathLike)):
            statistics = open_statistics(statistics)
        several = dumps if isinstance(dumps, Sequence) and not isinstance(dumps, str) else [dumps]
        return write(fill_page(page, several, statistics, comparison), path, most_bytes=most_bytes)


def _fired_sites(session: Session) -> frozenset[str]:
    """The sites where a hook has fired, as far as this rank knows."""
    own, fired = session.standing.own, session.editing.fired
    here = {s.place for e in session.registry.entries if e.hook in fired for s in e.sites if s.place in own}
    return frozenset(here | {s.name for s in session.sites if s.name in session.captures})


def _has_unknown_hooks(session: Session, fired: frozenset[str]) -> bool:
    """Whether a hook that brings nothing to this rank stands elsewhere."""
    own = session.standing.own
    silent = [e for e in session.registry.active if e.hook.tensor_sink is not None or not e.hook.save]
    return any(s.place not in own and s.place not in fired for e in silent for s in e.sites)


def _captured_lengths(session: Session) -> dict[str, int]:
    """How long the dims are in what was read whole, whose names stand in the sites' shapes."""
    out: dict[str, int] = {}
    whole = [e for e in session.registry.entries if e.hook.wanted is None and not e.hook.keep_as]
    for site in (s for e in whole for s in e.sites):
        for tensor in list(session.captures.get(site.name, ()))[-1:]:
            if len(tensor.shape) == len(site.shape):
                pairs = zip(site.shape, tensor.shape, strict=True)
                out |= {name: int(n) for name, n in pairs if isinstance(name, str)}
    return out


def format_headline(session: Session) -> str:
    """The mesh, and how many sites and hooks there are."""
    hidden = sum(bool(s.hidden) for s in session.sites)
    count = len([e for e in session.registry.entries if e.hook.tensor_sink is None])
    return f"{session.mesh.describe()}: {len(session.sites)} sites, {hidden} of them hidden; {count} hook(s)"


def collect_site_hooks(session: Session) -> Mapping[str, Sequence[TreeHook]]:
    """What stands at each site, of all stages."""
    active = {e.hook for e in session.registry.active}
    out: dict[str, list[TreeHook]] = {}
    for entry in session.registry.entries:
        kind, what = _describe_hook_kind(entry.hook)
        hooked = TreeHook(kind, what, tuple(sorted(entry.hook.tags)), entry.hook.backward, entry.hook in active)
        for site in entry.sites:
            out.setdefault(site.place, []).append(hooked)
    return out


def _describe_hook_kind(hook: HookFunction) -> tuple[str, str]:
    if hook.tensor_sink is not None:
        return ("dump" if hasattr(hook.tensor_sink, "dump") else "statistics"), ""
    if hook.editing_function is not None:
        return "edits", describe_edit(hook.editing_function)
    return "reads", ""
