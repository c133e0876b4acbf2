"""A dump, and an array of it, in a notebook; what is damaged is told in words, and raises nothing."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from megatron_flex.dump.inventory import RunFolder, run_folders
from megatron_flex.dump.layouts import from_json
from megatron_flex.dump.manifest import Manifest, Place
from megatron_flex.dump.words import in_bytes, shape_in_words, unnumbered
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, Sizes
from megatron_flex.layout.drawing import drawing
from megatron_flex.markup import BAD, WARN, Markup, counted, details, fragment, line, lines, table
from megatron_flex.sites import GRAD

if TYPE_CHECKING:
    from megatron_flex.dump.reading.array import DumpArray
    from megatron_flex.dump.reading.opened import OpenDump

RANKS = 64  # of more ranks that hold other parts a drawing shows two of each axis
VERIFY = "`megatron-flex dump verify` tells all"
TENSORS = "dump.sites and dump.parameters list the names; `megatron-flex dump ls` is a table"


def dump_in_html(dump: OpenDump) -> Markup:
    """Runs, iterations, tensors, what is missing; from names of files and manifests, none of the data."""
    try:
        folders = run_folders(dump.path)
    except FlexError as error:  # the folder is gone since it was opened
        return fragment(f"OpenDump · {dump.path}", line(error, BAD))
    whole = sorted({f.number for r in folders for f in r.iterations if r.ranks and not f.missing(r.ranks)})
    rows = [row for manifest in dump.manifests for row in _tensors(manifest)]
    rows = list(dict.fromkeys(rows))
    sites = sum("site" in row[1] for row in rows)
    nbytes = sum(f.nbytes for r in folders for f in r.iterations)
    head = f"OpenDump · {dump.path}"
    told = (
        f"{counted(len(folders), 'run')}, {counted(len(whole), 'whole iteration')}"
        f"{_range(whole)}, {counted(len(dump.places), 'site')}, {in_bytes(nbytes)}"
    )
    runs = table(
        (">run", "made", "framework", "mesh", ">ranks", "whole iterations"),
        (_run(folder) for folder in folders),
        len(folders),
        "dump.runs has them all",
    )
    groups = _grouped(rows)
    tensors = table(("", "kind", "whole", "layout", ">stage"), groups, len(groups), TENSORS)
    missing = _missing(folders)
    lost = lines(missing, VERIFY, WARN, 8) if missing else Markup("")
    shown = details(f"{counted(len(rows), 'tensor')}, {sites} of them at sites", tensors, opened=True)
    return fragment(head, line(told), lost, details("runs", runs, opened=len(folders) > 1), shown)


def _run(folder: RunFolder) -> tuple[object, ...]:
    manifest, ranks = folder.manifest, folder.ranks
    whole = [f.number for f in folder.iterations if ranks and not f.missing(ranks)]
    if manifest is None:
        return folder.number, "", "", f"no manifest: {folder.damage}", len(ranks), len(whole)
    mesh = " x ".join(f"{a}={n}" for a, n in manifest.sizes.items() if n > 1) or "one rank"
    return folder.number, manifest.created, manifest.framework, mesh, len(ranks), f"{len(whole)}{_range(whole)}"


def _range(numbers: list[int]) -> str:
    if not numbers:
        return ""
    return f" ({numbers[0]})" if len(numbers) == 1 else f" ({numbers[0]} to {numbers[-1]})"


def _missing(folders: list[RunFolder]) -> list[str]:
    """What is not there, in words: manifests, parts, iterations that no run has."""
    out = [f"run {r.number} has no manifest that can be read: {r.damage}" for r in folders if r.manifest is None]
    whole = {
        (f.number, f.run_of) for r in folders for f in r.iterations if r.ranks and not f.missing(r.ranks)
    }
    for run in folders:
        for folder in run.iterations:
            gone = folder.missing(run.ranks)
            if not gone or (folder.number, folder.run_of) in whole:
                continue
            ranks = list(gone)
            who = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
            out.append(
                f"iteration {folder.number} of run {run.number} is not whole: parts of rank {who} are missing"
            )
    if not whole:
        out.append("no iteration is whole: nothing can be read yet")
    return out


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
    what = "gradient" if array.name.endswith(GRAD) else "values"
    told = f"{shape_in_words(dims, shape)} · {dtype} · {in_bytes(nbytes)} · {what}"
    shown = f"iterations {iterations[0]} to {iterations[-1]}" if len(iterations) > 1 else f"iteration {iterations[0]}" if iterations else "no iteration"
    return fragment(
        f"DumpArray · {array.name}",
        line(told),
        line(f"{shown}; nothing is read until .torch() or .numpy()"),
        line(f"as ranks held it: {layout.describe(sizes)}"),
        Markup(drawn(layout, sizes)),
    )


def drawn(layout: Layout, sizes: Sizes) -> str:
    """The drawing of a layout; for two ranks of each axis where the mesh has more parts than can be seen."""
    axes = {*layout.axes, *layout.shared}
    return drawing(layout, sizes if prod(sizes.get(a, 1) for a in axes) <= RANKS else None)
