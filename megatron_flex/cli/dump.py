"""`megatron-flex dump`: list, show, verify, export and prune what runs have dumped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from torch import Tensor

from megatron_flex.cli.listing import (
    tell_contents,
    tell_pruned,
    tell_statistics,
    tell_verification,
)
from megatron_flex.cli.options import (
    DumpPath,
    Force,
    Iterations,
    Json,
    chosen_iterations,
    chosen_names,
)
from megatron_flex.cli.terminal import console, counted, in_bytes, say_json, series
from megatron_flex.dump.contents import array_of, contents, parameter_names, site_names
from megatron_flex.dump.exporting import FORMATS, Format, Rows, check_target
from megatron_flex.dump.exporting import export as write
from megatron_flex.dump.exporting.blocks import Column, blocks
from megatron_flex.dump.reading import DumpArray, open_dump
from megatron_flex.dump.statistics import Statistics, statistics
from megatron_flex.dump.upkeep import prune as remove
from megatron_flex.dump.upkeep import to_prune
from megatron_flex.dump.verifying import verify as check
from megatron_flex.dump.words import shape_in_words
from megatron_flex.errors import DumpError, nearest
from megatron_flex.progress import BYTES, Bar, progress
from megatron_flex.sites import GRAD

app = typer.Typer(
    help="List, show, verify, export and prune dumps.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def ls(
    path: DumpPath,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="A row for each layer, also where they are alike.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List runs, sites and parameters.

    With shapes of the whole, types, iterations, and bytes on disk.
    """
    found = contents(path)
    if as_json:
        say_json(found.to_json())
    else:
        tell_contents(console(), path, found, every)


@app.command()
def show(
    path: DumpPath,
    site: Annotated[
        str, typer.Argument(metavar="SITE", help="A name that `dump ls` lists.", show_default=False)
    ],
    iterations: Iterations = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", "-g", help="Those of its gradient beside it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tell statistics of a site, with a histogram.

    Or of a parameter. They are over all samples and tokens, which are read block by block; pN is the value
    that N percent of all are below.
    """
    with open_dump(path) as dump:
        names = site_names(dump) + parameter_names(dump)
        wanted = [site, *([site + GRAD] if gradients else [])]
        for name in wanted:
            if name not in names:
                raise DumpError(f"{path} has no {name!r}{nearest(name, names)}; `dump ls` lists what it has")
        arrays = {name: _at(array_of(dump, name), iterations) for name in wanted}
        found = _statistics(arrays)
        said = {name: _about(array) for name, array in arrays.items()}
        if as_json:
            say_json({name: {**said[name], **found[name].to_json()} for name in wanted})
            return
        shapes = shape_in_words(arrays[site].dims, arrays[site].shape)
        what = [
            f"{shapes}, {said[site]['dtype']}, {in_bytes(arrays[site].nbytes)}",
            f"iterations {series(arrays[site].iterations)}; ranks held {arrays[site].layout}",
        ]
        titles = [n.removeprefix(site).removeprefix(".") or "values" for n in wanted]
        tell_statistics(console(), site, what, dict(zip(titles, found.values(), strict=True)))


def _about(array: DumpArray) -> dict[str, object]:
    dtype = str(array.dtype).removeprefix("torch.")
    return {"dims": array.dims, "shape": array.shape, "dtype": dtype, "iterations": array.iterations}


def _statistics(arrays: dict[str, DumpArray]) -> dict[str, Statistics]:
    twice = 2 * sum(a.nbytes for a in arrays.values())

    def read(bar: Bar, array: DumpArray) -> Iterator[Tensor]:
        for one in Column(array.name, array).by_iteration():
            for _, block in blocks(one.array):
                yield block
                bar.advance(block.nbytes)

    with progress("reading", twice, BYTES) as bar:
        return {name: statistics(partial(read, bar, array)) for name, array in arrays.items()}


def _at(array: DumpArray, said: str | None) -> DumpArray:
    """Of the iterations those that are said."""
    return array.at(*chosen_iterations(said, array.iterations)) if said is not None else array


@app.command()
def export(
    path: DumpPath,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The file (safetensors) or folder to make.", show_default=False),
    ],
    to: Annotated[
        str, typer.Option("--format", "-f", metavar="|".join(FORMATS), help="What to write.")
    ] = "safetensors",
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites", "-s", metavar="PATTERN", help="Names or patterns; may be repeated.", show_default=False
        ),
    ] = None,
    iterations: Iterations = None,
    rows: Annotated[str, typer.Option(metavar="token|sample", help="For datasets: what a row is.")] = "token",
    per_iteration: Annotated[
        bool,
        typer.Option(
            "--per-iteration", help="A tensor NAME/100 for each iteration, instead of one over all."
        ),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write whole tensors to a common format.

    They are over (iteration, sample, token, features), for programs that know nothing of ranks.

    Everything is exported unless --sites says what; --sites '*.grad' are the gradients. Parameters have no
    samples: safetensors and Zarr take them.
    """
    check_target(out, to, force)
    with open_dump(path) as dump:
        names = site_names(dump) + ([] if to == "datasets" and not sites else parameter_names(dump))
        chosen = chosen_names(sites, names)
        columns = [Column(name, _at(array_of(dump, name), iterations)) for name in chosen]
        done = write(
            [c for c in columns if c.array.passes],
            out,
            cast(Format, to),
            rows=cast(Rows, rows),
            per_iteration=per_iteration,
            force=force,
        )
    if as_json:
        say_json({"path": str(done.path), "bytes": done.nbytes, "names": done.names, "notes": done.notes})
        return
    screen = console()
    for note in done.notes:
        screen.print(f"note: {note}", style="yellow", soft_wrap=True)
    screen.print(f"{done.path}: {counted(len(done.names), 'array')}, {in_bytes(done.nbytes)}", soft_wrap=True)


@app.command()
def verify(
    path: DumpPath,
    live: Annotated[
        bool,
        typer.Option("--live", help="The newest run still writes: what it has not closed yet is not torn."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every byte; name what is missing.

    All is read and compared with its checksum; what is lost or wrong is told by rank and site. Exit status
    1 if anything is.
    """
    found = check(path, live)
    if as_json:
        say_json(found.to_json())
    else:
        tell_verification(console(), found)
    if not found.good:
        raise typer.Exit(1)


@app.command()
def prune(
    path: DumpPath,
    keep_every: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Of whole iterations keep the multiples of N only.", show_default=False
        ),
    ] = None,
    before: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Only whole iterations below N go: those that --keep-every does not keep, or all.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="The newest run, too: it is over, and nothing writes to it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove torn iterations and temporary files.

    Of runs that are over; whole iterations only if told to, by --keep-every or --before.

    The newest run is left alone, as a writer may have it open; --force says that none has.
    """
    found = to_prune(path, keep_every, before, force)
    freed = sum(r.nbytes for r in found)
    if not dry_run:
        freed = remove(path, found)
    if as_json:
        items = [
            {"path": str(r.path), "bytes": r.nbytes, "why": r.why, "run": r.run, "iteration": r.iteration}
            for r in found
        ]
        say_json({"removed": not dry_run, "bytes": freed, "items": items})
    else:
        tell_pruned(console(), path, found, freed, dry_run)
