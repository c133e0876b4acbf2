"""`megatron-flex sites`: where hooks can go, from a configuration or a dump."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from megatron_flex import cpu
from megatron_flex.cli.options import Json
from megatron_flex.cli.planning import Config, Flags, Mesh, World, mesh_said
from megatron_flex.cli.terminal import say_json
from megatron_flex.dump.layouts import from_json
from megatron_flex.dump.reading import open_dump
from megatron_flex.errors import FlexError
from megatron_flex.launch.planning.arguments import arguments
from megatron_flex.launch.planning.model import built, quiet
from megatron_flex.sites import Site, SiteTable
from megatron_flex.view import chosen, folded, layout_in_words, tree
from megatron_flex.view.terminal import show

Match = Annotated[
    str, typer.Option("--match", "-m", metavar="PATTERN", help="Only these; * is one step, ** many.")
]
Dumped = Annotated[
    Path | None,
    typer.Option("--dump", "-d", metavar="PATH", help="A dump, instead of a config.", show_default=False),
]
Stage = Annotated[
    int | None, typer.Option(metavar="N", help="Only what this pipeline stage owns.", show_default=False)
]
Every = Annotated[bool, typer.Option("--all", "-a", help="Each layer by itself, also where they are alike.")]


def sites(
    flags: Flags = None,
    config: Config = None,
    dump: Dumped = None,
    match: Match = "**",
    stage: Stage = None,
    world_size: World = None,
    mesh: Mesh = None,
    every: Every = False,
    as_json: Json = False,
) -> None:
    """Show a model as a tree, with every place where a hook can be.

    With layouts, whole shapes and stages, from a Megatron configuration alone, at any mesh, or from a dump.

    For example: megatron-flex sites --mesh tp=8,pp=16 -- --num-layers 126 ...
    """
    if [config is None, dump is None, not flags].count(False) != 1:
        raise FlexError("say once whose sites: --config FILE, --dump PATH, or a run's flags behind --")
    if dump is not None:
        if mesh or world_size:
            raise FlexError("--mesh and --world-size are for a configuration; a dump has its run's")
        found, sizes = _of_dump(dump)
    else:
        changes = {**(mesh_said(mesh) or {}), "world_size": world_size}
        with cpu.runtime(force=True), quiet():
            whole = built(arguments(str(config) if config is not None else cast(list[str], flags), changes))
        found, sizes = whole.sites, dict(whole.mesh.sizes)
    shown = chosen(SiteTable(found).match(match), stage)
    if as_json:
        say_json([_told(site, sizes) for site in shown])
        return
    root = tree(shown, sizes)
    axes = " x ".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "one rank"
    hidden = sum(bool(s.hidden) for s in found)
    head = f"{axes}: {len(found)} sites, {hidden} of them hidden"
    show(root if every else folded(root), head, sys.stdout)


def _of_dump(path: Path) -> tuple[list[Site], dict[str, int]]:
    """The sites of all runs of a dump, and the mesh of the last."""
    with open_dump(path) as opened:
        if not opened.manifests:
            raise FlexError(f"{path}: no run of it can be read; `megatron-flex dump verify` says why")
        found = {
            p.name: Site(
                p.name, from_json(p.layout), tuple(p.shape), p.stage, chunk=p.chunk, inferred=p.inferred
            )
            for manifest in opened.manifests
            for p in manifest.sites
        }
        return list(found.values()), dict(opened.manifests[-1].sizes)


def _told(site: Site, sizes: dict[str, int]) -> dict[str, object]:
    return {
        "name": site.name,
        "dims": list(site.dims),
        "shape": list(site.shape),
        "layout": layout_in_words(site.layout, sizes),
        "stage": site.stage,
        "chunk": site.chunk,
        "hidden": site.hidden,
        "fixed": site.fixed,
    }
