"""Statistics in a notebook: each tensor as it was last measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_flex.markup import BAD, WARN, Markup, counted, fragment, line, table
from megatron_flex.statistics.measured import Measured

if TYPE_CHECKING:
    from megatron_flex.statistics.reading import OpenStatistics

HEADS = ("tensor", ">iteration", ">rms", ">mean", ">std", ">greatest", ">zeros", ">kurtosis", ">not finite")
REST = "found.sites lists the names, found['NAME'] has one over iterations, found.pandas() everything"


def in_html(found: OpenStatistics) -> Markup:
    """What was measured, of each tensor the last row; those with values that are not finite are marked."""
    last = {name: row for rows in found.by_iteration.values() for name, row in rows.items()}
    rows = sorted(last.values(), key=lambda row: (not _broken(row), row.order))
    iterations = found.iterations
    ends = f" ({iterations[0]} to {iterations[-1]})" if iterations else ""
    told = (
        f"{counted(len(found.headers), 'start')} of the run, {counted(len(rows), 'tensor')}, "
        f"{counted(len(iterations), 'iteration')}{ends}"
    )
    notes = [line(told)]
    if found.torn:
        told = f"lines and files that are torn, and left out: {found.torn}, of killed runs or full disks"
        notes.append(line(told, WARN))
    marked = {n: BAD for n, row in enumerate(rows) if _broken(row)}
    shown = table(HEADS, (_cells(row) for row in rows), len(rows), REST, marked)
    return fragment(f"OpenStatistics · {found.path}", *notes, shown)


def _broken(row: Measured) -> int:
    return row.nans + row.infinities


def _cells(row: Measured) -> tuple[object, ...]:
    numbers = (row.rms, row.mean, row.std, row.absmax, row.zeros, row.kurtosis)
    told = ("–" if n is None else f"{n:.4g}" for n in numbers)
    broken = f"{row.nans:,} NaN, {row.infinities:,} infinite" if _broken(row) else ""
    return row.site, row.iteration, *told, broken
