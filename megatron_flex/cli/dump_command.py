"""`megatron-flex dump`: list, show, verify, export and prune what runs have dumped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

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
from megatron_flex.cli.json_output import print_json
from megatron_flex.document import Note, make_console
from megatron_flex.dump.export import (
    ExportColumn,
    ExportRows,
    read_blocks,
)
from megatron_flex.dump.export import export_arrays as write
from megatron_flex.dump.export_target import EXPORT_FORMATS, ExportFormat, check_export_target
from megatron_flex.dump.reader import DumpArray, OpenDump, open_dump
from megatron_flex.dump.tools.dump_cleanup import describe_removals, list_removals
from megatron_flex.dump.tools.dump_cleanup import prune_dump as remove
from megatron_flex.dump.tools.dump_contents import (
    get_named_array,
    list_dump_contents,
    list_parameter_names,
    list_site_names,
)
from megatron_flex.dump.tools.dump_verification import verify_dump as check
from megatron_flex.dump.tools.value_summary import (
    ValueSummary,
    count_passes,
    describe_values,
    list_values,
    summarize_values,
)
from megatron_flex.errors import DumpError, FlexError, suggest_nearest
from megatron_flex.estimate import HookSpec, parse_read_hook
from megatron_flex.layout.layout_drawing import format_shape
from megatron_flex.progress import BYTES, ProgressBar, format_bytes, progress
from megatron_flex.runtime.selection import CaptureSelection
from megatron_flex.sites import GRADIENT_SUFFIX, HEAD_DIMS, find_recorded_names
from megatron_flex.wording import count_words, format_series

ENTRY_AXES = {"positions": ("token",), "samples": ("sample",), "heads": HEAD_DIMS}  # of a dumped array
dump_app = typer.Typer(
    add_completion=False,
    help="List, show, verify, export and prune dumps.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dump_app.command()
def ls(
    path: DumpArgument,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Print a row for each layer, even if layers are alike.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List runs, hook points and parameters.

    The list has full shapes, dtypes, iterations and bytes on disk.
    """
    contents = list_dump_contents(path)
    if as_json:
        print_json(contents.to_json())
    else:
        contents.to_document(str(path), every).print()


@dump_app.command()
def show(
    path: DumpArgument,
    site: Annotated[
        str,
        typer.Argument(
            metavar="SITE",
            help="A hook point, module or parameter: its name, the end of its name, or a pattern. "
            "@gradient, @positions=-1, @samples=0:4, @heads=0,3 and @neurons=7 after the name select a part.",
            show_default=False,
        ),
    ],
    iterations: IterationsOption = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", "-g", help="Also show the statistics of the gradient.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show statistics of a hook point or parameter, with a histogram.

    If a pattern matches several, each has one row. The statistics are over all samples and tokens, which are
    read in blocks, in bounded memory. pN is the N-th percentile.
    """
    with open_dump(path) as dump:
        request = parse_read_hook(site, "SITE")
        titles = _find_shown_names(dump, request, gradients)
        arrays = {name: _select_array_iterations(get_named_array(dump, name), iterations) for name in titles}
        if request.selection is not None:
            arrays = {name: select_entries(array, request.selection) for name, array in arrays.items()}
        summaries = _compute_statistics(arrays)
        if as_json:
            print_json(
                {name: {**_describe_array(arrays[name]), **summaries[name].to_json()} for name in arrays}
            )
            return
        first = next(iter(arrays))
        if len(arrays) > 1 + gradients:
            list_values(summaries).print()
            return
        shape, kind = format_shape(arrays[first].dims, arrays[first].shape), arrays[first].dtype
        numbers = arrays[first].iterations
        part = "".join(f"@{word}" for word in site.split("@")[1:] if word != "gradient")
        notes = [
            Note(first + part, "strong"),
            Note(f"{shape}, {str(kind).removeprefix('torch.')}, {format_bytes(arrays[first].nbytes)}"),
            Note(
                f"{'iteration' if len(numbers) == 1 else 'iterations'} {format_series(numbers)}; "
                f"each rank held {_describe_layouts(dump, arrays[first])}"
            ),
        ]
        columns = dict(zip(titles.values(), summaries.values(), strict=True))
        describe_values(first + part, notes, columns).print()


def _find_shown_names(dump: OpenDump, request: HookSpec, gradients: bool) -> dict[str, str]:
    """The names to show, each with its title: `values`, or `grad` for a gradient beside them.

    Raises:
        DumpError: the dump has no such name, or no gradient of it.
        FlexError: a reduction is wanted.
    """
    if request.selection is not None and request.selection.reduce is not None:
        raise FlexError(f"SITE {request.asked}: statistics are over all entries; leave out the reduction")
    names = list_site_names(dump) + list_parameter_names(dump)
    text = str(request.pattern) + (GRADIENT_SUFFIX if request.gradient else "")
    out: dict[str, str] = {}
    for name in find_recorded_names(text, names, str(dump.path), dump.gpt_names.pattern) or [text]:
        base, call, number = name.partition("#")
        beside = [base + GRADIENT_SUFFIX + call + number] if gradients else []
        for full in (name, *beside):
            if full not in names:
                raise DumpError(
                    f"{dump.path} has no {full!r}{suggest_nearest(full, names)}; `dump ls` lists what it has",
                    path=dump.path,
                )
        out |= {name: "values", **dict.fromkeys(beside, "grad")}
    return out


def _describe_layouts(dump: OpenDump, array: DumpArray) -> str:
    """How ranks held it; of a dump that was continued in another layout each with its first iteration."""
    firsts: dict[int, int] = {}
    for which in array.iteration_keys:
        firsts.setdefault(id(dump.stored_iteration(which).run), which[0])
    firsts_by_layout: dict[str, int] = {}
    for number in firsts.values():
        firsts_by_layout.setdefault(array.at(number).layout, number)
    if len(firsts_by_layout) < 2:
        return array.layout
    return "; ".join(f"from iteration {number} on {layout}" for layout, number in firsts_by_layout.items())


def _describe_array(array: DumpArray) -> dict[str, object]:
    dtype = str(array.dtype).removeprefix("torch.")
    return {"dims": array.dims, "shape": array.shape, "dtype": dtype, "iterations": array.iterations}


def select_entries(array: DumpArray, selection: CaptureSelection) -> DumpArray:
    """The entries of an array that a selection names.

    Raises:
        FlexError: the array has no such axis.
    """
    key: list[Any] = [slice(None)] * len(array.dims)
    dims = list(array.dims)
    for what, axes in {**ENTRY_AXES, "neurons": dims[-1:]}.items():
        entries = getattr(selection.select, what)
        if entries is None:
            continue
        at = next((dims.index(axis) for axis in axes if axis in dims), None)
        if at is None:
            raise FlexError(f"@{what}: {array.name} has the axes {', '.join(dims)}, not {what}")
        key[at] = [entries] if isinstance(entries, int) else entries
    return array[tuple(key)]


def _compute_statistics(arrays: dict[str, DumpArray]) -> dict[str, ValueSummary]:
    nbytes = sum(a.nbytes * count_passes(a.dtype) for a in arrays.values())

    def read(bar: ProgressBar, array: DumpArray) -> Iterator[Tensor]:
        for column in ExportColumn(array.name, array).by_iteration():
            for block in read_blocks(column.array):
                yield block
                bar.advance(block.nbytes)

    with progress("reading", nbytes, BYTES) as bar:
        return {name: summarize_values(partial(read, bar, array)) for name, array in arrays.items()}


def _select_array_iterations(array: DumpArray, described: str | None) -> DumpArray:
    """The iterations that the option selects."""
    return array.at(*select_iterations(described, array.iterations)) if described is not None else array


@dump_app.command()
def export(
    path: DumpArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The file (safetensors) or folder to write.", show_default=False),
    ],
    to: Annotated[
        str, typer.Option("--format", "-f", metavar="|".join(EXPORT_FORMATS), help="The format to write.")
    ] = "safetensors",
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--sites",
            "-s",
            metavar="PATTERN",
            help="Only hook points and parameters of this name or pattern; may be repeated.",
            show_default=False,
        ),
    ] = None,
    iterations: IterationsOption = None,
    rows: Annotated[
        str, typer.Option(metavar="token|sample", help="For datasets: whether a row is a token or a sample.")
    ] = "token",
    per_iteration: Annotated[
        bool,
        typer.Option(
            "--per-iteration",
            help="Write one tensor NAME/100 for each iteration, instead of one tensor for all iterations.",
        ),
    ] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write full tensors to a common format.

    The tensors have the dims (iteration, sample, token, features) and no shards.

    Without --sites, everything is exported. --sites '*.grad' selects the gradients. Parameters can be
    exported as safetensors and Zarr, but not as datasets, because they have no samples.
    """
    check_export_target(out, to, force)
    with open_dump(path) as dump:
        names = list_site_names(dump) + ([] if to == "datasets" and not sites else list_parameter_names(dump))
        chosen = select_names(sites, names, layers=dump.gpt_names.pattern)
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
            "--live", help="The newest run is still writing: do not report its open files as incomplete."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every byte, and name what is missing or damaged.

    The command reads all files and compares checksums. Missing and damaged parts are listed by rank and hook
    point. The exit status is 1 if there are any.
    """
    verification = check(path, live)
    if as_json:
        print_json(verification.to_json())
    else:
        verification.to_document().print()
    if not verification.good:
        raise typer.Exit(1)


@dump_app.command()
def prune(
    path: DumpArgument,
    keep_every: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Of the complete iterations, keep only multiples of N.", show_default=False
        ),
    ] = None,
    before: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of the complete iterations, remove only those below N: all, or what --keep-every excludes.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also prune the newest run. Use it only if no process writes to this run."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove incomplete iterations and temporary files.

    Complete iterations are removed only with --keep-every or --before.

    The newest run is not pruned, because a process may still write to it, unless --force is given.
    """
    removals = list_removals(path, keep_every, before, force)
    freed = sum(r.nbytes for r in removals)
    if not dry_run:
        freed = remove(path, removals)
    if as_json:
        items = [
            {"path": str(r.path), "bytes": r.nbytes, "why": r.why, "run": r.run, "iteration": r.iteration}
            for r in removals
        ]
        print_json({"removed": not dry_run, "bytes": freed, "items": items})
    else:
        describe_removals(path, removals, freed, dry_run).print()
