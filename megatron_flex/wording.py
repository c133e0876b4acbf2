"""Counts and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def count_words(count: int, one: str, many: str = "") -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_series(numbers: Sequence[int]) -> str:
    """`0, 10 … 90 (10)`: numbers that may be many."""
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers)) or "–"
    steps = {b - a for a, b in pairwise(numbers)}
    every = f", every {steps.pop()}" if len(steps) == 1 and steps != {1} else ""
    return f"{numbers[0]} … {numbers[-1]} ({len(numbers)}{every})"


def format_number(value: float | int | None, digits: int = 4) -> str:
    """The shortest text of a number with that many digits."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{digits}g}"
