"""How the command line speaks: tables, numbers with units; plain where no person is looking."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_flex.notebook_html import count_words
from megatron_flex.progress import format_bytes

UNBOUNDED_WIDTH = 4000  # columns of what is no terminal: nothing is cut for a program that reads on


def make_console(file: TextIO | None = None) -> Console:
    """Where output goes: as wide as the terminal, or as wide as it likes."""
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else UNBOUNDED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


ZERO_CELLS = ("0", "0 B")
MIN_TEXT_WIDTH = 12  # letters that a column of words needs at least


def make_table(*columns: str, title: str = "") -> Table:
    """An empty table; columns whose name begins with `>` are numbers and are aligned right."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
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
    """A table without columns of numbers in which no row has any; words where it is too narrow for one."""
    shown = [
        n
        for n, name in enumerate(columns)
        if not name.startswith(">") or any(row[n] not in ZERO_CELLS for row in rows)
    ]
    names, cells = [columns[n] for n in shown], [[row[n] for n in shown] for row in rows]
    least = sum(
        2 + (max(len(name) - 1, *(len(c[n]) for c in cells)) if name.startswith(">") else MIN_TEXT_WIDTH)
        for n, name in enumerate(names)
    )
    if least <= out.width:
        made = make_table(*names)
        for row in cells:
            made.add_row(*row)
        out.print(made)
        return
    for first, *rest in cells:
        told = [
            f"{name.removeprefix('>')} {cell}"
            for name, cell in zip(names[1:], rest, strict=True)
            if cell not in ZERO_CELLS
        ]
        out.print(Text(first, "bold"))
        out.print(Padding(Text(", ".join(told)), (0, 0, 0, 2)))


def print_json(told: Any) -> None:
    """Print plain values for a program."""
    sys.stdout.write(json.dumps(told, indent=1, default=str) + "\n")


def format_number(value: float | int | None, digits: int = 4) -> str:
    """The shortest text of a number with that many digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{digits}g}"


def format_series(numbers: Sequence[int]) -> str:
    """`0, 10 … 90 (10)`: numbers that may be many."""
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers)) or "–"
    steps = {b - a for a, b in pairwise(numbers)}
    every = f", every {steps.pop()}" if len(steps) == 1 and steps != {1} else ""
    return f"{numbers[0]} … {numbers[-1]} ({len(numbers)}{every})"


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
