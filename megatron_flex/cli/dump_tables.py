"""What `dump ls` and `dump show` print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron_flex.cli.console_output import (
    NameTable,
    count_words,
    format_bytes,
    format_number,
    format_series,
    make_table,
    supports_unicode,
)
from megatron_flex.dump.schema import ITERATION_NUMBERS, MEGATRON
from megatron_flex.dump.tools.dump_cleanup import Removal
from megatron_flex.dump.tools.dump_contents import DumpContents, RunRow, TensorRow
from megatron_flex.dump.tools.dump_verification import Verification
from megatron_flex.dump.tools.value_summary import ValueSummary
from megatron_flex.layout.layout_drawing import format_shape
from megatron_flex.sites import GRADIENT_SUFFIX

NAME_NUMBER = re.compile(r"\.\d+(?=\.|:|#|$)")
EIGHTHS = "▏▎▍▌▋▊▉█"


def print_contents(out: Console, path: Path, found: DumpContents, every: bool = False) -> None:
    """Runs, then sites and parameters; layers that are alike in one row, unless `every`."""
    runs = count_words(len(found.runs), "run")
    out.print(
        f"{path}: {runs}, {count_words(len(found.iterations), 'complete iteration')}, "
        f"{format_bytes(found.nbytes)}"
    )
    out.print()
    rows = make_table(">run", "framework", "mesh", ">ranks", "complete", "incomplete", ">size")
    for run in found.runs:
        rows.add_row(*_run_cells(run))
    out.print(rows)
    for run in found.runs:
        if run.damage:
            out.print(f"run {run.number}: {run.damage}", style="bold red", soft_wrap=True)
    for note in found.notes:
        out.print(f"note: {note}", style="yellow", soft_wrap=True)
    if any(run.framework == MEGATRON for run in found.runs):
        out.print(ITERATION_NUMBERS, style="dim", soft_wrap=True)
    for kind in ("site", "parameter"):
        mine = [t for t in found.tensors if t.kind == kind]
        if mine:
            out.print()
            _tensor_table(_fold_layers(_pair_gradients(mine), every), kind, found.iterations).print(out)
    for tensor in found.tensors:
        if tensor.problem:
            out.print(tensor.problem, style="bold red", soft_wrap=True)


def _run_cells(run: RunRow) -> list[str]:
    experts = any(run.mesh.get(axis, 1) > 1 for axis in ("ep", "etp"))
    axes = {a: n for a, n in run.mesh.items() if n > 1 and (experts or a != "edp")}
    mesh = " x ".join(f"{axis}={size}" for axis, size in axes.items()) or "one rank"
    damaged = "(no manifest)" if run.damage else ""
    complete, incomplete = format_series(run.whole), format_series(run.incomplete)
    size = format_bytes(run.nbytes)
    return [
        str(run.number),
        run.framework or damaged,
        mesh if not damaged else "",
        str(run.ranks),
        complete,
        incomplete,
        size,
    ]


class _TensorGroup(NamedTuple):
    """Tensors that are alike, and their gradients.

    Attributes:
        names: of the tensors.
        tensor: one of them.
        nbytes: of all.
        gradients: bytes of all gradients; None without.
    """

    names: tuple[str, ...]
    tensor: TensorRow
    nbytes: int
    gradients: int | None


def _tensor_form(t: TensorRow) -> tuple[object, ...]:
    return tuple(t.dims), tuple(t.shape), t.dtype, tuple(t.iterations)


def _pair_gradients(tensors: Sequence[TensorRow]) -> list[_TensorGroup]:
    """A gradient is in the row of its tensor, unless it has another form."""
    by_name = {t.name: t for t in tensors}
    out = []
    for t in tensors:
        values = (
            by_name.get(t.name.removesuffix(GRADIENT_SUFFIX)) if t.name.endswith(GRADIENT_SUFFIX) else None
        )
        if values is not None and _tensor_form(values) == _tensor_form(t):
            continue
        gradient = by_name.get(t.name + GRADIENT_SUFFIX)
        same = gradient is not None and _tensor_form(gradient) == _tensor_form(t)
        out.append(
            _TensorGroup((t.name,), t, t.nbytes, gradient.nbytes if same and gradient is not None else None)
        )
    return out


def _fold_layers(rows: Sequence[_TensorGroup], every: bool) -> list[_TensorGroup]:
    """Rows whose names differ in their first number only are one, where the first of them was."""
    out: dict[tuple[object, ...], _TensorGroup] = {}
    for n, row in enumerate(rows):
        name = NAME_NUMBER.sub(".#", row.names[0], count=1)
        key = (n,) if every else (name, _tensor_form(row.tensor), row.gradients is None, row.tensor.problem)
        had = out.get(key)
        if had is not None:
            gradients = None if row.gradients is None else row.gradients + (had.gradients or 0)
            row = _TensorGroup(had.names + row.names, had.tensor, had.nbytes + row.nbytes, gradients)
        out[key] = row
    return list(out.values())


def _range_title(names: Sequence[str]) -> str:
    """`decoder.layers.{0 … 31}.mlp.linear_fc1`."""
    if len(names) == 1:
        return names[0]
    numbers = [int(found[0][1:]) for name in names if (found := NAME_NUMBER.search(name))]
    steps = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    span = f"{numbers[0]}–{numbers[-1]}" if steps else ",".join(map(str, numbers))
    return NAME_NUMBER.sub(f".{{{span}}}", names[0], count=1)


def _tensor_table(found: Sequence[_TensorGroup], title: str, complete: Sequence[int]) -> NameTable:
    differ = any(list(row.tensor.iterations) != list(complete) for row in found)
    gradients = any(row.gradients is not None for row in found)
    rows = NameTable(
        title,
        "shape",
        "dtype",
        *(["iterations"] if differ else []),
        ">size",
        *([">gradients"] if gradients else []),
    )
    for row in found:
        t = row.tensor
        times = [format_series(t.iterations)] if differ else []
        own = ["–" if row.gradients is None else format_bytes(row.gradients)] if gradients else []
        rows.add_row(
            _range_title(row.names),
            format_shape(t.dims, t.shape),
            t.dtype,
            *times,
            format_bytes(row.nbytes),
            *own,
        )
    return rows


def print_statistics(
    out: Console, name: str, what: Sequence[str], columns: Mapping[str, ValueSummary]
) -> None:
    """A table with a column for each, and a histogram of each."""
    out.print(name, style="bold", soft_wrap=True)
    for line in what:
        out.print(line)
    out.print()
    rows = make_table("", *(f">{title}" for title in columns))
    found = list(columns.values())
    for title in ("mean", "std", "rms", "absmax", "least", "most"):
        rows.add_row(title, *(format_number(getattr(s, title)) for s in found))
    rows.add_row("zeros", *(_format_share(s.zeros, s.count) for s in found))
    for title in ("nan", "infinite"):
        if any(getattr(s, title) for s in found):
            rows.add_row(title, *(_format_share(getattr(s, title), s.count) for s in found), style="bold red")
    for q in next((s.quantiles for s in found if s.quantiles), {}):
        rows.add_row(f"p{q * 100:g}", *(format_number(s.quantiles.get(q)) for s in found))
    rows.add_row("values", *(f"{s.count:,}" for s in found))
    out.print(rows)
    for title, s in columns.items():
        if s.counts:
            out.print()
            out.print(title, style="bold")
            out.print(histogram_table(s, min(out.width, 100)))


def print_statistics_rows(out: Console, found: Mapping[str, ValueSummary]) -> None:
    """A row for each tensor, without histograms."""
    odd = [title for title in ("nan", "infinite") if any(getattr(s, title) for s in found.values())]
    titles = ("mean", "std", "rms", "absmax", *odd)
    rows = NameTable("site", *(f">{title}" for title in (*titles, "values")))
    for name, s in found.items():
        figures = [format_number(getattr(s, title)) for title in titles]
        rows.add_row(name, *figures, f"{s.count:,}", style="bold red" if s.nan or s.infinite else None)
    rows.print(out)


def histogram_table(s: ValueSummary, width: int) -> Table:
    """A row for each bin: from which value on, a bar, how many."""
    rows = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    counts = [(f"< {s.edges[0]:g}", s.below)] if s.below else []
    counts += [(f"{edge:g}", n) for edge, n in zip(s.edges[:-1], s.counts, strict=True)]
    counts += [(f"> {s.edges[-1]:g}", s.above)] if s.above else []
    most = max(n for _, n in counts)
    label = max(len(text) for text, _ in counts)
    room = max(8, width - label - len(f"{most:,}") - 3)
    for text, n in counts:
        rows.add_row(text, format_bar(n / most if most else 0.0, room), f"{n:,}")
    return rows


def format_bar(share: float, width: int) -> str:
    """A bar of so much of a width; something is shown of whatever is not nothing."""
    if not supports_unicode():
        return "#" * (max(1, round(share * width)) if share else 0)
    eighths = max(1, round(share * width * 8)) if share else 0
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def _format_share(count: int, of: int) -> str:
    return f"{count:,} ({count / of:.2%})" if of and count else str(count)


def print_verification(out: Console, found: Verification) -> None:
    """The findings, a line each and errors first, then the counts of files and tensors that were read.

    An iteration that is incomplete or has parts missing is one finding, with its ranks.
    """
    for finding in found.joined():
        word, style = ("error", "bold red") if finding.error else ("note", "yellow")
        out.print(f"{word}: {finding.kind}", style=style, end="  ")
        out.print(finding.where, style="bold", soft_wrap=True, end="  ")
        out.print(finding.text, soft_wrap=True)
    read, verdict = found.summary()
    out.print(read, soft_wrap=True)
    out.print(verdict, style="bold red" if not found.good else "green" if found.complete else "yellow")


def print_pruned(out: Console, path: Path, found: Sequence[Removal], freed: int, dry_run: bool) -> None:
    """What went, or would go, and what that frees."""
    if not found:
        out.print("nothing to remove")
        return
    rows = NameTable("what", "why", ">size")
    for removal in found:
        rows.add_row(str(removal.path.relative_to(path)), removal.why, format_bytes(removal.nbytes))
    rows.print(out)
    would = "would be " if dry_run else ""
    out.print(f"{count_words(len(found), 'item')}: {format_bytes(freed)} {would}freed")
