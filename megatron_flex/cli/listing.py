"""What `dump ls` and `dump show` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_flex.cli.terminal import counted, in_bytes, number, series, table, unicode_works
from megatron_flex.dump.contents import Contents, RunRow, TensorRow
from megatron_flex.dump.statistics import Statistics

EIGHTHS = "▏▎▍▌▋▊▉█"


def tell_contents(out: Console, path: Path, found: Contents) -> None:
    """Runs, then sites and parameters."""
    runs = counted(len(found.runs), "run")
    out.print(f"{path}: {runs}, {counted(len(found.iterations), 'whole iteration')}, {in_bytes(found.nbytes)}")
    out.print()
    rows = table(">run", "framework", "mesh", ">ranks", "whole", "torn", ">size")
    for run in found.runs:
        rows.add_row(*_run(run))
    out.print(rows)
    for run in found.runs:
        if run.damage:
            out.print(f"run {run.number}: {run.damage}", style="bold red", soft_wrap=True)
    for kind, title in (("site", "site"), ("parameter", "parameter")):
        mine = [t for t in found.tensors if t.kind == kind]
        if mine:
            out.print()
            out.print(_tensors(mine, title, found.iterations))
    for tensor in found.tensors:
        if tensor.problem:
            out.print(f"{tensor.name}: {tensor.problem}", style="bold red", soft_wrap=True)


def _run(run: RunRow) -> list[str]:
    mesh = " ".join(f"{axis}{size}" for axis, size in run.mesh.items() if size > 1) or "one rank"
    damaged = "(no manifest)" if run.damage else ""
    whole, torn = series(run.whole), series(run.torn)
    size = in_bytes(run.nbytes)
    return [str(run.number), run.framework or damaged, mesh if not damaged else "", str(run.ranks), whole, torn, size]


def _tensors(tensors: Sequence[TensorRow], title: str, whole: Sequence[int]) -> Table:
    differ = any(list(t.iterations) != list(whole) for t in tensors)
    rows = table(title, "shape", "dtype", *(["iterations"] if differ else []), ">size")
    for t in tensors:
        times = [series(t.iterations)] if differ else []
        rows.add_row(t.name, shape_in_words(t.dims, t.shape), t.dtype, *times, in_bytes(t.nbytes))
    return rows


def shape_in_words(dims: Sequence[str], shape: Sequence[int]) -> str:
    """`[sample 8, token 16, h 512]`."""
    return "[" + ", ".join(f"{d} {n}" for d, n in zip(dims, shape, strict=True)) + "]"


def tell_statistics(out: Console, name: str, what: str, columns: Mapping[str, Statistics]) -> None:
    """A table with a column for each, and a histogram of each."""
    out.print(name, style="bold", soft_wrap=True)
    out.print(what, soft_wrap=True)
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
        rows.add_row(f"{q * 100:g}%", *(number(s.quantiles.get(q)) for s in found))
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
