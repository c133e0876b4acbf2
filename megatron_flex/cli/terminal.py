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

from megatron_flex.markup import counted
from megatron_flex.progress import in_bytes

WIDE = 4000  # columns of what is no terminal: nothing is cut for a program that reads on


def console(file: TextIO | None = None) -> Console:
    """Where output goes: as wide as the terminal, or as wide as it likes."""
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


NOTHING = ("0", "0 B")
NARROW = 12  # letters that a column of words needs at least


def table(*columns: str, title: str = "") -> Table:
    """An empty table; columns whose name begins with `>` are numbers and stand to the right."""
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


def print_filled(out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without columns of numbers in which no row has any; words where it is too narrow for one."""
    said = [
        n
        for n, name in enumerate(columns)
        if not name.startswith(">") or any(row[n] not in NOTHING for row in rows)
    ]
    names, cells = [columns[n] for n in said], [[row[n] for n in said] for row in rows]
    least = sum(
        2 + (max(len(name) - 1, *(len(c[n]) for c in cells)) if name.startswith(">") else NARROW)
        for n, name in enumerate(names)
    )
    if least <= out.width:
        made = table(*names)
        for row in cells:
            made.add_row(*row)
        out.print(made)
        return
    for first, *rest in cells:
        told = [
            f"{name.removeprefix('>')} {cell}"
            for name, cell in zip(names[1:], rest, strict=True)
            if cell not in NOTHING
        ]
        out.print(Text(first, "bold"))
        out.print(Padding(Text(", ".join(told)), (0, 0, 0, 2)))


def say_json(told: Any) -> None:
    """Print plain values for a program."""
    sys.stdout.write(json.dumps(told, indent=1, default=str) + "\n")


def number(value: float | int | None, digits: int = 4) -> str:
    """A number as short as it can be said in so many digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{digits}g}"


def series(numbers: Sequence[int]) -> str:
    """`0, 10 … 90 (10)`: numbers that may be many."""
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers)) or "–"
    steps = {b - a for a, b in pairwise(numbers)}
    every = f", every {steps.pop()}" if len(steps) == 1 and steps != {1} else ""
    return f"{numbers[0]} … {numbers[-1]} ({len(numbers)}{every})"


def unicode_works() -> bool:
    """Whether the output can show more than ASCII."""
    try:
        "█▏…–".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


__all__ = [
    "console",
    "counted",
    "in_bytes",
    "number",
    "say_json",
    "series",
    "table",
    "unicode_works",
]
