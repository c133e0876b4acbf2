"""Building a page from a configuration, or from dumps, statistics and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from megatron_flex.dump.reader import OpenDump
from megatron_flex.dump.schema import layout_from_json
from megatron_flex.errors import DumpError, FlexError, LayoutError
from megatron_flex.estimate import Links, TensorSizes
from megatron_flex.estimate.site_estimates import estimate_sites
from megatron_flex.page.data_pane import divergence_json, dump_source, statistics_source
from megatron_flex.page.dump_damage import open_readable
from megatron_flex.page.html_page import Page, damage_note, info_note
from megatron_flex.page.rank_grid import RankGrid, grid_of_ranks, grid_of_sizes
from megatron_flex.sites import GRADIENT_SUFFIX, Pattern, Site, SiteTable
from megatron_flex.statistics.statistics_reader import OpenStatistics

if TYPE_CHECKING:
    from megatron_flex.estimate import RunConfig

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
    read = [open_readable(dump) for dump in dumps]
    notes = [note for _, several in read for note in several if note["kind"] == "damage"]
    opened_dumps = [opened for opened, _ in read if opened is not None]
    if page is None:
        page = _page_of_sources(opened_dumps, statistics, title)
    recorded = set(page.recorded)
    for opened in opened_dumps:
        recorded |= set(opened.site_records) if opened.iterations else set()
    for measured in statistics:
        recorded |= {name.removesuffix(GRADIENT_SUFFIX) for name in measured.sites}
    names = [s.name for s in page.sites]
    label = iter("AB")
    data = [
        dump_source(given if opened is None else opened, names, next(label))
        for given, (opened, _) in zip(dumps, read, strict=True)
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
    pages = [_page_of_dump(dump, title) for dump in dumps]
    if not pages:
        pages = [_page_of_statistics(measured, title) for measured in statistics]
    if not pages:
        note = damage_note("none of the data can be read, so there are no hook points to show")
        return Page(title, grid_of_sizes({}), (), notes=(note,))
    first, *others = pages
    known = {s.name: s for page in reversed(pages) for s in page.sites}
    order = dict.fromkeys(s.name for page in pages for s in page.sites)
    estimates = {name: estimate for page in reversed(pages) for name, estimate in page.estimates.items()}
    if any(page.mesh.sizes != first.mesh.sizes for page in others):
        known |= {s.name: s for s in first.sites}
        notes = (*first.notes, info_note("mesh and layouts are A's; B ran on a different mesh"))
        return replace(first, sites=[known[n] for n in order], estimates=first.estimates, notes=notes)
    return replace(first, sites=[known[n] for n in order], estimates=estimates)


def _page_of_dump(dump: OpenDump, title: str) -> Page:
    """The sites of all runs of a dump, on the mesh of the last."""
    manifest = dump.manifests[-1]
    grid = grid_of_ranks(manifest.axes, manifest.experts, manifest.ranks)
    notes, sites = [], []
    for record in dump.site_records.values():
        try:
            layout = layout_from_json(record.layout)
        except (LayoutError, KeyError, TypeError, ValueError) as error:
            notes.append(damage_note(f"{record.name}: the manifest has no layout of it: {error!r}"))
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
    lengths = _lengths(dump)
    sizes = TensorSizes(grid.sizes, lengths, lambda site: _dtype(dump, site.name))
    return Page(title, grid, sites, estimates=estimate_sites(sites, sizes, grid.mesh()), notes=notes)


def _dtype(dump: OpenDump, name: str) -> torch.dtype | None:
    try:
        return dump[name].dtype
    except DumpError:  # missing on disk, which the data pane reports
        return None


def _lengths(dump: OpenDump) -> dict[str, int]:
    """The number of tokens and samples of a microbatch, if complete ones were dumped."""
    settings = dump.manifests[-1].settings
    if settings.get("tokens") is not None or settings.get("reduce") is not None:
        return {}
    for record in dump.site_records.values():
        if {"s", "b"} - set(map(str, record.shape)):
            continue
        try:
            piece = next(dump[record.name].microbatch_arrays())
            dim_lengths = dict(zip(piece.array.dims, piece.array.shape, strict=True))
        except (DumpError, StopIteration):
            continue
        return {
            short: dim_lengths[long]
            for short, long in (("s", "token"), ("b", "sample"))
            if long in dim_lengths
        }
    return {}


def _page_of_statistics(statistics: OpenStatistics, title: str) -> Page:
    """The measured sites, and the mesh of the last start."""
    if not statistics.headers:
        note = damage_note("no start of the statistics can be read")
        return Page(title, grid_of_sizes({}), (), notes=(note,))
    axes = statistics.headers[-1].axes
    grid: RankGrid = grid_of_sizes(
        {a: n for a, n in axes.items() if a not in EXPERT_AXES},
        {a: axes[a] for a in EXPERT_AXES if a in axes},
    )
    known = {p.name: p for header in statistics.headers for p in header.sites}
    sites, notes = [], []
    passing = {
        row.site.removesuffix(GRADIENT_SUFFIX)
        for row in statistics.rows()
        if row.kind in ("value", "gradient")
    }
    for name in dict.fromkeys(n.removesuffix(GRADIENT_SUFFIX) for n in statistics.sites):
        record = known.get(name)
        if record is None or name not in passing:  # a parameter, which no hook reads
            continue
        try:
            sites.append(Site(name, layout_from_json(dict(record.layout)), tuple(record.shape)))
        except (LayoutError, KeyError, TypeError, ValueError) as error:
            notes.append(damage_note(f"{name}: the statistics have no layout of it: {error!r}"))
    sizes = TensorSizes(grid.sizes, {}, lambda _: None)
    return Page(title, grid, sites, estimates=estimate_sites(sites, sizes, grid.mesh()), notes=notes)


def make_configuration_page(
    config: RunConfig,
    *,
    match: Pattern = "**",
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    links: Links | None = None,
    title: str = "",
) -> Page:
    """The page of a configuration, without weights, GPU or ranks.

    Args:
        config: a YAML or JSON file or a mapping of Megatron's argument names, or a list of its flags.
        match: the pattern of the sites to show, as for `flex.sites()`.
        mesh: sizes that override the config's: `tp`, `pp`, `cp`, `ep`, `etp`, `dp`.
        world_size: the number of ranks; by default from `dp`, or with the smallest data parallel size that
            fits.
        links: the number of ranks on a node.
        title: the title of the page; by default the model's sizes.

    Raises:
        FlexError: the configuration is invalid; the process has groups already; the pattern matches nothing.
    """
    from megatron_flex.estimate import ConfiguredRun  # most pages are of dumps, and build no model

    run = ConfiguredRun(config, mesh=mesh, world_size=world_size)
    model = run.model
    sites = SiteTable(model.sites).match(match)
    layers = run.args.num_layers or sum(model.layers.values())
    axes, experts = ({a.name: a.size for a in axes} for axes in (model.mesh.axes, model.mesh.experts))
    return Page(
        title or f"{layers} layers × {model.config.hidden_size}",
        grid_of_sizes(axes, experts),
        [s.remote() for s in sites],
        estimates=estimate_sites(sites, run.sizes, model.mesh, links),
    )
