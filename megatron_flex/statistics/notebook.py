"""Statistics in a notebook: each tensor as it was last measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_flex.notebook_html import BAD_COLOUR, WARN_COLOUR, Markup, count_words, html_fragment, html_line, html_table
from megatron_flex.statistics.measured import TensorStatistics

if TYPE_CHECKING:
    from megatron_flex.statistics.reading import OpenStatistics

STATISTICS_HEADS = ("tensor", ">iteration", ">rms", ">mean", ">std", ">greatest", ">zeros", ">kurtosis", ">not finite")
SITES_HINT = "found.sites lists the names, found['NAME'] has one over iterations, found.pandas() everything"


def render_statistics(found: OpenStatistics) -> Markup:
    """What was measured, of each tensor the last row; those with values that are not finite are marked."""
    last = {name: row for rows in found.by_iteration.values() for name, row in rows.items()}
    rows = sorted(last.values(), key=lambda row: (not _count_nonfinite(row), row.order))
    iterations = found.iterations
    ends = f" ({iterations[0]} to {iterations[-1]})" if iterations else ""
    texts = (
        f"{count_words(len(found.headers), 'start')} of the run, {count_words(len(rows), 'tensor')}, "
        f"{count_words(len(iterations), 'iteration')}{ends}"
    )
    notes = [html_line(texts)]
    if found.torn:
        texts = f"lines and files that are torn, and left out: {found.torn}, of killed runs or full disks"
        notes.append(html_line(texts, WARN_COLOUR))
    marked = {n: BAD_COLOUR for n, row in enumerate(rows) if _count_nonfinite(row)}
    shown = html_table(STATISTICS_HEADS, (_format_statistics_cells(row) for row in rows), len(rows), SITES_HINT, marked)
    return html_fragment(f"OpenStatistics · {found.path}", *notes, shown)


def _count_nonfinite(row: TensorStatistics) -> int:
    return row.nans + row.infinities


def _format_statistics_cells(row: TensorStatistics) -> tuple[object, ...]:
    numbers = (row.rms, row.mean, row.std, row.absmax, row.zeros, row.kurtosis)
    texts = ("–" if n is None else f"{n:.4g}" for n in numbers)
    broken = f"{row.nans:,} NaN, {row.infinities:,} infinite" if _count_nonfinite(row) else ""
    return row.site, row.iteration, *texts, broken
