"""What `dump ls` and `dump show` print."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron_flex.cli.terminal import counted, in_bytes, number, series, table, unicode_works
from megatron_flex.dump.contents import Contents, RunRow, TensorRow
from megatron_flex.dump.statistics import Statistics
from megatron_flex.dump.upkeep import Removal
from megatron_flex.dump.verifying import Verification
from megatron_flex.dump.words import shape_in_words
from megatron_flex.sites import GRAD

NUMBER = re.compile(r"\.\d+(?=\.|:|#|$)")
EIGHTHS = "▏▎▍▌▋▊▉█"


def tell_contents(out: Console, path: Path, found: Contents, every: bool = False) -> None:
    """Runs, then sites and parameters; layers that are alike in one row, unless `every`."""
    runs = counted(len(found.runs), "run")
    out.print(
        f"{path}: {runs}, {counted(len(found.iterations), 'whole iteration')}, {in_bytes(found.nbytes)}"
    )
    out.print()
    rows = table(">run", "framework", "mesh", ">ranks", "whole", "torn", ">size")
    for run in found.runs:
        rows.add_row(*_run(run))
    out.print(rows)
    for run in found.runs:
        if run.damage:
            out.print(f"run {run.number}: {run.damage}", style="bold red", soft_wrap=True)
    for kind in ("site", "parameter"):
        mine = [t for t in found.tensors if t.kind == kind]
        if mine:
            out.print()
            out.print(_tensors(_folded(_paired(mine), every), kind, found.iterations))
    for tensor in found.tensors:
        if tensor.problem:
            out.print(tensor.problem, style="bold red", soft_wrap=True)


def _run(run: RunRow) -> list[str]:
    experts = any(run.mesh.get(axis, 1) > 1 for axis in ("ep", "etp"))
    axes = {a: n for a, n in run.mesh.items() if n > 1 and (experts or a != "edp")}
    mesh = " ".join(f"{axis}{size}" for axis, size in axes.items()) or "one rank"
    damaged = "(no manifest)" if run.damage else ""
    whole, torn = series(run.whole), series(run.torn)
    size = in_bytes(run.nbytes)
    return [
        str(run.number),
        run.framework or damaged,
        mesh if not damaged else "",
        str(run.ranks),
        whole,
        torn,
        size,
    ]


class _Row(NamedTuple):
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


def _alike(t: TensorRow) -> tuple[object, ...]:
    return tuple(t.dims), tuple(t.shape), t.dtype, tuple(t.iterations)


def _paired(tensors: Sequence[TensorRow]) -> list[_Row]:
    """A gradient is in the row of its tensor, unless it has another form."""
    by_name = {t.name: t for t in tensors}
    out = []
    for t in tensors:
        values = by_name.get(t.name.removesuffix(GRAD)) if t.name.endswith(GRAD) else None
        if values is not None and _alike(values) == _alike(t):
            continue
        gradient = by_name.get(t.name + GRAD)
        same = gradient is not None and _alike(gradient) == _alike(t)
        out.append(_Row((t.name,), t, t.nbytes, gradient.nbytes if same and gradient is not None else None))
    return out


def _folded(rows: Sequence[_Row], every: bool) -> list[_Row]:
    """Rows whose names differ in their first number only are one, where the first of them was."""
    out: dict[tuple[object, ...], _Row] = {}
    for n, row in enumerate(rows):
        name = NUMBER.sub(".#", row.names[0], count=1)
        key = (n,) if every else (name, _alike(row.tensor), row.gradients is None, row.tensor.problem)
        had = out.get(key)
        if had is not None:
            gradients = None if row.gradients is None else row.gradients + (had.gradients or 0)
            row = _Row(had.names + row.names, had.tensor, had.nbytes + row.nbytes, gradients)
        out[key] = row
    return list(out.values())


def _title(names: Sequence[str]) -> str:
    """`decoder.layers.{0 … 31}.mlp.linear_fc1`."""
    if len(names) == 1:
        return names[0]
    numbers = [int(found[0][1:]) for name in names if (found := NUMBER.search(name))]
    steps = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    told = f"{numbers[0]}–{numbers[-1]}" if steps else ",".join(map(str, numbers))
    return NUMBER.sub(f".{{{told}}}", names[0], count=1)


def _tensors(found: Sequence[_Row], title: str, whole: Sequence[int]) -> Table:
    differ = any(list(row.tensor.iterations) != list(whole) for row in found)
    gradients = any(row.gradients is not None for row in found)
    rows = table(
        title,
        "shape",
        "dtype",
        *(["iterations"] if differ else []),
        ">size",
        *([">gradients"] if gradients else []),
    )
    for row in found:
        t = row.tensor
        times = [series(t.iterations)] if differ else []
        own = ["–" if row.gradients is None else in_bytes(row.gradients)] if gradients else []
        rows.add_row(
            _title(row.names), shape_in_words(t.dims, t.shape), t.dtype, *times, in_bytes(row.nbytes), *own
        )
    return rows


def tell_statistics(out: Console, name: str, what: Sequence[str], columns: Mapping[str, Statistics]) -> None:
    """A table with a column for each, and a histogram of each."""
    out.print(name, style="bold", soft_wrap=True)
    for line in what:
        out.print(line)
    out.print()
    rows = table("", *(f">{title}" for title in columns))
    found = list(columns.values())
    for title in ("mean", "std", "rms", "absmax", "least", "most"):
        rows.add_row(title, *(number(getattr(s, title)) for s in found))
    rows.add_row("zeros", *(_share(s.zeros, s.count) for s in found))
    for title in ("nan", "infinite"):
        if any(getattr(s, title) for s in found):
            rows.add_row(title, *(_share(getattr(s, title), s.count) for s in found), style="bold red")
    for q in next((s.quantiles for s in found if s.quantiles), {}):
        rows.add_row(f"p{q * 100:g}", *(number(s.quantiles.get(q)) for s in found))
    rows.add_row("values", *(f"{s.count:,}" for s in found))
    out.print(rows)
    for title, s in columns.items():
        if s.counts:
            out.print()
            out.print(title, style="bold")
            out.print(histogram(s, min(out.width, 100)))


def histogram(s: Statistics, width: int) -> Table:
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
        rows.add_row(text, bar(n / most if most else 0.0, room), f"{n:,}")
    return rows


def bar(share: float, width: int) -> str:
    """A bar of so much of a width; something is shown of whatever is not nothing."""
    if not unicode_works():
        return "#" * (max(1, round(share * width)) if share else 0)
    eighths = max(1, round(share * width * 8)) if share else 0
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def _share(count: int, of: int) -> str:
    return f"{count:,} ({count / of:.2%})" if of and count else str(count)


def tell_verification(out: Console, found: Verification) -> None:
    """What was found, errors first, then what was read."""
    for finding in sorted(found.findings, key=lambda f: not f.error):
        word, style = ("error", "bold red") if finding.error else ("note", "yellow")
        out.print(f"{word}: {finding.kind}", style=style, end="  ")
        out.print(finding.where, style="bold", soft_wrap=True)
        out.print(f"    {finding.text}", soft_wrap=True)
    errors = sum(f.error for f in found.findings)
    notes = len(found.findings) - errors
    read = (
        f"{counted(found.files, 'file')}, {counted(found.tensors, 'tensor')}, {in_bytes(found.nbytes)} read"
    )
    read += f", {counted(found.replicas, 'replica')} compared" if found.replicas else ""
    out.print(f"{read}; whole iterations: {series(found.whole)}", soft_wrap=True)
    noted = f"; {counted(notes, 'note')}" if notes else ""
    if errors:
        out.print(f"{counted(errors, 'error')}{noted}", style="bold red")
    elif not found.whole:
        out.print(f"no iteration is whole: there is nothing to read{noted}", style="yellow")
    else:
        out.print(f"all is as it was written{noted}", style="green")


def tell_pruned(out: Console, path: Path, found: Sequence[Removal], freed: int, dry_run: bool) -> None:
    """What went, or would go, and what that frees."""
    if not found:
        out.print("nothing to remove")
        return
    rows = table("what", "why", ">size")
    for removal in found:
        rows.add_row(str(removal.path.relative_to(path)), removal.why, in_bytes(removal.nbytes))
    out.print(rows)
    would = "would be " if dry_run else ""
    out.print(f"{counted(len(found), 'item')}: {in_bytes(freed)} {would}freed")
