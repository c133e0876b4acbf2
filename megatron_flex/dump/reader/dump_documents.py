"""A dump, and an array of it, in a notebook; damage is shown as text, and raises no error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from megatron_flex.document import Document, Drawing, Note, Row, Table, shorten_notes
from megatron_flex.dump.reader.missing_parts import MAX_DETAILED
from megatron_flex.dump.run_folders import DumpRun
from megatron_flex.dump.schema import Manifest, SiteRecord, layout_from_json
from megatron_flex.errors import FlexError
from megatron_flex.layout import Layout, Sizes
from megatron_flex.layout.layout_drawing import draw_layout, format_shape
from megatron_flex.mesh import describe_sizes
from megatron_flex.progress import format_bytes
from megatron_flex.sites import strip_numbers
from megatron_flex.wording import count_words

if TYPE_CHECKING:
    from megatron_flex.dump.reader.dump_array import DumpArray
    from megatron_flex.dump.reader.dump_reader import OpenDump

MAX_DRAWN_RANKS = 64  # of more ranks that hold other parts a drawing shows two of each axis
REPLACED_HINT = "dump.replaced lists all"
VERIFY_HINT = "`megatron-flex dump verify` lists all"
TENSORS_HINT = "dump.sites and dump.parameters list the names; `megatron-flex dump ls` is a table"


def describe_dump(dump: OpenDump) -> Document:
    """Runs, iterations, tensors, what is missing; from names of files and manifests, none of the data."""
    title = f"OpenDump · {dump.path}"
    try:
        complete = dump.iterations
        kept = Counter(id(dump.stored_iteration(which).run) for which in dump.iteration_keys)
        missing, replaced = dump.missing, dump.replaced
    except FlexError as error:  # files are gone since it was opened
        return Document(title, [Note(str(error), "bad")])
    records = [cells for manifest in dump.manifests for cells in _list_tensor_cells(manifest)]
    head = (
        f"{count_words(len(dump.runs), 'run')}, {count_words(len(complete), 'complete iteration')}"
        f"{_format_range(complete)}, {count_words(len(dump.site_records), 'site')}, "
        f"{count_words(len(dump.parameters), 'parameter')}"
    )
    return Document(
        title,
        [
            Note(head),
            *shorten_notes(missing, "note", MAX_DETAILED, VERIFY_HINT),
            *shorten_notes(replaced, "note", MAX_DETAILED, REPLACED_HINT),
            Table(
                (">run", "made", "framework", "mesh", ">ranks", ">iterations", ">whole, read from it"),
                [Row((*_make_run_cells(run), str(kept[id(run)]))) for run in dump.runs],
                title="runs",
                opened=len(dump.runs) > 1,
                rest="dump.runs has them all",
            ),
            Table(
                ("", "kind", "full shape", "layout", ">stage"),
                [Row(cells) for cells in _group_tensor_cells(list(dict.fromkeys(records)))],
                title="tensors",
                rest=TENSORS_HINT,
            ),
        ],
    )


def _make_run_cells(run: DumpRun) -> tuple[str, ...]:
    manifest = run.manifest
    mesh = describe_sizes(manifest.sizes)
    ranks, iterations = len(manifest.ranks), len(run.iteration_keys)
    return str(manifest.run), manifest.created, manifest.framework, mesh, str(ranks), str(iterations)


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


def _group_tensor_cells(rows: list[TensorCells]) -> list[tuple[str, ...]]:
    """One row for tensors that differ in numbers of layers, experts and stages alone."""
    groups: dict[tuple[str, ...], list[TensorCells]] = {}
    for row in rows:
        groups.setdefault((strip_numbers(row[0]), *row[1:4]), []).append(row)
    out = []
    for (name, *about), alike in groups.items():
        stages = sorted({row[4] for row in alike})
        stage = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
        out.append((alike[0][0] if len(alike) == 1 else f"{name} ({len(alike)})", *about, stage))
    return out


def describe_array(array: DumpArray) -> Document:
    """Axes, dtype, bytes and who held which part; reads headers and no data."""
    title = f"DumpArray · {array.name}"
    try:
        dims, shape, iterations = array.dims, array.shape, array.iterations
        dtype, nbytes = str(array.dtype).removeprefix("torch."), array.nbytes
        layout, sizes = array.stored_layout
    except FlexError as error:
        return Document(title, [Note(str(error), "bad")])
    number = count_words(len(iterations), "iteration")
    return Document(
        title,
        [
            Note(f"{format_shape(dims, shape)} · {dtype} · {format_bytes(nbytes)}"),
            Note(f"{number}{_format_range(iterations)}; read by .torch() or .numpy()"),
            Note(f"as ranks held it: {layout.describe(sizes)}"),
            Drawing(draw_shard_layout(layout, sizes)),
        ],
    )


def draw_shard_layout(layout: Layout, sizes: Sizes) -> str:
    """The drawing of a layout; for two ranks of each axis where the mesh has more parts than can be seen."""
    axes = {*layout.axes, *layout.shared}
    return draw_layout(layout, sizes if prod(sizes.get(a, 1) for a in axes) <= MAX_DRAWN_RANKS else None)
