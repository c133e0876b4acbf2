"""A page of a Megatron run from its configuration alone: every site, every rank, what hooks would send."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_flex import cpu
from megatron_flex.adapters.megatron_core.dispatch import ExpertRows
from megatron_flex.costs import Links
from megatron_flex.dump import Dump
from megatron_flex.dump.plan import EstimatedTensor
from megatron_flex.errors import FlexError
from megatron_flex.launch.planning.megatron_arguments import RunConfig, parse_arguments
from megatron_flex.launch.planning.hooked import ROUTED_ROWS_REASON
from megatron_flex.launch.planning.meta_model import describe_model, silence_megatron
from megatron_flex.launch.planning.planning import TensorSizes, collect_overrides
from megatron_flex.page import Page, grid_of_sizes
from megatron_flex.page.site_estimates import estimate_sites
from megatron_flex.sites import Pattern, Site, SiteTable


def make_configuration_page(
    config: RunConfig,
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
    with cpu.runtime(force=True), silence_megatron():
        args = parse_arguments(config, collect_overrides(mesh, world_size, None, None))
        description = describe_model(args)
    sites = SiteTable(description.sites).match(match)
    run = TensorSizes(description, args, 1, Dump("", "**"))
    known: dict[object, EstimatedTensor | str] = {}

    def held(site: Site) -> EstimatedTensor | str:
        if isinstance(site.tap, ExpertRows):
            return ROUTED_ROWS_REASON
        key = (site.module.rpartition(".")[2], site.point, site.layout, site.shape)
        if key not in known:
            try:
                known[key] = next(run.activations([site]))
            except FlexError as error:
                known[key] = str(error)
        return known[key]

    sizes = {axes: {a.name: a.size for a in getattr(description.mesh, axes)} for axes in ("axes", "experts")}
    grid = grid_of_sizes(sizes["axes"], sizes["experts"])
    heading = title or f"{args.num_layers or sum(description.layers.values())} layers × {description.config.hidden_size}"
    costs = estimate_sites(sites, held, grid, links)
    return Page(heading, grid, [s.remote() for s in sites], costs=costs)
