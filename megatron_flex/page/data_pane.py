"""The content of the page's data pane: of dumps, statistics and their comparison, as plain JSON values.

A source, `dump_source(...)` or `statistics_source(...)`:

    kind        "dump" | "statistics"
    label       "A" | "B"
    words       the source in words
    notes       [{"kind": "damage" | "info", "text"}]
    iterations  their numbers, ascending; `at` below counts in these
    names       of tensors, in model order: sites, each followed by its gradient (`.grad`), then parameters
    kinds       of each: 0 value, 1 gradient, 2 parameter, 3 gradient of a parameter
    sites       of each: the page's number of its site, -1 of none
    measures    {"rms" | "absmax" | "mean" | "std" | "zeros": [at * tensors + tensor], null for none}
    state       [at * tensors + tensor]: `tensor_tables`' THERE, ABSENT, DAMAGED + NANS, ...
    troubles    [[tensor, at, number in texts]]; texts: what is wrong there
    histograms  {tensor: {"at": [...], **figures.histogram_bins.DrawnBins}}
    heats       {tensor: [{"at", "shape", "of", "rows", "columns", "mean", "caption", **quantised}]}
    attention   [{"layer", "at", "shape": [head, query, key], "queries", "keys", "caption", **quantised}]
    lens        {"at", "layers", "tokens", "ids": [layer][token][k], "shares": likewise, "caption"} | null
    lacks       {"attention" | "lens" | tensor's name: why there is no such picture, and what to dump}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_flex.dump.reader import OpenDump
from megatron_flex.dump.tools.dump_contents import get_named_array, list_parameter_names, list_site_names
from megatron_flex.errors import DumpError
from megatron_flex.figures import Divergence, FigureError
from megatron_flex.figures import divergence as tables_of
from megatron_flex.page.dump_damage import open_readable, shorten_paths
from megatron_flex.page.dump_pictures import DumpPictures, PageBounds
from megatron_flex.page.html_page import PageNote, damage_note, info_note
from megatron_flex.page.tensor_tables import (
    ABSENT,
    DAMAGED,
    TensorCell,
    TensorTables,
    choose_evenly,
    json_number,
    nonfinite_flag,
    nonfinite_state,
    read_cell,
)
from megatron_flex.progress import track
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.statistics.statistics_reader import OpenStatistics

if TYPE_CHECKING:
    from megatron_flex.compare import Comparison

MAX_COMPARISON_ROWS = 30_000


def divergence_json(
    comparison: Comparison, names: Sequence[str], most: int = MAX_COMPARISON_ROWS
) -> dict[str, Any]:
    """The rows of a comparison as plain JSON values.

    Args:
        comparison: the comparison of two dumps.
        names: the page's site names, in their order.
        most: maximum number of rows; beyond it iterations are left out, and then sites.

    Returns:
        verdict     `equal`, `not distinguishable from round-off`, `diverges`, `incomplete`,
                    `cannot be compared`
        incomparable  why they cannot be compared; empty if they can
        a, b        the dumps in words
        names       of the compared tensors, in the order of execution; gradients end in `.grad`
        iterations  those that are shown
        rows        [[page's site or -1, iteration, error or None, tolerance, number in names, flag]]; the
                    flag names an error that is not a finite number: "NaN", "inf"
        first       the page's site of the first that is above its tolerance; None if none is
        first_row   its row; None if none is
        hints       what that looks like
        notes       [{"kind", "text"}]
    """
    try:
        divergence = tables_of(comparison)
    except FigureError as error:
        notes = [info_note(str(error))]
        empty: dict[str, Any] = {"names": [], "iterations": [], "rows": [], "hints": []}
        none: dict[str, Any] = {"first": None, "first_row": None}
        return {
            "verdict": "nothing",
            "incomparable": "",
            "a": comparison.a,
            "b": comparison.b,
            **empty,
            **none,
            "notes": notes,
        }
    notes = [info_note(text) for text in comparison.notes]
    kept = set(range(len(divergence.sites)))
    iterations = list(divergence.iterations)
    if len(comparison.rows) > most:
        several = max(1, most // max(1, len(divergence.sites)))
        first = {divergence.first[1]} if divergence.first else set()
        iterations = sorted({*choose_evenly(iterations, max(1, several - len(first))), *first})
        if several == 1:
            kept = set(choose_evenly(range(len(divergence.sites)), most // len(iterations) - 1))
            kept |= {divergence.sites.index(divergence.first[0])} if divergence.first else set()
        text = f"{len(kept)} of {len(divergence.sites)} tensors are shown"
        text += f", in iterations {_list_numbers(iterations)}"
        notes.append(info_note(f"of the comparison {text}"))
    rows, first_row = _comparison_rows(comparison, divergence, names, set(iterations), kept)
    return {
        "verdict": comparison.verdict,
        "incomparable": comparison.incomparable,
        "a": comparison.a,
        "b": comparison.b,
        "names": list(divergence.sites),
        "iterations": iterations,
        "rows": rows,
        "first": None if first_row is None or rows[first_row][0] == -1 else rows[first_row][0],
        "first_row": first_row,
        "hints": list(comparison.hints),
        "notes": notes,
    }


def _comparison_rows(
    comparison: Comparison,
    divergence: Divergence,
    names: Sequence[str],
    iterations: set[int],
    kept: set[int],
) -> tuple[list[list[Any]], int | None]:
    """The rows to show, and the index of the first one above its tolerance."""
    at = {name: i for i, name in enumerate(names)}
    number_of = {name: i for i, name in enumerate(divergence.sites)}
    rows: list[list[Any]] = []
    first = None
    for row in comparison.rows:
        position = number_of[row.name]
        if row.iteration not in iterations or position not in kept:
            continue
        if divergence.first == (row.name, row.iteration) and first is None:
            first = len(rows)
        site = at.get(_site_name(row.name), -1)
        rows.append(
            [
                site,
                row.iteration,
                json_number(row.error),
                json_number(row.tolerance),
                position,
                nonfinite_flag(row.error),
            ]
        )
    return rows, first


def _list_numbers(numbers: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + (" and more" if len(numbers) > most else "")


VALUE, GRADIENT, PARAMETER, PARAMETER_GRADIENT = range(4)
MAX_DAMAGE_TEXTS = 8  # errors found while reading, in notes


@dataclass(frozen=True, slots=True)
class PageTensor:
    """A tensor of a source.

    Attributes:
        name: its name in the source.
        kind: VALUE, GRADIENT, ...
        site: the page's index of its site; -1 for none.
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
    """The page's data of a dump; of a damaged dump the readable part, with notes about the rest.

    Args:
        dump: its folder, or the opened dump.
        names: the page's site names, in their order.
        label: the source's label.
        bounds: the limits.

    Raises:
        DumpError: there is no dump at that path.
    """
    bounds = bounds or PageBounds()
    readable, notes = open_readable(dump)
    if readable is None:
        return _source_json("dump", label, _folder_name(dump), notes, TensorTables([], []), [])
    try:
        tensors, more = _list_tensors(readable, names, bounds)
    except DumpError as error:  # not even names are readable
        tensors, more = [], [damage_note(shorten_paths(str(error), readable.path))]
    notes = [*notes, *more]
    iterations = _limit_iterations(readable.iterations, len(tensors), bounds, label, notes)
    if not iterations:
        notes.append(damage_note(f"{label}: no iteration of the dump has anything that can be read."))
    tables = TensorTables(iterations, [t.name for t in tensors])
    shortened = _fill_tables(readable, tensors, tables, bounds)
    if shortened:
        notes.append(
            info_note(
                f"{label}: numbers and histograms of {shortened} of {len(tensors)} tensors are of a part of "
                "their values."
            )
        )
    if tables.texts and not any(
        n["kind"] == "damage" for n in notes
    ):  # a dump too large for checking every byte
        notes += [damage_note(f"{label}: {text}") for text in tables.texts[:MAX_DAMAGE_TEXTS]]
    pictures = DumpPictures(readable, bounds, tables, label)
    if iterations:
        pictures.add_heat_maps([(i, t.name) for i, t in enumerate(tensors) if t.kind in (VALUE, GRADIENT)])
        pictures.add_attention()
        pictures.add_lens()
    notes += pictures.notes
    title = f"{_folder_name(readable)} ({readable.describe_meshes()})"
    return _source_json("dump", label, title, notes, tables, tensors, pictures)


def statistics_source(
    statistics: OpenStatistics, names: Sequence[str], label: str = "A", bounds: PageBounds | None = None
) -> dict[str, Any]:
    """The page's data of statistics: numbers and histograms; they have no tensors.

    Args:
        statistics: the statistics, opened.
        names: the page's site names, in their order.
        label: the source's label.
        bounds: the limits.
    """
    bounds = bounds or PageBounds()
    notes: list[PageNote] = []
    if statistics.incomplete:
        notes.append(
            damage_note(f"{label}: {statistics.incomplete} lines or files are incomplete, and left out.")
        )
    notes += [
        damage_note(f"{label}: {reason} is not as it was written, and left out.")
        for reason in statistics.damaged[:8]
    ]
    kinds = {row.site: row.kind for row in statistics.rows()}
    at = {name: i for i, name in enumerate(names)}
    order = {"value": VALUE, "gradient": GRADIENT, "parameter_gradient": PARAMETER_GRADIENT}
    tensors = [PageTensor(n, order[kinds[n]], at.get(_site_name(n), -1)) for n in statistics.sites]
    tensors = _limit_tensors(tensors, bounds, label, notes)
    iterations = _limit_iterations(statistics.iterations, len(tensors), bounds, label, notes)
    tables = TensorTables(iterations, [t.name for t in tensors])
    rows = {(row.iteration, row.site): row for row in statistics.rows()}
    histograms = bounds.histograms_of(len(tensors), len(iterations))
    for number, tensor in enumerate(tensors):
        for position, iteration in enumerate(iterations):
            row = rows.get((iteration, tensor.name))
            tables.put(
                number, position, TensorCell(ABSENT) if row is None else TensorCell(nonfinite_state(row), row)
            )
        tables.histogram(number, histograms)
    source = _source_json("statistics", label, statistics.path.name, notes, tables, tensors)
    reason = "statistics have numbers of tensors, not the tensors: dump {} (mf.Dump) to see this"
    source["lacks"] = {
        "attention": reason.format("decoder.layers.*.self_attention.core_attention:probs"),
        "lens": reason.format("decoder.layers.*:output with the output layer's parameters"),
    }
    return source


def _fill_tables(
    dump: OpenDump, tensors: Sequence[PageTensor], tables: TensorTables, bounds: PageBounds
) -> int:
    """Fill the tables; return how many tensors were read in part."""
    most = bounds.values_of(len(tensors) * len(tables.iterations))
    histograms = bounds.histograms_of(len(tensors), len(tables.iterations))
    shortened = set()
    for number, tensor in enumerate(track(tensors, "measuring tensors", unit="tensors")):
        for position, iteration in enumerate(tables.iterations):
            try:
                cell = read_cell(get_named_array(dump, tensor.name), iteration, most, dump.check == "first")
            except DumpError as error:
                cell = TensorCell(DAMAGED, text=str(error))
            cell.text = shorten_paths(cell.text, dump.path)
            tables.put(number, position, cell)
            if cell.cut:
                shortened.add(number)
        tables.histogram(number, histograms)
    return len(shortened)


def _list_tensors(
    dump: OpenDump, names: Sequence[str], bounds: PageBounds
) -> tuple[list[PageTensor], list[PageNote]]:
    """The tensors of a dump to show, and a note about the selection."""
    at = {name: i for i, name in enumerate(names)}
    records = dump.site_records
    tensors = []
    for name in list_site_names(dump):
        site = _site_name(name)
        kind = VALUE if name.partition("#")[0] in records else GRADIENT
        tensors.append(PageTensor(name, kind, at.get(site, -1)))
    parameters = set(dump.parameters)
    tensors += [
        PageTensor(name, PARAMETER if name in parameters else PARAMETER_GRADIENT, -1)
        for name in list_parameter_names(dump)
    ]
    notes: list[PageNote] = []
    return _limit_tensors(tensors, bounds, dump.path.name, notes), notes


def _limit_tensors(
    tensors: list[PageTensor], bounds: PageBounds, label: str, notes: list[PageNote]
) -> list[PageTensor]:
    if len(tensors) <= bounds.tensors:
        return tensors
    notes.append(info_note(f"{label}: {bounds.tensors} of {len(tensors)} tensors are shown, evenly spread."))
    return choose_evenly(tensors, bounds.tensors)


def _limit_iterations(
    iterations: list[int], tensors: int, bounds: PageBounds, label: str, notes: list[PageNote]
) -> list[int]:
    chosen = choose_evenly(iterations, bounds.iterations_of(tensors))
    if len(chosen) < len(iterations):
        notes.append(
            info_note(f"{label}: {len(chosen)} of {len(iterations)} iterations are shown, evenly spread.")
        )
    return chosen


def _site_name(name: str) -> str:
    return name.partition("#")[0].removesuffix(GRADIENT_SUFFIX)


def _folder_name(dump: OpenDump | str | PathLike[str]) -> str:
    """The name of a dump's folder and of the one it is in: many dumps are called `dump`."""
    path = Path(dump.path if isinstance(dump, OpenDump) else dump)
    return "/".join(path.parts[-2:]).lstrip("/") or str(path)


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


__all__ = ["PageBounds", "divergence_json", "dump_source", "open_readable", "statistics_source"]
