"""A comparison in a notebook: the verdict, and the rows around the first divergence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_flex.notebook_html import BAD_COLOUR, MAX_TABLE_ROWS, WARN_COLOUR, Markup, count_words, html_details, html_fragment, html_line, html_lines, html_table

if TYPE_CHECKING:
    from megatron_flex.compare.comparison import Comparison

GOOD = "rgba(42,157,74,.25)"
VERDICT_COLOURS = {"equal": GOOD, "round-off": GOOD, "diverges": BAD_COLOUR}
ROWS_HINT = "found.rows has all of them, found.table(N) and `megatron-flex compare --rows N` show N"


def render_comparison(found: Comparison) -> Markup:
    """The verdict, what it rests on, and a table: the first divergence marked, what is left out said."""
    from megatron_flex.compare.comparison import COMPARISON_HEADS, format_row_cells  # which needs this file

    first, rows = found.first, found.shown(MAX_TABLE_ROWS)
    heads = ("", *(h if h in ("site", "worst element") else f">{h}" for h in COMPARISON_HEADS))
    body = (("→ first" if row is first else "", *format_row_cells(row)) for row in rows)
    marked = {n: BAD_COLOUR if row is first else WARN_COLOUR for n, row in enumerate(rows) if row.diverges}
    left_out = len(found.rows) - len(rows)
    where = "around the first divergence" if first is not None else "nearest to their tolerance"
    notes = [f"{count_words(len(rows), 'row')} {where}, of {len(found.rows):,}"] if left_out else []
    replicas = [str(r) for r in found.replicas]
    return html_fragment(
        f"Comparison · {found.verdict}",
        *(html_line(text, VERDICT_COLOURS.get(text.partition(":")[0], "")) for text in found.summary()),
        html_details(count_words(len(replicas), "replica") + " out of step", html_lines(replicas, "found.replicas has all"))
        if len(replicas) > 3
        else Markup(""),
        *(html_line(text) for text in notes),
        html_table(heads, body, len(found.rows), ROWS_HINT, marked),
    )
