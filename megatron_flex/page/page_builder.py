"""Building a page from dumps, statistics and comparisons: sites where there is no model, data, notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

from megatron_flex.dump.reader import OpenDump
from megatron_flex.dump.schema import layout_from_json
from megatron_flex.errors import DumpError, FlexError, LayoutError
from megatron_flex.page.data_pane import divergence_json, dump_source, statistics_source
from megatron_flex.page.dump_damage import open_readable
from megatron_flex.page.html_page import Page
from megatron_flex.page.rank_grid import RankGrid, grid_of_ranks, grid_of_sizes
from megatron_flex.page.site_estimates import estimate_sites, tensor_at_site
from megatron_flex.sites import GRADIENT_SUFFIX, Site
from megatron_flex.statistics.statistics_reader import OpenStatistics

EXPERT_AXES = ("edp", "ep", "etp")
MAX_SOURCES = 2
DumpOrPath = OpenDump | str | PathLike[str]


def fill_page(
    page: Page | None,
    dumps: Sequence[DumpOrPath] = (),
    statistics: Sequence[OpenStatistics] = (),
    comparison: Any = None,
    title: str = "",
) -> Page:
    """A page with the data of dumps and statistics; of a damaged dump the readable part is shown.

    Args:
        page: the page of a model; None to show the sites of the dumps, or else of the statistics.
        dumps: one, or two to show side by side.
        statistics: of one run, beside a dump; or of two, where there is no dump.
        comparison: the comparison of the two sources.
        title: the title of a new page.

    Raises:
        FlexError: too many sources; or none at all.
    """
    if len(dumps) + len(statistics) > MAX_SOURCES:
        raise FlexError(
            f"{len(dumps)} dumps{' and statistics' if statistics else ''}: a page shows {MAX_SOURCES} "
            "sources side by side; make another page for the others"
        )
    read = [open_readable(one) for one in dumps]
    notes = [(n["kind"], n["text"]) for _, found in read for n in found if n["kind"] == "damage"]
    there = [found for found, _ in read if found is not None]
    if page is None:
        page = _page_of_sources(there, statistics, title)
    recorded = set(page.recorded)
    for found in there:
        recorded |= set(found.site_records) if found.iterations else set()
    for measured in statistics:
        recorded |= {name.removesuffix(GRADIENT_SUFFIX) for name in measured.sites}
    names = [s.name for s in page.sites]
    label = iter("AB")
    data = [
        dump_source(given if found is None else found, names, next(label))
        for given, (found, _) in zip(dumps, read, strict=True)
    ]
    data += [statistics_source(measured, names, next(label)) for measured in statistics]
    return replace(
        page,
        recorded=frozenset(recorded),
        data=data,
        divergence=None if comparison is None else divergence_json(comparison, names),
        notes=(*page.notes, *notes),
    )


def _page_of_sources(dumps: Sequence[OpenDump], statistics: Sequence[OpenStatistics], title: str) -> Page:
    """The sites of the sources, and the mesh of the first."""
    pages = [_page_of_dump(found, title) for found in dumps]
    if not pages:
        pages = [_page_of_statistics(measured, title) for measured in statistics]
    if not pages:
        note = ("damage", "none of the data can be read, so there are no hook points to show")
        return Page(title, grid_of_sizes({}), (), notes=(note,))
    first, *others = pages
    known = {s.name: s for page in reversed(pages) for s in page.sites}
    order = dict.fromkeys(s.name for page in pages for s in page.sites)
    estimates = {name: estimate for page in reversed(pages) for name, estimate in page.estimates.items()}
    if any(page.mesh.sizes != first.mesh.sizes for page in others):
        known |= {s.name: s for s in first.sites}
        notes = (*first.notes, ("info", "mesh and layouts are A's; B ran on a different mesh"))
        return replace(first, sites=[known[n] for n in order], estimates=first.estimates, notes=notes)
    return replace(first, sites=[known[n] for n in order], estimates=estimates)


def _page_of_dump(found: OpenDump, title: str) -> Page:
    """The sites of all runs of a dump, on the mesh of the last."""
    manifest = found.manifests[-1]
    grid = grid_of_ranks(manifest.axes, manifest.experts, manifest.ranks)
    notes, sites = [], []
    for record in found.site_records.values():
        try:
            layout = layout_from_json(record.layout)
        except (LayoutError, KeyError, TypeError, ValueError) as error:
            notes.append(("damage", f"{record.name}: the manifest has no layout of it: {error!r}"))
            continue
        sites.append(
            Site(
                record.name,
                layout,
                tuple(record.shape),
                record.stage,
                chunk=record.chunk,
                inferred=record.inferred,
            )
        )
    lengths = _lengths(found)
    weights = {s.name: _weight(found, s.name) for s in sites}
    estimates = estimate_sites(sites, lambda s: tensor_at_site(s, grid.sizes, weights[s.name], lengths), grid)
    return Page(title, grid, sites, estimates=estimates, notes=notes)


def _weight(found: OpenDump, name: str) -> int | None:
    """Bytes of an entry."""
    try:
        return int(found[name].dtype.itemsize)
    except DumpError:  # missing on disk, which the data pane reports
        return None


def _lengths(found: OpenDump) -> dict[str, int]:
    """The number of tokens and samples of a microbatch, if complete ones were dumped."""
    settings = found.manifests[-1].settings
    if settings.get("tokens") is not None or settings.get("reduce") is not None:
        return {}
    for record in found.site_records.values():
        if {"s", "b"} - set(map(str, record.shape)):
            continue
        try:
            piece = next(found[record.name].microbatch_arrays())
            dim_lengths = dict(zip(piece.array.dims, piece.array.shape, strict=True))
        except (DumpError, StopIteration):
            continue
        return {
            short: dim_lengths[long]
            for short, long in (("s", "token"), ("b", "sample"))
            if long in dim_lengths
        }
    return {}


def _page_of_statistics(found: OpenStatistics, title: str) -> Page:
    """The measured sites, and the mesh of the last start."""
    if not found.headers:
        return Page(
            title, grid_of_sizes({}), (), notes=(("damage", "no start of the statistics can be read"),)
        )
    axes = found.headers[-1].axes
    grid: RankGrid = grid_of_sizes(
        {a: n for a, n in axes.items() if a not in EXPERT_AXES},
        {a: axes[a] for a in EXPERT_AXES if a in axes},
    )
    known = {p.name: p for header in found.headers for p in header.sites}
    sites, notes = [], []
    passing = {
        row.site.removesuffix(GRADIENT_SUFFIX) for row in found.rows() if row.kind in ("value", "gradient")
    }
    for name in dict.fromkeys(n.removesuffix(GRADIENT_SUFFIX) for n in found.sites):
        record = known.get(name)
        if record is None or name not in passing:  # a parameter, which no hook reads
            continue
        try:
            sites.append(Site(name, layout_from_json(dict(record.layout)), tuple(record.shape)))
        except (LayoutError, KeyError, TypeError, ValueError) as error:
            notes.append(("damage", f"{name}: the statistics have no layout of it: {error!r}"))
    estimates = estimate_sites(sites, partial(tensor_at_site, sizes=grid.sizes, weight=None), grid)
    return Page(title, grid, sites, estimates=estimates, notes=notes)
