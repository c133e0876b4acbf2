"""The result of a comparison in a terminal: the lines of its summary, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from megatron_flex.cli.console_output import NameTable
from megatron_flex.compare.compared_result import TableRow, Tone, describe_marks, get_tone

STYLES: dict[Tone | None, str] = {"good": "green", "bad": "bold red", "open": "bold yellow"}


def print_result(
    out: Console, summary: Iterable[str], heads: Sequence[str], rows: Sequence[TableRow]
) -> None:
    """Print a summary, and below it a table if there are rows.

    Args:
        out: the terminal.
        summary: lines of text.
        heads: the titles of the first cells of each row.
        rows: of the table.
    """
    for line in summary:
        out.print(line, style=STYLES.get(get_tone(line)), soft_wrap=True)
    if not rows:
        return
    out.print()
    table = NameTable("", *heads, name=1)
    for row in rows:
        table.add_row(*row.marked[: len(heads) + 1], style=row.style)
    table.print(out)
    if marks := describe_marks(rows):
        out.print(marks, style="dim")
