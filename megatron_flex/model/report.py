"""`flex.report`: the model with hook points and hooks, as a tree in a terminal or notebook, or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import nn

from megatron_flex.config import PAGE_BYTES
from megatron_flex.document import Document, Note
from megatron_flex.errors import SiteError, suggest_nearest
from megatron_flex.runtime import HookFunction, Session
from megatron_flex.runtime.dump_sink import DumpSink
from megatron_flex.runtime.hooks import describe_edit
from megatron_flex.runtime.nonfinite_sink import NonFiniteSink
from megatron_flex.runtime.statistics_sink import StatisticsSink
from megatron_flex.sites import Pattern
from megatron_flex.statistics.statistics_reader import OpenStatistics, open_statistics
from megatron_flex.view import TreeHook, TreeNode, build_tree, fold_layers, sites_of_stage
from megatron_flex.view.tree_document import describe_tree
from megatron_flex.wording import count_words

if TYPE_CHECKING:
    from megatron_flex.page.page_builder import DumpOrPath


OTHER_STAGES_NOTE = (
    "hooks on other stages that send nothing to the receiving rank are shown as hooked: "
    "only those stages record whether they were called"
)


class Report:
    """A model as a tree and as an HTML page: `flex.report` of a `FlexModel`. Communicates nothing.

    Args:
        session: the session of the model.
        chunks: the modules of this rank.

    Examples:
        >>> flex.report.show("decoder.layers.0.mlp*")
        one rank: ... hooks
        ...
        ├─ ○ :input   [s, b, h] ...
        └─ ○ :output  [s, b, h] ...
    """

    def __init__(self, session: Session, chunks: nn.ModuleList) -> None:
        self._session, self._chunks = session, chunks

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

        Communicates nothing. Prints on the receiving rank; on other ranks it prints only if `file` is given.

        Args:
            pattern: selects the hook points to show, as for `FlexModel.sites()`.
            group: show only hook points that have a hook of this group.
            stage: show only hook points of this pipeline stage.
            every: show each layer separately, even if layers are alike.
            file: where to print; None for stdout.

        Raises:
            SiteError: the pattern matches nothing, or no hook point is left.

        Examples:
            >>> flex.report.show("decoder.layers.0.mlp*")
            one rank: ... hooks
            ...
            ├─ ○ :input   [s, b, h] ...
            └─ ○ :output  [s, b, h] ...
        """
        root = self.tree(pattern, group=group, stage=stage)
        if file is None and not self._session.is_leader:
            return
        head = format_headline(self._session)
        describe_tree(root if every else fold_layers(root), "FlexModel", head).print(file)

    def tree(
        self, pattern: Pattern = "**", *, group: str | None = None, stage: int | None = None
    ) -> TreeNode:
        """Return the tree that `show()` prints; its `to_json()` returns plain values. Any rank may call this.

        Args:
            pattern: as for `show()`, like `group` and `stage`.

        Raises:
            SiteError: the pattern matches nothing, or no hook point is left.

        Examples:
            >>> tree = flex.report.tree("decoder.layers.0.mlp*")
            >>> sorted(tree.to_json())
            ['children', 'count', 'label', 'places', 'stages']
        """
        session = self._session
        hooks = collect_site_hooks(session)
        sites = sites_of_stage(session.sites.match(pattern), stage)
        if group is not None:
            groups = {t for hs in hooks.values() for h in hs for t in h.groups}
            if group not in groups:
                raise SiteError(f"no hook is in a group {group!r}{suggest_nearest(group, groups)}")
            named = {n for n, hs in hooks.items() if any(group in h.groups for h in hs)}
            sites = [s for s in sites if s.name in named]
            if not sites:
                raise SiteError(f"no hook of group {group!r} is at a site that was named; pass fewer columns")
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
        """Write an HTML file that shows the model, its ranks and hooks, and data of dumps and statistics.

        Communicates nothing. The receiving rank of the first data parallel replica writes; on other ranks
        the call does nothing. `docs/view.md` describes the page.

        Args:
            path: the HTML file; an existing file is replaced.
            dumps: one dump, or two side by side; of a dump that is being written, complete iterations are
                shown.
            statistics: a folder of statistics.
            comparison: the result of `compare` on the two dumps.
            pattern: selects the hook points to show, as for `FlexModel.sites()`.
            lengths: lengths of dims that only the data determine, such as `{"s": 4096, "b": 1}`; by default
                those of the captures.
            title: of the page; by default the class name of the model.
            most_bytes: the maximum size of the file in bytes; None for no limit.

        Returns:
            The path of the file, on the rank that wrote it; None on other ranks.

        Raises:
            SiteError: the pattern matches nothing.
            FlexError: on the rank that writes: a dump or statistics cannot be opened, there are more than two
                sources (dumps and statistics together), or the page is too large or cannot be written.

        Examples:
            >>> flex.report.to_html("model.html", "dumps/run")
            PosixPath('model.html')
        """
        session = self._session
        sites = session.sites.match(pattern)
        if not session.is_leader or session.mesh["dp"].coord:
            return None
        from megatron_flex.estimate.session_estimate import sizes_of_session
        from megatron_flex.estimate.site_estimates import estimate_sites
        from megatron_flex.page import Page, grid_of_mesh, write  # needs numpy, which nothing else here does
        from megatron_flex.page.html_page import info_note
        from megatron_flex.page.page_builder import fill_page

        grid = grid_of_mesh(session.mesh)
        known = _captured_lengths(session) | dict(lengths or {})
        sizes = sizes_of_session(session, self._chunks, known)
        recorded = _recorded_sites(session)
        page = Page(
            title or type(self._chunks[0]).__name__,
            grid,
            [replace(s, tap=None) for s in sites],
            collect_site_hooks(session),
            recorded,
            estimate_sites(sites, sizes, grid.mesh()),
            notes=[info_note(OTHER_STAGES_NOTE)] if _has_unknown_hooks(session, recorded) else (),
        )
        if isinstance(statistics, (str, PathLike)):
            statistics = open_statistics(statistics)
        several = dumps if isinstance(dumps, Sequence) and not isinstance(dumps, str) else [dumps]
        return write(
            fill_page(page, several, [] if statistics is None else [statistics], comparison),
            path,
            most_bytes=most_bytes,
        )

    def _repr_html_(self) -> str:
        """Return the tree of `show()` as folding HTML, on the receiving rank. Communicates nothing."""
        session = self._session
        head = format_headline(session)
        if not session.is_leader:
            coords = ", ".join(f"{a.name} {a.coord}" for a in session.mesh.axes if a.size > 1)
            first = "of all" if session.over_data else "of its model replica"
            notice = (
                f"This rank ({coords}) is not a receiving rank: captures are on the first rank {first}, "
                "so look at the model there; flex.report.show(file=sys.stdout) prints the tree on any rank"
            )
            return Document(f"FlexModel · {head}", [Note(notice, "note")])._repr_html_()
        root = build_tree(session.sites, session.mesh.sizes, collect_site_hooks(session))
        return describe_tree(fold_layers(root), "FlexModel", head)._repr_html_()


def _recorded_sites(session: Session) -> frozenset[str]:
    """The hook points at which a hook was called on this rank."""
    local_sites, fired = session.taps.local_sites, session.editing.fired
    local_places = {
        s.place
        for e in session.registry.entries
        if e.hook in fired
        for s in e.sites
        if s.place in local_sites
    }
    return frozenset(local_places | {s.name for s in session.sites if s.name in session.captures})


def _has_unknown_hooks(session: Session, recorded: frozenset[str]) -> bool:
    """Whether another stage has a hook that sends nothing to this rank."""
    local_sites = session.taps.local_sites
    silent = [e for e in session.registry.active if e.hook.tensor_sink is not None or not e.hook.save]
    return any(s.place not in local_sites and s.place not in recorded for e in silent for s in e.sites)


def _captured_lengths(session: Session) -> dict[str, int]:
    """The lengths of the named dims of hook points, from the last captures of full tensors."""
    out: dict[str, int] = {}
    plain = [e for e in session.registry.entries if e.hook.selection is None and not e.hook.keep_as]
    for site in (s for e in plain for s in e.sites):
        for tensor in list(session.captures.get(site.name, ()))[-1:]:
            if len(tensor.shape) == len(site.shape):
                pairs = zip(site.shape, tensor.shape, strict=True)
                out |= {name: int(n) for name, n in pairs if isinstance(name, str)}
    return out


def format_headline(session: Session) -> str:
    """Describe the mesh, and count hook points and hooks."""
    hidden = sum(bool(s.hidden) for s in session.sites)
    count = len([e for e in session.registry.entries if e.hook.tensor_sink is None])
    sites, hooks = count_words(len(session.sites), "site"), count_words(count, "hook")
    return f"{session.mesh.describe()}: {sites}, {hidden} of them hidden; {hooks}"


def collect_site_hooks(session: Session) -> Mapping[str, Sequence[TreeHook]]:
    """Return the hooks registered at each hook point, of all stages."""
    active = {e.hook for e in session.registry.active}
    out: dict[str, list[TreeHook]] = {}
    for entry in session.registry.entries:
        kind, what = _describe_hook_kind(entry.hook)
        hooked = TreeHook(
            kind, what, tuple(sorted(entry.hook.groups)), entry.hook.backward, entry.hook in active
        )
        for site in entry.sites:
            out.setdefault(site.place, []).append(hooked)
    return out


def _describe_hook_kind(hook: HookFunction) -> tuple[str, str]:
    if hook.tensor_sink is not None:
        kinds = (("dump", DumpSink), ("statistics", StatisticsSink), ("watches", NonFiniteSink))
        return next(word for word, sink in kinds if isinstance(hook.tensor_sink, sink)), ""
    if hook.editing_function is not None:
        return "edits", describe_edit(hook.editing_function)
    return "reads", ""
