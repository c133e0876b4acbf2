"""What the data pane of the page shows: of dumps, statistics and their comparison, as plain JSON values.

A source, `of_dump(...)` or `of_statistics(...)`:

    kind        "dump" | "statistics"
    label       "A" | "B"
    words       the source in words
    notes       [{"kind": "damage" | "info", "text"}]
    iterations  their numbers, ascending; `at` below counts in these
    names       of tensors, in model order: sites, `.grad` behind their gradients, then parameters
    kinds       of each: 0 value, 1 gradient, 2 parameter, 3 gradient of a parameter
    sites       of each: the page's number of its site, -1 of none
    measures    {"rms" | "absmax" | "mean" | "std" | "zeros": [at][tensor] in base64 of 4-byte floats}
    state       [at][tensor] in base64 of bytes: `data_reading`'s THERE, ABSENT, DAMAGED + NANS, ...
    troubles    [[tensor, at, number in texts]]; texts: what is wrong there
    histograms  {tensor: {"at": [...], "edges": [...], "counts": [[...]], "uneven": bins are powers of two}}
    heats       {tensor: [{"at", "sample", "shape", "of", "rows", "columns", "mean", "caption", **quantised}]}
    attention   [{"layer", "at", "shape": [head, query, key], "queries", "keys", "caption", **quantised}]
    lens        {"at", "layers", "tokens", "ids": [layer][token][k], "shares": likewise, "caption"} | null
    lacks       {"attention" | "lens" | tensor's name: why there is no such picture, and what to dump}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from megatron_flex.dump.tools.dump_contents import get_named_array, list_parameter_names, list_site_names
from megatron_flex.dump.reader import OpenDump
from megatron_flex.errors import DumpError
from megatron_flex.page.dump_damage import PageNote, damage_note, info_note, shorten_paths, open_readable
from megatron_flex.page.data_divergence import divergence_json
from megatron_flex.page.data_packing import choose_evenly
from megatron_flex.page.dump_pictures import PageBounds, DumpPictures
from megatron_flex.page.data_reading import ABSENT, DAMAGED, TensorCell, nonfinite_state, read_cell
from megatron_flex.page.data_tables import TensorTables
from megatron_flex.progress import track
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.statistics.measured import TensorStatistics
from megatron_flex.statistics.reading import OpenStatistics

VALUE, GRADIENT, PARAMETER, PARAMETER_GRADIENT = range(4)
MAX_DAMAGE_TEXTS = 8  # of what was found damaged while reading, in notes


@dataclass(frozen=True, slots=True)
class PageTensor:
    """A tensor of a source.

    Attributes:
        name: as the source has it.
        kind: VALUE, GRADIENT, ...
        site: the page's number of its site; -1 of none.
    """

    name: str
    kind: int
    site: int


def dump_source(
    dump: OpenDump | str | PathLike[str],
    names: Sequence[str],
    label: str = "A",
    bounds: PageBounds | None = None,
) -> dict[str, Any]:
    """What the page shows of a dump; of a damaged one what can be read, with notes of what cannot.

    Args:
        dump: its folder, or it, opened.
        names: of the page's sites, in their order.
        label: of the source.
        bounds: how much is shown.

    Raises:
        DumpError: there is no dump at that path.
    """
    bounds = bounds or PageBounds()
    found, notes = open_readable(dump)
    if found is None:
        return _source_json("dump", label, _folder_name(dump), notes, TensorTables([], []), [])
    try:
        tensors, more = _list_tensors(found, names, bounds)
    except DumpError as error:  # of what lies in the folder not even names can be had
        tensors, more = [], [damage_note(shorten_paths(str(error), found.path))]
    notes = [*notes, *more]
    there = found.iterations
    iterations = choose_evenly(there, bounds.iterations_of(len(tensors)))
    if len(iterations) < len(there):
        notes.append(info_note(f"{label}: {len(iterations)} of {len(there)} iterations are shown, evenly spread."))
    if not there:
        notes.append(damage_note(f"{label}: no iteration of the dump has anything that can be read."))
    tables = TensorTables(iterations, [t.name for t in tensors])
    shortened = _fill_tables(found, tensors, tables, bounds)
    if shortened:
        notes.append(
            info_note(f"{label}: numbers and histograms of {shortened} tensors are of a part of their values.")
        )
    if tables.texts and not any(
        n["kind"] == "damage" for n in notes
    ):  # a dump too large to check every byte of
        notes += [damage_note(f"{label}: {text}") for text in tables.texts[:MAX_DAMAGE_TEXTS]]
    pictures = DumpPictures(found, bounds, tables, label)
    if iterations:
        pictures.heats([(i, t.name) for i, t in enumerate(tensors) if t.kind in (VALUE, GRADIENT)])
        pictures.attention()
        pictures.lens()
    notes += pictures.notes
    mesh = " x ".join(f"{a} {n}" for a, n in found.manifest.axes.items() if n > 1) or "one rank"
    return _source_json("dump", label, f"{_folder_name(found)} ({mesh})", notes, tables, tensors, pictures)


def statistics_source(
    found: OpenStatistics, names: Sequence[str], label: str = "A", bounds: PageBounds | None = None
) -> dict[str, Any]:
    """What the page shows of statistics: numbers and histograms; they have no tensors.

    Args:
        found: the statistics, opened.
        names: of the page's sites, in their order.
        label: of the source.
        bounds: how much is shown.
    """
    bounds = bounds or PageBounds()
    notes: list[PageNote] = []
    if found.torn:
        notes.append(damage_note(f"{label}: {found.torn} lines or files are not whole, and left out."))
    kinds = {row.site: row.kind for row in found.rows()}
    at = {name: i for i, name in enumerate(names)}
    order = {"value": VALUE, "gradient": GRADIENT, "parameter_gradient": PARAMETER_GRADIENT}
    tensors = [PageTensor(n, order[kinds[n]], at.get(_site_name(n), -1)) for n in found.sites]
    tensors = _limit_tensors(tensors, bounds, label, notes)
    there = found.iterations
    iterations = choose_evenly(there, bounds.iterations_of(len(tensors)))
    if len(iterations) < len(there):
        notes.append(info_note(f"{label}: {len(iterations)} of {len(there)} iterations are shown, evenly spread."))
    tables = TensorTables(iterations, [t.name for t in tensors])
    rows = {(row.iteration, row.site): row for row in found.rows()}
    histograms = bounds.histograms_of(len(tensors), len(iterations))
    for number, tensor in enumerate(tensors):
        for place, iteration in enumerate(iterations):
            tables.put(number, place, _statistics_cell(rows.get((iteration, tensor.name))))
        tables.histogram(number, histograms)
    source = _source_json("statistics", label, found.path.name, notes, tables, tensors)
    reason = "statistics have numbers of tensors, not the tensors: dump {} (mf.Dump) to see this"
    source["lacks"] = {
        "attention": reason.format("decoder.layers.*.self_attention.core_attention:probs"),
        "lens": reason.format("decoder.layers.*:output with the output layer's parameters"),
    }
    return source


def _statistics_cell(row: TensorStatistics | None) -> TensorCell:
    return TensorCell(ABSENT) if row is None else TensorCell(nonfinite_state(row), row)


def _fill_tables(dump: OpenDump, tensors: Sequence[PageTensor], tables: TensorTables, bounds: PageBounds) -> int:
    """Fill the tables; how many tensors were read in part."""
    most = bounds.values_of(len(tensors) * len(tables.iterations))
    histograms = bounds.histograms_of(len(tensors), len(tables.iterations))
    shortened = set()
    for number, tensor in enumerate(track(tensors, "measuring tensors", unit="tensors")):
        for place, iteration in enumerate(tables.iterations):
            try:
                found = read_cell(get_named_array(dump, tensor.name), iteration, most, dump.check == "first")
            except DumpError as error:
                found = TensorCell(DAMAGED, text=str(error))
            found.text = shorten_paths(found.text, dump.path)
            tables.put(number, place, found)
            if found.cut:
                shortened.add(number)
        tables.histogram(number, histograms)
    return len(shortened)


def _list_tensors(dump: OpenDump, names: Sequence[str], bounds: PageBounds) -> tuple[list[PageTensor], list[PageNote]]:
    """The tensors of a dump, and what is to be told of their choice."""
    at = {name: i for i, name in enumerate(names)}
    places = dump.places
    found = []
    for name in list_site_names(dump):
        site = _site_name(name)
        kind = VALUE if name.partition("#")[0] in places else GRADIENT
        found.append(PageTensor(name, kind, at.get(site, -1)))
    parameters = set(dump.parameters)
    found += [
        PageTensor(name, PARAMETER if name in parameters else PARAMETER_GRADIENT, -1)
        for name in list_parameter_names(dump)
    ]
    notes: list[PageNote] = []
    return _limit_tensors(found, bounds, dump.path.name, notes), notes


def _limit_tensors(tensors: list[PageTensor], bounds: PageBounds, label: str, notes: list[PageNote]) -> list[PageTensor]:
    if len(tensors) <= bounds.tensors:
        return tensors
    notes.append(info_note(f"{label}: {bounds.tensors} of {len(tensors)} tensors are shown, evenly spread."))
    return choose_evenly(tensors, bounds.tensors)


def _site_name(name: str) -> str:
    return name.partition("#")[0].removesuffix(GRADIENT_SUFFIX)


def _folder_name(dump: OpenDump | str | PathLike[str]) -> str:
    path = dump.path if isinstance(dump, OpenDump) else dump
    return str(path).rstrip("/").rpartition("/")[2] or str(path)


def _source_json(
    kind: str,
    label: str,
    words: str,
    notes: list[PageNote],
    tables: TensorTables,
    tensors: Sequence[PageTensor],
    pictures: DumpPictures | None = None,
) -> dict[str, Any]:
    drawn: Mapping[str, Any] = (
        pictures.to_json() if pictures else {"heats": {}, "attention": [], "lens": None}
    )
    lacks = dict(pictures.lacks) if pictures else {}
    return {
        "kind": kind,
        "label": label,
        "words": words,
        "notes": notes,
        "names": [t.name for t in tensors],
        "kinds": [t.kind for t in tensors],
        "sites": [t.site for t in tensors],
        **tables.to_json(),
        **drawn,
        "lacks": lacks,
    }


__all__ = ["PageBounds", "divergence_json", "dump_source", "statistics_source", "open_readable"]
