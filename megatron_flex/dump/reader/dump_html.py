"""A dump, and an array of it, in a notebook; damage is shown as text, and raises no error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from megatron_flex.dump.reader.missing_parts import MOST_DETAILED
from megatron_flex.dump.reader.stored_runs import DumpRun
from megatron_flex.dump.schema import Manifest, SiteRecord, layout_from_json
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, Sizes
from megatron_flex.layout.layout_drawing import draw_layout, format_shape
from megatron_flex.notebook_html import (
    BAD_COLOUR,
    WARN_COLOUR,
    Markup,
    count_words,
    html_details,
    html_fragment,
    html_line,
    html_lines,
    html_table,
)
from megatron_flex.progress import format_bytes
from megatron_flex.sites import strip_numbers

if TYPE_CHECKING:
    from megatron_flex.dump.reader.dump_array import DumpArray
    from megatron_flex.dump.reader.dump_reader import OpenDump

MOST_DRAWN_RANKS = 64  # of more ranks that hold other parts a drawing shows two of each axis
REPLACED_HINT = "dump.replaced lists all"
VERIFY_HINT = "`megatron-flex dump verify` lists all"
TENSORS_HINT = "dump.sites and dump.parameters list the names; `megatron-flex dump ls` is a table"


def render_dump(dump: OpenDump) -> Markup:
    """Runs, iterations, tensors, what is missing; from names of files and manifests, none of the data."""
    head = f"OpenDump · {dump.path}"
    try:
        complete = dump.iterations
        kept = Counter(id(dump.stored_iteration(which).run) for which in dump.iteration_keys)
        missing, replaced = dump.missing, dump.replaced
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
    tensors = html_table(("", "kind", "full shape", "layout", ">stage"), groups, len(groups), TENSORS_HINT)
    text = (
        f"{count_words(len(dump.runs), 'run')}, {count_words(len(complete), 'complete iteration')}"
        f"{_format_range(complete)}"
    )
    return html_fragment(
        head,
        html_line(
            f"{text}, {count_words(len(dump.site_records), 'site')}, "
            f"{count_words(len(dump.parameters), 'parameter')}"
        ),
        html_lines(missing, VERIFY_HINT, WARN_COLOUR, MOST_DETAILED),
        html_lines(replaced, REPLACED_HINT, WARN_COLOUR, MOST_DETAILED),
        html_details("runs", runs, opened=len(dump.runs) > 1),
        html_details("tensors", tensors, opened=True),
    )


def _make_run_cells(run: DumpRun) -> tuple[object, ...]:
    text = run.manifest
    mesh = " x ".join(f"{a}={n}" for a, n in text.sizes.items() if n > 1) or "one rank"
    return text.run, text.created, text.framework, mesh, len(text.ranks), len(run.folders)


def _format_range(numbers: Sequence[int]) -> str:
    if not numbers:
        return ""
    return f" ({numbers[0]})" if len(numbers) == 1 else f" ({numbers[0]} to {numbers[-1]})"


TensorCells = tuple[str, str, str, str, int]


def _list_tensor_cells(manifest: Manifest) -> list[TensorCells]:
    """Name, kind, full shape, layout and stage of each."""
    grads = " and gradient" if manifest.settings.get("gradients") is True else ""
    return [
        *(_make_tensor_cells(p, f"site{grads}", manifest) for p in manifest.sites),
        *(_make_tensor_cells(p, f"parameter{grads}", manifest) for p in manifest.parameters),
    ]


def _make_tensor_cells(record: SiteRecord, kind: str, manifest: Manifest) -> TensorCells:
    try:
        layout = layout_from_json(record.layout)
    except (FlexError, KeyError, TypeError, ValueError) as error:  # a damaged manifest is shown, not raised
        return record.name, kind, " x ".join(map(str, record.shape)), f"cannot be read: {error}", record.stage
    text = "in each part of the dump" if record.inferred else layout.describe(manifest.sizes)
    names = [dim.name for dim in layout.dims]
    if layout.permute is not None:
        names = [names[i] for i in layout.permute]
    complete = (
        format_shape(names, record.shape) if len(names) == len(record.shape) else str(list(record.shape))
    )
    return record.name, kind, "" if record.inferred else complete, text, record.stage


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
        layout, sizes = array.stored_layout
    except FlexError as error:
        return html_fragment(f"DumpArray · {array.name}", html_line(error, BAD_COLOUR))
    text = f"{format_shape(dims, shape)} · {dtype} · {format_bytes(nbytes)}"
    return html_fragment(
        f"DumpArray · {array.name}",
        html_line(text),
        html_line(
            f"{count_words(len(iterations), 'iteration')}{_format_range(iterations)}; read by .torch() or "
            ".numpy()"
        ),
        html_line(f"as ranks held it: {layout.describe(sizes)}"),
        Markup(draw_shard_layout(layout, sizes)),
    )


def draw_shard_layout(layout: Layout, sizes: Sizes) -> str:
    """The drawing of a layout; for two ranks of each axis where the mesh has more parts than can be seen."""
    axes = {*layout.axes, *layout.shared}
    return draw_layout(layout, sizes if prod(sizes.get(a, 1) for a in axes) <= MOST_DRAWN_RANKS else None)
