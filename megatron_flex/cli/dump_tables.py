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
    experts = any("experts" in re.split(r"[.:]", t.name) for t in found.tensors)
    for run in found.runs:
        rows.add_row(*_run_cells(run, experts))
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
            paired = _pair_gradients(mine)
            _tensor_table(paired if every else _fold_numbers(paired), kind, found.iterations).print(out)
    for tensor in found.tensors:
        if tensor.problem:
            out.print(tensor.problem, style="bold red", soft_wrap=True)


def _run_cells(run: RunRow, experts: bool) -> list[str]:
    """The cells of a run; the axes of experts (etp is tp by default) are left out for a model without."""
    experts = experts or run.mesh.get("ep", 1) > 1
    axes = {a: n for a, n in run.mesh.items() if n > 1 and (experts or a not in ("etp", "edp"))}
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
        title: their name, such as `decoder.layers.{0–31}.mlp.linear_fc1`.
        tensor: one of them.
        nbytes: of all.
        gradients: bytes of all gradients; None without.
    """

    title: str
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
            _TensorGroup(t.name, t, t.nbytes, gradient.nbytes if same and gradient is not None else None)
        )
    return out


def _fold_numbers(rows: Sequence[_TensorGroup]) -> list[_TensorGroup]:
    """Rows that differ in one number of their names become one: first the experts of a layer, then layers."""
    return _fold_number(_fold_number(rows, -1), 0)


def _fold_number(rows: Sequence[_TensorGroup], which: int) -> list[_TensorGroup]:
    """Fold rows over one of the numbers in their names; a folded row is where its first tensor was."""
    groups: dict[tuple[object, ...], list[tuple[int, _TensorGroup]]] = {}
    for row in rows:
        numbers = list(NAME_NUMBER.finditer(row.title))
        head, number, tail = row.title, -1, ""
        if numbers:
            start, end = numbers[which].span()
            head, number, tail = row.title[:start], int(row.title[start + 1 : end]), row.title[end:]
        key = (head, number < 0, tail, _tensor_form(row.tensor), row.gradients is None, row.tensor.problem)
        groups.setdefault(key, []).append((number, row))
    return [_join_rows(str(key[0]), str(key[2]), members) for key, members in groups.items()]


def _join_rows(head: str, tail: str, members: Sequence[tuple[int, _TensorGroup]]) -> _TensorGroup:
    """One row for tensors whose names are `head`, a number and `tail`."""
    (first, row), *others = members
    if not others:
        return row
    numbers = [number for number, _ in members]
    steps = numbers == list(range(first, first + len(numbers)))
    span = f"{first}–{numbers[-1]}" if steps else ",".join(map(str, numbers))
    sizes = [member.gradients for _, member in members if member.gradients is not None]
    return _TensorGroup(
        f"{head}.{{{span}}}{tail}",
        row.tensor,
        sum(member.nbytes for _, member in members),
        sum(sizes) if sizes else None,
    )


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
            row.title,
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
    for title in ("mean", "std", "rms", "absmax", "min", "max"):
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
