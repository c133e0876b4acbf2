"""What the results of all comparisons have in common: the verdict first, a table after it, and plain data."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_flex.document import Document, Note, Part, Renderable, Row, Table, Tone

MARKS = {"→": "differs first", "!": "differs"}
MAX_SHOWN = 20  # rows of a shortened table


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a result's table.

    Attributes:
        cells: below the result's heads.
        differs: whether the two runs differ there.
        is_first: whether it is marked, as the place where they differ first.
    """

    cells: tuple[str, ...]
    differs: bool = False
    is_first: bool = False

    @property
    def tone(self) -> Tone:
        """How the row is shown."""
        return "bad" if self.is_first else "differs" if self.differs else ""

    @property
    def marked(self) -> tuple[str, ...]:
        """The cells after a mark: an arrow where the two differ first, `!` where they differ."""
        return ("→" if self.is_first else "!" if self.differs else "", *self.cells)


def describe_marks(rows: Sequence[TableRow]) -> str:
    """What the marks of these rows mean; empty if none is marked."""
    marked = {row.marked[0] for row in rows}
    meanings = [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marked]
    return f"marks: {', '.join(meanings)}" if meanings else ""


class ComparedResult(Renderable):
    """The result of comparing two runs or two models.

    Attributes:
        HEADS: the titles of the table's columns; those that begin with `>` are numbers.
    """

    HEADS: ClassVar[tuple[str, ...]]

    def __repr__(self) -> str:
        verdict, *_ = self.summary()
        return f"<{type(self).__name__}: {verdict}>"

    @property
    @abstractmethod
    def exit_status(self) -> int:
        """0 if the two do not differ by more than correct ones may, 1 if they do."""

    @abstractmethod
    def summary(self) -> list[str]:
        """Return the result as lines of text, the verdict first."""

    @abstractmethod
    def table_rows(self, most: int = MAX_SHOWN) -> list[TableRow]:
        """Return the rows of the table, the most informative ones."""

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """The result as data, in which numbers may be infinite."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for `json.dump`; infinite and undefined numbers as text.

        Examples:
            >>> from megatron_flex.compare import compare
            >>> compare("dumps/run", "dumps/changed").to_json()["first"]["name"]
            'decoder.layers.3:input'
        """
        plain: dict[str, Any] = _to_plain(self._content())
        return plain

    def table(self, most: int = MAX_SHOWN) -> Document:
        """Return the table alone, for `print`, `rich.print` and notebooks.

        Examples:
            >>> from megatron_flex.compare import compare
            >>> print(compare("dumps/run", "dumps/changed").table(most=2))
               site ...
            →  decoder.layers.3:input ...
               decoder.layers.3.input_layernorm:output ...
            marks: → differs first
        """
        return describe_result("", [], self.HEADS, self.table_rows(most))

    def to_document(self, most: int | None = None) -> Document:
        """Return what is shown of it: the summary, and below it the table.

        Args:
            most: so many rows; by default there is a table only where the two differ.
        """
        rows = self.table_rows(*([] if most is None else [most])) if most or self.exit_status == 1 else []
        return describe_result(type(self).__name__, self.summary(), self.HEADS, rows)


def describe_result(
    title: str,
    summary: Iterable[str],
    heads: Sequence[str],
    rows: Sequence[TableRow],
    *,
    count: int = 0,
    rest: str = "",
) -> Document:
    """What is shown of a comparison.

    Args:
        title: what it is.
        summary: lines of text, the verdict first.
        heads: the titles of the first cells of each row; the table is without the others.
        rows: of the table, which is left out if there are none.
        count: the number of rows in all, if these are not all.
        rest: how to see the rows that are not shown.
    """
    parts: list[Part] = [Note(line, get_tone(line)) for line in summary]
    if rows:
        table = [Row(row.marked[: len(heads) + 1], row.tone) for row in rows]
        parts.append(Table(("", *heads), table, name=1, count=count, rest=rest))
    if marks := describe_marks(rows):
        parts.append(Note(marks, "dim"))
    return Document(title, parts)


TONES: dict[str, Tone] = {  # of the first word of a line of a summary
    "equal": "good",
    "agrees": "good",
    "not distinguishable from round-off": "good",
    "diverges": "bad",
    "differs": "bad",
    "incomplete": "open",
    "cannot be compared": "open",
}


def get_tone(line: str) -> Tone:
    """How a line of a summary is shown, by its verdict."""
    return TONES.get(line.partition(":")[0], "")


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
