"""`megatron-flex dump`: list, show, verify, export and prune what runs have dumped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from torch import Tensor

from megatron_flex.cli.command_options import (
    DumpArgument,
    ForceOption,
    IterationsOption,
    JsonOption,
    select_iterations,
    select_names,
)
from megatron_flex.cli.console_output import (
    count_words,
    format_bytes,
    format_series,
    make_console,
    print_json,
)
from megatron_flex.cli.dump_tables import (
    print_contents,
    print_pruned,
    print_statistics,
    print_verification,
)
from megatron_flex.dump.export import (
    EXPORT_FORMATS,
    ExportColumn,
    ExportFormat,
    ExportRows,
    check_export_target,
    read_blocks,
)
from megatron_flex.dump.export import export_arrays as write
from megatron_flex.dump.reader import DumpArray, OpenDump, open_dump
from megatron_flex.dump.tools.dump_cleanup import list_removals
from megatron_flex.dump.tools.dump_cleanup import prune_dump as remove
from megatron_flex.dump.tools.dump_contents import (
    get_named_array,
    list_dump_contents,
    list_parameter_names,
    list_site_names,
)
from megatron_flex.dump.tools.dump_verification import verify_dump as check
from megatron_flex.dump.tools.value_summary import ValueSummary, summarize_values
from megatron_flex.errors import DumpError, suggest_nearest
from megatron_flex.layout.layout_drawing import format_shape
from megatron_flex.progress import BYTES, ProgressBar, progress
from megatron_flex.sites import GRADIENT_SUFFIX

dump_app = typer.Typer(
    help="List, show, verify, export and prune dumps.", no_args_is_help=True, rich_markup_mode=None
)


@dump_app.command()
def ls(
    path: DumpArgument,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="A row for each layer, also where they are alike.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List runs, sites and parameters.

    With full shapes, dtypes, iterations, and bytes on disk.
    """
    found = list_dump_contents(path)
    if as_json:
        print_json(found.to_json())
    else:
        print_contents(make_console(), path, found, every)


@dump_app.command()
def show(
    path: DumpArgument,
    site: Annotated[
        str, typer.Argument(metavar="SITE", help="A name that `dump ls` lists.", show_default=False)
    ],
    iterations: IterationsOption = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", "-g", help="Those of its gradient beside it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell statistics of a site, with a histogram.

    Or of a parameter. They are over all samples and tokens, which are read block by block; pN is the value
    that N percent of all are below.
    """
    with open_dump(path) as dump:
        names = list_site_names(dump) + list_parameter_names(dump)
        wanted = [site, *([site + GRADIENT_SUFFIX] if gradients else [])]
        for name in wanted:
            if name not in names:
                raise DumpError(
                    f"{path} has no {name!r}{suggest_nearest(name, names)}; `dump ls` lists what it has"
                )
        arrays = {name: _select_array_iterations(get_named_array(dump, name), iterations) for name in wanted}
        found = _compute_statistics(arrays)
        described = {name: _describe_array(array) for name, array in arrays.items()}
        if as_json:
            print_json({name: {**described[name], **found[name].to_json()} for name in wanted})
            return
        shapes = format_shape(arrays[site].dims, arrays[site].shape)
        held = _describe_layouts(dump, arrays[site])
        what = [
            f"{shapes}, {described[site]['dtype']}, {format_bytes(arrays[site].nbytes)}",
            f"iterations {format_series(arrays[site].iterations)}; ranks held {held}",
        ]
        titles = [n.removeprefix(site).removeprefix(".") or "values" for n in wanted]
        print_statistics(make_console(), site, what, dict(zip(titles, found.values(), strict=True)))


def _describe_layouts(dump: OpenDump, array: DumpArray) -> str:
    """How ranks held it; of a dump that was continued in another layout each with its first iteration."""
    firsts: dict[int, int] = {}
    for which in array.iteration_keys:
        firsts.setdefault(id(dump.stored_iteration(which).run), which[0])
    found: dict[str, int] = {}
    for number in firsts.values():
        found.setdefault(array.at(number).layout, number)
    if len(found) < 2:
        return array.layout
    return "; ".join(f"from iteration {number} on {layout}" for layout, number in found.items())


def _describe_array(array: DumpArray) -> dict[str, object]:
    dtype = str(array.dtype).removeprefix("torch.")
    return {"dims": array.dims, "shape": array.shape, "dtype": dtype, "iterations": array.iterations}


def _compute_statistics(arrays: dict[str, DumpArray]) -> dict[str, ValueSummary]:
    twice = 2 * sum(a.nbytes for a in arrays.values())

    def read(bar: ProgressBar, array: DumpArray) -> Iterator[Tensor]:
        for one in ExportColumn(array.name, array).by_iteration():
            for _, block in read_blocks(one.array):
                yield block
                bar.advance(block.nbytes)

    with progress("reading", twice, BYTES) as bar:
        return {name: summarize_values(partial(read, bar, array)) for name, array in arrays.items()}


def _select_array_iterations(array: DumpArray, described: str | None) -> DumpArray:
    """The iterations that the option selects."""
    return array.at(*select_iterations(described, array.iterations)) if described is not None else array


@dump_app.command()
def export(
    path: DumpArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The file (safetensors) or folder to make.", show_default=False),
    ],
    to: Annotated[
        str, typer.Option("--format", "-f", metavar="|".join(EXPORT_FORMATS), help="What to write.")
    ] = "safetensors",
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites", "-s", metavar="PATTERN", help="Names or patterns; may be repeated.", show_default=False
        ),
    ] = None,
    iterations: IterationsOption = None,
    rows: Annotated[str, typer.Option(metavar="token|sample", help="For datasets: what a row is.")] = "token",
    per_iteration: Annotated[
        bool,
        typer.Option(
            "--per-iteration", help="A tensor NAME/100 for each iteration, instead of one over all."
        ),
    ] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write whole tensors to a common format.

    They are over (iteration, sample, token, features), for programs that know nothing of ranks.

    Everything is exported unless --sites says what; --sites '*.grad' are the gradients. Parameters have no
    samples: safetensors and Zarr take them.
    """
    check_export_target(out, to, force)
    with open_dump(path) as dump:
        names = list_site_names(dump) + ([] if to == "datasets" and not sites else list_parameter_names(dump))
        chosen = select_names(sites, names)
        columns = [
            ExportColumn(name, _select_array_iterations(get_named_array(dump, name), iterations))
            for name in chosen
        ]
        done = write(
            [c for c in columns if c.array.iteration_keys],
            out,
            cast(ExportFormat, to),
            rows=cast(ExportRows, rows),
            per_iteration=per_iteration,
            force=force,
        )
    if as_json:
        print_json({"path": str(done.path), "bytes": done.nbytes, "names": done.names, "notes": done.notes})
        return
    screen = make_console()
    for note in done.notes:
        screen.print(f"note: {note}", style="yellow", soft_wrap=True)
    screen.print(
        f"{done.path}: {count_words(len(done.names), 'array')}, {format_bytes(done.nbytes)}", soft_wrap=True
    )


@dump_app.command()
def verify(
    path: DumpArgument,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="The newest run still writes: what it has not closed yet is not incomplete."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every byte; name what is missing.

    Reads all files and compares checksums; lists missing and damaged parts by rank and site. Exit status
    1 if anything is.
    """
    found = check(path, live)
    if as_json:
        print_json(found.to_json())
    else:
        print_verification(make_console(), found)
    if not found.good:
        raise typer.Exit(1)


@dump_app.command()
def prune(
    path: DumpArgument,
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
    as_json: JsonOption = False,
) -> None:
    """Remove incomplete iterations and temporary files.

    Only of runs that have ended; complete iterations only with --keep-every or --before.

    The newest run is left alone, as a writer may have it open; --force says that none has.
    """
    found = list_removals(path, keep_every, before, force)
    freed = sum(r.nbytes for r in found)
    if not dry_run:
        freed = remove(path, found)
    if as_json:
        items = [
            {"path": str(r.path), "bytes": r.nbytes, "why": r.why, "run": r.run, "iteration": r.iteration}
            for r in found
        ]
        print_json({"removed": not dry_run, "bytes": freed, "items": items})
    else:
        print_pruned(make_console(), path, found, freed, dry_run)
