"""Tables as plain text, for `print(result)`: columns as wide as their widest cell, nothing is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise


def format_table(rows: Sequence[Sequence[str]], heads: Sequence[str] = ()) -> Iterator[str]:
    """Rows as lines of text.

    Args:
        rows: of equally many cells.
        heads: titles of the columns; one that begins with `>` is of a column that is aligned right.
    """
    titles = [head.removeprefix(">") for head in heads]
    lines = [titles, *rows] if heads else list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [head.startswith(">") for head in heads] or [False] * len(widths)
    for line in lines:
        cells = [
            cell.rjust(width) if ends else cell.ljust(width)
            for cell, width, ends in zip(line, widths, right, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def shorten_rows(rows: Sequence[Sequence[str]], most: int, width: int) -> list[Sequence[str]]:
    """The first and the last rows, and how many are left out between them.

    Args:
        rows: all of them.
        most: how many are kept.
        width: the number of columns.
    """
    if len(rows) <= most:
        return list(rows)
    last = most // 2
    gap = [f"... {len(rows) - most:,} more", *[""] * (width - 1)]
    return [*rows[: most - last], gap, *rows[-last:]]


def format_series(numbers: Sequence[int]) -> str:
    """`0, 10 … 90 (10)`: numbers that may be many."""
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers)) or "–"
    steps = {b - a for a, b in pairwise(numbers)}
    every = f", every {steps.pop()}" if len(steps) == 1 and steps != {1} else ""
    return f"{numbers[0]} … {numbers[-1]} ({len(numbers)}{every})"
