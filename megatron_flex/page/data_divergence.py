"""Two dumps compared, as the page shows it: errors and tolerances, and the first that is above its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_flex.figures import ComparisonLike, Divergence, FigureError
from megatron_flex.figures import divergence as tables_of
from megatron_flex.page.data_packing import choose_evenly, nonfinite_flag, json_number
from megatron_flex.sites import GRADIENT_SUFFIX

MAX_COMPARISON_ROWS = 30_000


class DescribedComparison(ComparisonLike, Protocol):
    """Two dumps compared, with words; `compare.Comparison`."""

    @property
    def verdict(self) -> str:
        """`equal`, `round-off` or `diverges`."""
        ...

    @property
    def hints(self) -> Sequence[str]:
        """What the first divergence looks like."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What could not be compared."""
        ...


def divergence_json(comparison: DescribedComparison, names: Sequence[str], most: int = MAX_COMPARISON_ROWS) -> dict[str, Any]:
    """The rows of a comparison as plain JSON values.

    Args:
        comparison: of two dumps.
        names: of the page's sites, in their order.
        most: rows that are shown; of more some iterations are left out, and then sites.

    Returns:
        verdict     `equal`, `round-off` or `diverges`
        a, b        the dumps in words
        names       of what was compared, in the order of execution; `.grad` behind gradients
        iterations  those that are shown
        rows        [[page's site or -1, iteration, error or None, tolerance, number in names, flag]]; the
                    flag says what an error is that is no finite number: "NaN", "inf"
        first       the page's site of the first that is above its tolerance; None if none is
        first_row   its row; None if none is
        hints       what that looks like
        notes       [{"kind", "text"}]
    """
    try:
        found = tables_of(comparison)
    except FigureError as error:
        notes = [{"kind": "info", "text": str(error)}]
        empty: dict[str, Any] = {"names": [], "iterations": [], "rows": [], "hints": []}
        none: dict[str, Any] = {"first": None, "first_row": None}
        return {"verdict": "nothing", "a": comparison.a, "b": comparison.b, **empty, **none, "notes": notes}
    notes = [{"kind": "info", "text": text} for text in comparison.notes]
    kept = set(range(len(found.sites)))
    iterations = list(found.iterations)
    if len(comparison.rows) > most:
        several = max(1, most // max(1, len(found.sites)))
        first = {found.first[1]} if found.first else set()
        iterations = sorted({*choose_evenly(iterations, max(1, several - len(first))), *first})
        if several == 1:
            kept = set(choose_evenly(range(len(found.sites)), most // len(iterations) - 1))
            kept |= {found.sites.index(found.first[0])} if found.first else set()
        text = f"{len(kept)} of {len(found.sites)} tensors are shown, in iterations {_list_numbers(iterations)}"
        notes.append({"kind": "info", "text": f"of the comparison {text}"})
    rows, first_row = _comparison_rows(comparison, found, names, set(iterations), kept)
    return {
        "verdict": comparison.verdict,
        "a": comparison.a,
        "b": comparison.b,
        "names": list(found.sites),
        "iterations": iterations,
        "rows": rows,
        "first": None if first_row is None or rows[first_row][0] == -1 else rows[first_row][0],
        "first_row": first_row,
        "hints": list(comparison.hints),
        "notes": notes,
    }


def _comparison_rows(
    comparison: DescribedComparison, found: Divergence, names: Sequence[str], iterations: set[int], kept: set[int]
) -> tuple[list[list[Any]], int | None]:
    """The rows that are shown, and which of them is the first that is above its tolerance."""
    at = {name: i for i, name in enumerate(names)}
    number_of = {name: i for i, name in enumerate(found.sites)}
    rows: list[list[Any]] = []
    first = None
    for row in comparison.rows:
        place = number_of[row.name]
        if row.iteration not in iterations or place not in kept:
            continue
        if found.first == (row.name, row.iteration) and first is None:
            first = len(rows)
        site = at.get(row.name.partition("#")[0].removesuffix(GRADIENT_SUFFIX), -1)
        rows.append([site, row.iteration, json_number(row.error), json_number(row.tolerance), place, nonfinite_flag(row.error)])
    return rows, first


def _list_numbers(numbers: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + (" and more" if len(numbers) > most else "")
