"""A comparison in a notebook: the verdict, and the rows around the first divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_flex.markup import BAD, MOST_ROWS, WARN, Markup, counted, details, fragment, line, lines, table

if TYPE_CHECKING:
    from megatron_flex.compare.comparison import Comparison

GOOD = "rgba(42,157,74,.25)"
COLOURS = {"equal": GOOD, "round-off": GOOD, "diverges": BAD}
REST = "found.rows has all of them, found.table(N) and `megatron-flex compare --rows N` show N"


def in_html(found: Comparison) -> Markup:
    """The verdict, what it rests on, and a table: the first divergence marked, what is left out said."""
    from megatron_flex.compare.comparison import HEADS, cells  # which needs this file

    first, rows = found.first, found.shown(MOST_ROWS)
    heads = ("", *(h if h in ("site", "worst element") else f">{h}" for h in HEADS))
    body = (("→ first" if row is first else "", *cells(row)) for row in rows)
    marked = {n: BAD if row is first else WARN for n, row in enumerate(rows) if row.diverges}
    left_out = len(found.rows) - len(rows)
    where = "around the first divergence" if first is not None else "nearest to their tolerance"
    told = [f"{counted(len(rows), 'row')} {where}, of {len(found.rows):,}"] if left_out else []
    replicas = [str(r) for r in found.replicas]
    return fragment(
        f"Comparison · {found.verdict}",
        *(line(text, COLOURS.get(text.partition(":")[0], "")) for text in found.summary()),
        details(counted(len(replicas), "replica") + " out of step", lines(replicas, "found.replicas has all"))
        if len(replicas) > 3
        else Markup(""),
        *(line(text) for text in told),
        table(heads, body, len(found.rows), REST, marked),
    )
