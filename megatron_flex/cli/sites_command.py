"""`megatron-flex sites`: where hooks can go, from a configuration or a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from megatron_flex.cli.command_options import JsonOption
from megatron_flex.cli.estimate_command import (
    ConfigOption,
    FlagsArgument,
    MeshOption,
    WorldSizeOption,
    parse_mesh_sizes,
)
from megatron_flex.cli.json_output import print_json
from megatron_flex.cli.spinner import spinner
from megatron_flex.dump.reader import open_dump
from megatron_flex.dump.schema import layout_from_json
from megatron_flex.errors import FlexError
from megatron_flex.estimate import ConfiguredRun
from megatron_flex.mesh import describe_sizes
from megatron_flex.sites import Site, SiteTable
from megatron_flex.view import build_tree, describe_layout, fold_layers, sites_of_stage
from megatron_flex.view.tree_document import describe_tree
from megatron_flex.wording import count_words

MatchOption = Annotated[
    str,
    typer.Option(
        "--match",
        "-m",
        metavar="PATTERN",
        help="Only hook points that match; * is one part of a name, ** any number.",
    ),
]
DumpOption = Annotated[
    Path | None,
    typer.Option(
        "--dump", "-d", metavar="PATH", help="A dump to show instead of a configuration.", show_default=False
    ),
]
StageOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Only the hook points of this pipeline stage.", show_default=False),
]
AllLayersOption = Annotated[
    bool, typer.Option("--all", "-a", help="Show each layer separately, even if layers are alike.")
]


def sites(
    flags: FlagsArgument = None,
    config: ConfigOption = None,
    dump: DumpOption = None,
    match: MatchOption = "**",
    stage: StageOption = None,
    world_size: WorldSizeOption = None,
    mesh: MeshOption = None,
    every: AllLayersOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a model as a tree, with every hook point.

    The tree has layouts, full shapes and pipeline stages. It is made from a Megatron configuration alone, for
    any mesh, or from a dump.

    For example: megatron-flex sites --mesh tp=8,pp=16 -- --num-layers 126 ...
    """
    if [config is None, dump is None, not flags].count(False) != 1:
        raise FlexError(
            "give one source of hook points: --config FILE, --dump PATH, or a run's flags after --"
        )
    if dump is not None:
        if mesh or world_size:
            raise FlexError("--mesh and --world-size are for a configuration; a dump has its run's")
        all_sites, sizes, layers = _read_dump_sites(dump)
    else:
        run = str(config) if config is not None else cast(list[str], flags)
        with spinner("building the model's shapes"):
            model = ConfiguredRun(run, mesh=parse_mesh_sizes(mesh), world_size=world_size).model
        all_sites, sizes, layers = model.sites, dict(model.mesh.sizes), ""
    shown = sites_of_stage(SiteTable(all_sites, layers).match(match), stage)
    if as_json:
        print_json([_site_to_json(site, sizes) for site in shown])
        return
    root = build_tree(shown, sizes)
    hidden = sum(bool(s.hidden) for s in all_sites)
    head = f"{describe_sizes(sizes)}: {count_words(len(all_sites), 'site')}" + (
        f", {hidden} of them hidden" if hidden else ""
    )
    describe_tree(root if every else fold_layers(root), "", head).print()


def _read_dump_sites(path: Path) -> tuple[list[Site], dict[str, int], str]:
    """The sites of all runs of a dump, the mesh of the last, and the kinds of the model's layers."""
    with open_dump(path) as opened:
        if not opened.manifests:
            raise FlexError(f"{path}: no run of it can be read; `megatron-flex dump verify` gives the reason")
        sites = {
            p.name: Site(
                p.name,
                layout_from_json(p.layout),
                tuple(p.shape),
                p.stage,
                chunk=p.chunk,
                inferred=p.inferred,
            )
            for manifest in opened.manifests
            for p in manifest.sites
        }
        return list(sites.values()), dict(opened.manifests[-1].sizes), opened.gpt_names.pattern


def _site_to_json(site: Site, sizes: dict[str, int]) -> dict[str, object]:
    return {
        "name": site.name,
        "dims": list(site.dims),
        "shape": list(site.shape),
        "layout": describe_layout(site.layout, sizes),
        "stage": site.stage,
        "chunk": site.chunk,
        "hidden": site.hidden,
        "fixed": site.read_only_reason,
    }
