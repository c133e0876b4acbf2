"""A dump, and an array of it, in a notebook; what is damaged is told in words, and raises nothing."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from megatron_flex.dump.files import iteration_folder
from megatron_flex.dump.inventory import RUN, iteration_in
from megatron_flex.dump.layouts import from_json
from megatron_flex.dump.manifest import Manifest, Place
from megatron_flex.dump.words import in_bytes, shape_in_words, unnumbered
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, Sizes
from megatron_flex.layout.drawing import drawing
from megatron_flex.markup import BAD, WARN, Markup, counted, details, fragment, line, lines, table

if TYPE_CHECKING:
    from megatron_flex.dump.reading.array import DumpArray
    from megatron_flex.dump.reading.folders import Run
    from megatron_flex.dump.reading.opened import OpenDump

RANKS = 64  # of more ranks that hold other parts a drawing shows two of each axis
TOLD = 8  # things that are missing, in one picture
VERIFY = "`megatron-flex dump verify` tells all"
TENSORS = "dump.sites and dump.parameters list the names; `megatron-flex dump ls` is a table"


def dump_in_html(dump: OpenDump) -> Markup:
    """Runs, iterations, tensors, what is missing; from names of files and manifests, none of the data."""
    head = f"OpenDump · {dump.path}"
    try:
        whole = dump.iterations
        kept = Counter(id(dump.written(which).run) for which in dump.passes)
        missing = _missing(dump)
    except FlexError as error:  # files are gone since it was opened
        return fragment(head, line(error, BAD))
    rows = list(dict.fromkeys(row for manifest in dump.manifests for row in _tensors(manifest)))
    runs = table(
        (">run", "made", "framework", "mesh", ">ranks", ">iterations", ">whole, read from it"),
        ((*_run(run), kept[id(run)]) for run in dump.runs),
        len(dump.runs),
        "dump.runs has them all",
    )
    groups = _grouped(rows)
    tensors = table(("", "kind", "whole", "layout", ">stage"), groups, len(groups), TENSORS)
    told = f"{counted(len(dump.runs), 'run')}, {counted(len(whole), 'whole iteration')}{_range(whole)}"
    return fragment(
        head,
        line(f"{told}, {counted(len(dump.places), 'site')}, {counted(len(dump.parameters), 'parameter')}"),
        lines(missing, VERIFY, WARN, TOLD),
        details("runs", runs, opened=len(dump.runs) > 1),
        details("tensors", tensors, opened=True),
    )


def _run(run: Run) -> tuple[object, ...]:
    told = run.manifest
    mesh = " x ".join(f"{a}={n}" for a, n in told.sizes.items() if n > 1) or "one rank"
    return told.run, told.created, told.framework, mesh, len(told.ranks), len(run.folders)


def _range(numbers: list[int]) -> str:
    if not numbers:
        return ""
    return f" ({numbers[0]})" if len(numbers) == 1 else f" ({numbers[0]} to {numbers[-1]})"


def _missing(dump: OpenDump) -> list[str]:
    """What is not there, in words: manifests, parts, iterations that no run has whole."""
    known = {run.folder.name for run in dump.runs}
    others = sorted(f.name for f in dump.path.iterdir() if RUN.fullmatch(f.name) and f.name not in known)
    out = [f"{name} has no manifest: nothing of it can be read" for name in others]
    whole = set(dump.passes)
    for run in dump.runs:
        for number, run_of in run.folders:
            if (number, run_of) in whole:
                continue
            told = (
                f"iteration {number}"
                + (f", pass {run_of}" if run_of else "")
                + f" of {run.folder.name} is not whole"
            )
            if len(out) < TOLD:
                folder = iteration_in(run.folder / iteration_folder(number, run_of), number, run_of)
                told += f": parts of rank {_some(list(folder.missing(list(run.coords))))} are missing"
            out.append(told)
    return out if whole else [*out, "no iteration is whole: nothing can be read yet"]


def _some(ranks: list[int], most: int = 6) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


Row = tuple[str, str, str, str, int]


def _tensors(manifest: Manifest) -> list[Row]:
    """Name, kind, whole shape, layout and stage of each."""
    grads = " and gradient" if manifest.settings.get("gradients") is True else ""
    return [
        *(_tensor(p, f"site{grads}", manifest) for p in manifest.sites),
        *(_tensor(p, f"parameter{grads}", manifest) for p in manifest.parameters),
    ]


def _tensor(place: Place, kind: str, manifest: Manifest) -> Row:
    try:
        layout = from_json(place.layout)
    except (FlexError, KeyError, TypeError, ValueError) as error:  # a damaged manifest is told, not raised
        return place.name, kind, " x ".join(map(str, place.shape)), f"cannot be read: {error}", place.stage
    told = "told by each part" if place.inferred else layout.describe(manifest.sizes)
    names = [dim.name for dim in layout.dims]
    if layout.permute is not None:
        names = [names[i] for i in layout.permute]
    whole = shape_in_words(names, place.shape) if len(names) == len(place.shape) else str(list(place.shape))
    return place.name, kind, "" if place.inferred else whole, told, place.stage


def _grouped(rows: list[Row]) -> list[tuple[object, ...]]:
    """One row for tensors that differ in numbers of layers, experts and stages alone."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((unnumbered(row[0]), *row[1:4]), []).append(row)
    out: list[tuple[object, ...]] = []
    for (name, *about), alike in groups.items():
        stages = sorted({row[4] for row in alike})
        stage = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
        out.append((alike[0][0] if len(alike) == 1 else f"{name} ({len(alike)})", *about, stage))
    return out


def array_in_html(array: DumpArray) -> Markup:
    """Axes, dtype, bytes and who held which part; reads headers and no data."""
    try:
        dims, shape, iterations = array.dims, array.shape, array.iterations
        dtype, nbytes = str(array.dtype).removeprefix("torch."), array.nbytes
        layout, sizes = array.held
    except FlexError as error:
        return fragment(f"DumpArray · {array.name}", line(error, BAD))
    told = f"{shape_in_words(dims, shape)} · {dtype} · {in_bytes(nbytes)}"
    return fragment(
        f"DumpArray · {array.name}",
        line(told),
        line(f"{counted(len(iterations), 'iteration')}{_range(iterations)}; read by .torch() or .numpy()"),
        line(f"as ranks held it: {layout.describe(sizes)}"),
        Markup(drawn(layout, sizes)),
    )


def drawn(layout: Layout, sizes: Sizes) -> str:
    """The drawing of a layout; for two ranks of each axis where the mesh has more parts than can be seen."""
    axes = {*layout.axes, *layout.shared}
    return drawing(layout, sizes if prod(sizes.get(a, 1) for a in axes) <= RANKS else None)
