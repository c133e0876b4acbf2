"""How the command line speaks: tables, numbers with units; plain where no person is looking."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_flex.notebook_html import count_words
from megatron_flex.progress import format_bytes
from megatron_flex.text_table import format_series

UNBOUNDED_WIDTH = 4000  # columns of what is not a terminal: nothing is cut for a program that reads on


def make_console(file: TextIO | None = None) -> Console:
    """Where output goes: as wide as the terminal, or as wide as it likes."""
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else UNBOUNDED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


ZERO_CELLS = ("0", "0 B")
MIN_TEXT_WIDTH = 12  # letters that a column of words needs at least
GAP = 2  # blanks between two columns
NO_BREAK = "\N{NO-BREAK SPACE}"
INDENT = 2  # blanks before the cells of a row whose name has a line of its own


class NameTable:
    """A table whose names are never broken: they can be copied from any terminal.

    Where the terminal is too narrow, columns of words are folded down to half of their width; where that is
    not enough, each row takes two lines, the name and below it the other cells.

    Args:
        columns: their titles; those that begin with `>` are numbers and are aligned right.
        name: which column has the names.
    """

    def __init__(self, *columns: str, name: int = 0) -> None:
        self.columns, self.name = list(columns), name
        self.rows: list[tuple[list[Text], str | None]] = []

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        """Add a row; cells at its end may be left out."""
        made = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        made += [Text("") for _ in range(len(self.columns) - len(made))]
        self.rows.append((made, style))

    def print(self, out: Console) -> None:
        """Print the table."""
        numbers = range(len(self.columns))
        if sum(map(self._least, numbers)) + GAP * (len(numbers) - 1) <= out.width:
            made = make_table(*self.columns)
            made.columns[self.name].no_wrap = True
            for cells, style in self.rows:
                made.add_row(*cells, style=style)
            out.print(made)
            return
        rest = range(self.name + 1, len(self.columns))
        widths = {n: self._widest(n) for n in rest}
        if INDENT + sum(widths.values()) + GAP * (len(rest) - 1) <= out.width:
            self._print_pairs(out, widths)
        else:
            self._print_words(out)

    def _is_number(self, column: int) -> bool:
        return self.columns[column].startswith(">")

    def _title(self, column: int) -> str:
        return self.columns[column].removeprefix(">")

    def _widest(self, column: int) -> int:
        return max(len(self._title(column)), *(cells[column].cell_len for cells, _ in self.rows), 0)

    def _least(self, column: int) -> int:
        """How many letters a column needs."""
        widest = self._widest(column)
        if column == self.name or self._is_number(column):
            return widest
        words = [self._title(column), *(w for cells, _ in self.rows for w in cells[column].plain.split())]
        return max(min(widest, MIN_TEXT_WIDTH), -(-widest // 2), *map(len, words))

    def _print_name(self, out: Console, cells: Sequence[Text], style: str | None) -> None:
        """What is before the name, and the name, in a line that the terminal may break and rich may not."""
        line = Text(" ").join(cell for cell in cells[: self.name + 1] if cell)
        out.print(line, style=style or "bold", soft_wrap=True)

    def _print_pairs(self, out: Console, widths: Mapping[int, int]) -> None:
        """Two lines for a row: the name; then the other cells, in columns."""
        titles = [Text(self._title(n), "bold") for n in range(len(self.columns))]
        for cells, style in ((titles, None), *self.rows):
            self._print_name(out, cells, style)
            row = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=False)
            for n, width in widths.items():
                row.add_column(justify="right" if self._is_number(n) else "left", width=width)
            row.add_row(*(cells[n] for n in widths), style=style)
            out.print(Padding(row, (0, 0, 0, INDENT), expand=False))

    def _print_words(self, out: Console) -> None:
        """The name of a row; below it the other cells with their titles, in as many lines as they take."""
        for cells, style in self.rows:
            self._print_name(out, cells, style)
            words = [
                f"{self._title(n)} {cells[n].plain}".replace(" ", NO_BREAK)
                for n in range(self.name + 1, len(cells))
                if cells[n].plain not in ("", *ZERO_CELLS)
            ]
            for line in wrap(", ".join(words), out.width - INDENT):
                out.print(Text(" " * INDENT + line.replace(NO_BREAK, " ")), style=style)


def make_table(*columns: str, title: str = "") -> Table:
    """An empty table; columns whose name begins with `>` are numbers and are aligned right."""
    out = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold", title_justify="left")
    out.title = Text(title, "bold") if title else None
    for name in columns:
        number = name.startswith(">")
        out.add_column(
            name.removeprefix(">"),
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
        )
    return out


def print_nonempty_columns(out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without columns of numbers in which no row has any; names are never broken."""
    shown = [
        n
        for n, name in enumerate(columns)
        if not name.startswith(">") or any(row[n] not in ZERO_CELLS for row in rows)
    ]
    table = NameTable(*(columns[n] for n in shown))
    for row in rows:
        table.add_row(*(row[n] for n in shown))
    table.print(out)


def print_json(content: Any) -> None:
    """Print plain values for a program, as `format_json` writes them."""
    from megatron_flex.dump.json_form import format_json  # which imports torch, that tables do not need

    sys.stdout.write(format_json(content) + "\n")


def format_number(value: float | int | None, digits: int = 4) -> str:
    """The shortest text of a number with that many digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{digits}g}"


def supports_unicode() -> bool:
    """Whether the output can show more than ASCII."""
    try:
        "█▏…–".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


__all__ = [
    "count_words",
    "format_bytes",
    "format_number",
    "format_series",
    "make_console",
    "make_table",
    "print_json",
    "supports_unicode",
]
