"""`megatron-flex dump`: list, show, verify, export and prune what runs have dumped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from megatron_flex.cli.listing import shape_in_words, tell_contents, tell_statistics
from megatron_flex.cli.options import (
    DumpPath,
    Force,
    Iterations,
    Json,
    chosen_iterations,
    chosen_names,
)
from megatron_flex.cli.terminal import console, counted, in_bytes, progress, say_json, series, table
from megatron_flex.dump.contents import array_of, contents
from megatron_flex.dump.exporting import export as write
from megatron_flex.dump.exporting.blocks import Column, blocks
from megatron_flex.dump.reading import DumpArray, OpenDump, open_dump
from megatron_flex.dump.statistics import Statistics, statistics
from megatron_flex.dump.upkeep import prune as remove
from megatron_flex.dump.upkeep import to_prune
from megatron_flex.dump.verifying import Verification
from megatron_flex.dump.verifying import verify as check
from megatron_flex.errors import DumpError, nearest
from megatron_flex.sites import GRAD

app = typer.Typer(
    help="List, show, verify, export and prune dumps.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def ls(path: DumpPath, as_json: Json = False) -> None:
    """List runs, sites and parameters: shapes of the whole, types, iterations, bytes on disk."""
    with progress("reading headers") as tell:
        found = contents(path, tell)
    if as_json:
        say_json(found.to_json())
    else:
        tell_contents(console(), path, found)


@app.command()
def show(
    path: DumpPath,
    site: Annotated[str, typer.Argument(metavar="SITE", help="A name that `dump ls` lists.", show_default=False)],
    iterations: Iterations = None,
    gradients: Annotated[bool, typer.Option("--gradients", "-g", help="Those of its gradient beside it.")] = False,
    as_json: Json = False,
) -> None:
    """Statistics and a histogram of a site or parameter, over all samples and tokens, read block by block."""
    with open_dump(path) as dump:
        names = names_of(dump)
        wanted = [site, *([site + GRAD] if gradients else [])]
        for name in wanted:
            if name not in names:
                raise DumpError(f"{path} has no {name!r}{nearest(name, names)}; `dump ls` lists what it has")
        arrays = {name: at(array_of(dump, name), iterations) for name in wanted}
        with progress("reading") as tell:
            found = _statistics(arrays, tell)
        first = arrays[site]
        shape = shape_in_words(first.dims, first.shape)
        kind = str(first.dtype).removeprefix("torch.")
        if as_json:
            said = {name: {"shape": a.shape, "dims": a.dims, "dtype": str(a.dtype).removeprefix("torch."),
                           "iterations": a.iterations, **found[name].to_json()}
                    for name, a in arrays.items()}  # fmt: skip
            say_json(said)
            return
        what = f"{shape}, {kind}, {in_bytes(first.nbytes)}; iterations {series(first.iterations)}; {first.layout}"
        titles = ("value", "gradient")
        if site.endswith(GRAD):
            titles = ("gradient", "its gradient")
        tell_statistics(console(), site, what, dict(zip(titles, found.values(), strict=False)))
