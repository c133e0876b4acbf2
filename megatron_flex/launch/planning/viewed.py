"""A page of a Megatron run from its configuration alone: every site, every rank, what hooks would send."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.dispatch import Rows
from megatron_flex.costs import Links
from megatron_flex.dump import Dump
from megatron_flex.dump.plan import Held
from megatron_flex.errors import FlexError
from megatron_flex.launch.planning.arguments import Config, arguments
from megatron_flex.launch.planning.hooked import ROWS
from megatron_flex.launch.planning.model import built, quiet
from megatron_flex.launch.planning.planning import Run, changes
from megatron_flex.page import Page, of_sizes
from megatron_flex.page.pricing import prices
from megatron_flex.sites import Pattern, Site, SiteTable


def viewed(
    config: Config,
    *,
    match: Pattern = "**",
    mesh: Mapping[str, int] | None = None,
    world_size: int | None = None,
    links: Links | None = None,
    title: str = "",
) -> Page:
    """What a page shows of a configuration: no weights, no GPU, no ranks.

    Args:
        config: a YAML or JSON file or a mapping of Megatron's argument names, or a list of its flags.
        match: the sites that are shown, as for `flex.sites()`.
        mesh: sizes that count instead of the config's: `tp`, `pp`, `cp`, `ep`, `etp`, `dp`.
        world_size: ranks; else from `dp`, or with the least data parallel size that fits.
        links: how many ranks share a node.
        title: of the page; else of the model's sizes.

    Raises:
        FlexError: the configuration cannot be; the process has groups already; the pattern matches nothing.
    """
    with cpu.runtime(force=True), quiet():
        args = arguments(config, changes(mesh, world_size, None, None))
        whole = built(args)
    sites = SiteTable(whole.sites).match(match)
    run = Run(whole, args, 1, Dump("", "**"))
    known: dict[object, Held | str] = {}

    def held(site: Site) -> Held | str:
        if isinstance(site.tap, Rows):
            return ROWS
        key = (site.module.rpartition(".")[2], site.point, site.layout, site.shape)
        if key not in known:
            try:
                known[key] = next(run.activations([site]))
            except FlexError as error:
                known[key] = str(error)
        return known[key]

    sizes = {axes: {a.name: a.size for a in getattr(whole.mesh, axes)} for axes in ("axes", "experts")}
    grid = of_sizes(sizes["axes"], sizes["experts"])
    told = title or f"{args.num_layers or sum(whole.layers.values())} layers × {whole.config.hidden_size}"
    costs = prices(sites, held, grid, links)
    return Page(told, grid, [s.remote() for s in sites], costs=costs)
