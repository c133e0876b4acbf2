"""A dump, and an array of it, in a notebook; what is damaged is told in words, and raises nothing."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from megatron_flex.dump.part_format import format_iteration_folder
from megatron_flex.dump.inventory import RUN_NUMBER, list_iteration_folder
from megatron_flex.dump.layouts import layout_from_json
from megatron_flex.dump.manifest import Manifest, SiteRecord
from megatron_flex.dump.words import format_bytes, format_shape, strip_numbers
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, Sizes
from megatron_flex.layout.layout_drawing import draw_layout
from megatron_flex.notebook_html import BAD_COLOUR, WARN_COLOUR, Markup, count_words, html_details, html_fragment, html_line, html_lines, html_table

if TYPE_CHECKING:
    from megatron_flex.dump.reading.array import DumpArray
    from megatron_flex.dump.reading.folders import DumpRun
    from megatron_flex.dump.reading.opened import OpenDump

MOST_DRAWN_RANKS = 64  # of more ranks that hold other parts a drawing shows two of each axis
TOLD = 8  # things that are missing, in one picture
VERIFY_HINT = "`megatron-flex dump verify` tells all"
TENSORS_HINT = "dump.sites and dump.parameters list the names; `megatron-flex dump ls` is a table"


def render_dump(dump: OpenDump) -> Markup:
    """Runs, iterations, tensors, what is missing; from names of files and manifests, none of the data."""
    head = f"OpenDump · {dump.path}"
    try:
        complete = dump.iterations
        kept = Counter(id(dump.written(which).run) for which in dump.passes)
        missing = _missing(dump)
    except FlexError as error:  # files are gone since it was opened
        return html_fragment(head, html_line(error, BAD_COLOUR))
    rows = list(dict.fromkeys(row for manifest in dump.manifests for row in _list_tensor_cells(manifest)))
    runs = html_table(
        (">run", "made", "framework", "mesh", ">ranks", ">iterations", ">whole, read from it"),
        ((*_make_run_cells(run), kept[id(run)]) for run in dump.runs),
        len(dump.runs),
        "dump.runs has them all",
    )
    groups = _group_tensor_cells(rows)
    tensors = html_table(("", "kind", "whole", "layout", ">stage"), groups, len(groups), TENSORS_HINT)
    text = f"{count_words(len(dump.runs), 'run')}, {count_words(len(complete), 'whole iteration')}{_format_range(complete)}"
    return html_fragment(
        head,
        html_line(f"{text}, {count_words(len(dump.places), 'site')}, {count_words(len(dump.parameters), 'parameter')}"),
        html_lines(missing, VERIFY_HINT, WARN_COLOUR, TOLD),
        html_details("runs", runs, opened=len(dump.runs) > 1),
        html_details("tensors", tensors, opened=True),
    )


def _make_run_cells(run: DumpRun) -> tuple[object, ...]:
    text = run.manifest
    mesh = " x ".join(f"{a}={n}" for a, n in text.sizes.items() if n > 1) or "one rank"
    return text.run, text.created, text.framework, mesh, len(text.ranks), len(run.folders)


def _format_range(numbers: list[int]) -> str:
    if not numbers:
        return ""
    return f" ({numbers[0]})" if len(numbers) == 1 else f" ({numbers[0]} to {numbers[-1]})"


def _missing(dump: OpenDump) -> list[str]:
    """What is not there, in words: manifests, parts, iterations that no run has whole."""
    known = {run.folder.name for run in dump.runs}
    others = sorted(f.name for f in dump.path.iterdir() if RUN_NUMBER.fullmatch(f.name) and f.name not in known)
    out = [f"{name} has no manifest: nothing of it can be read" for name in others]
    complete = set(dump.passes)
    for run in dump.runs:
        for number, run_of in run.folders:
            if (number, run_of) in complete:
                continue
            text = (
                f"iteration {number}"
                + (f", pass {run_of}" if run_of else "")
                + f" of {run.folder.name} is not whole"
            )
            if len(out) < TOLD:
                folder = list_iteration_folder(run.folder / format_iteration_folder(number, run_of), number, run_of)
                text += f": parts of rank {_some(list(folder.missing(list(run.coords))))} are missing"
            out.append(text)
    return out if complete else [*out, "no iteration is whole: nothing can be read yet"]


def _some(ranks: list[int], most: int = 6) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


TensorCells = tuple[str, str, str, str, int]


def _list_tensor_cells(manifest: Manifest) -> list[TensorCells]:
    """Name, kind, whole shape, layout and stage of each."""
    grads = " and gradient" if manifest.settings.get("gradients") is True else ""
    return [
        *(_make_tensor_cells(p, f"site{grads}", manifest) for p in manifest.sites),
        *(_make_tensor_cells(p, f"parameter{grads}", manifest) for p in manifest.parameters),
    ]


def _make_tensor_cells(place: SiteRecord, kind: str, manifest: Manifest) -> TensorCells:
    try:
        layout = layout_from_json(place.layout)
    except (FlexError, KeyError, TypeError, ValueError) as error:  # a damaged manifest is told, not raised
        return place.name, kind, " x ".join(map(str, place.shape)), f"cannot be read: {error}", place.stage
    text = "told by each part" if place.inferred else layout.describe(manifest.sizes)
    names = [dim.name for dim in layout.dims]
    if layout.permute is not None:
        names = [names[i] for i in layout.permute]
    complete = format_shape(names, place.shape) if len(names) == len(place.shape) else str(list(place.shape))
    return place.name, kind, "" if place.inferred else complete, text, place.stage


def _group_tensor_cells(rows: list[TensorCells]) -> list[tuple[object, ...]]:
    """One row for tensors that differ in numbers of layers, experts and stages alone."""
    groups: dict[tuple[str, ...], list[TensorCells]] = {}
    for row in rows:
        groups.setdefault((strip_numbers(row[0]), *row[1:4]), []).append(row)
    out: list[tuple[object, ...]] = []
    for (name, *about), alike in groups.items():
        stages = sorted({row[4] for row in alike})
        stage = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
        out.append((alike[0][0] if len(alike) == 1 else f"{name} ({len(alike)})", *about, stage))
    return out


def render_array(array: DumpArray) -> Markup:
    """Axes, dtype, bytes and who held which part; reads headers and no data."""
    try:
        dims, shape, iterations = array.dims, array.shape, array.iterations
        dtype, nbytes = str(array.dtype).removeprefix("torch."), array.nbytes
        layout, sizes = array.held
    except FlexError as error:
        return html_fragment(f"DumpArray · {array.name}", html_line(error, BAD_COLOUR))
    text = f"{format_shape(dims, shape)} · {dtype} · {format_bytes(nbytes)}"
    return html_fragment(
        f"DumpArray · {array.name}",
        html_line(text),
        html_line(f"{count_words(len(iterations), 'iteration')}{_format_range(iterations)}; read by .torch() or .numpy()"),
        html_line(f"as ranks held it: {layout.describe(sizes)}"),
        Markup(draw_shard_layout(layout, sizes)),
    )


def draw_shard_layout(layout: Layout, sizes: Sizes) -> str:
    """The drawing of a layout; for two ranks of each axis where the mesh has more parts than can be seen."""
    axes = {*layout.axes, *layout.shared}
    return draw_layout(layout, sizes if prod(sizes.get(a, 1) for a in axes) <= MOST_DRAWN_RANKS else None)
