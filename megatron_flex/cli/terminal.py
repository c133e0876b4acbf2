"""How the command line speaks: tables, numbers with units, progress; plain where no person is looking."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

WIDE = 4000  # columns of what is no terminal: nothing is cut for a program that reads on
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def console(file: TextIO | None = None) -> Console:
    """Where output goes: as wide as the terminal, or as wide as it likes."""
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


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


def say_json(told: Any) -> None:
    """Print plain values for a program."""
    sys.stdout.write(json.dumps(told, indent=1, default=str) + "\n")


def in_bytes(count: float) -> str:
    """`1.5 GiB`."""
    power = 0
    while count >= 1023.5 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {UNITS[power]}" if power == 0 or count >= 99.95 else f"{count:.1f} {UNITS[power]}"


def number(value: float | int | None, digits: int = 4) -> str:
    """A number as short as it can be said in so many digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{digits}g}"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def series(numbers: Sequence[int]) -> str:
    """`0, 10 … 90 (10)`: numbers that may be many."""
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers)) or "–"
    steps = {b - a for a, b in pairwise(numbers)}
    every = f", every {steps.pop()}" if len(steps) == 1 and steps != {1} else ""
    return f"{numbers[0]} … {numbers[-1]} ({len(numbers)}{every})"


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives what is told how much is done; None where nobody looks. The bar goes when it is done."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[size]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, size="")

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, size=f"{in_bytes(done)} of {in_bytes(total)}")

        yield tell


def unicode_works() -> bool:
    """Whether the output can show more than ASCII."""
    try:
        "█▏…–".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
