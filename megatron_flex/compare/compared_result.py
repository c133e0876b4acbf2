"""What the results of all comparisons have in common: the verdict first, a table after it, and plain data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_flex.text_table import format_table

if TYPE_CHECKING:
    from rich.table import Table

MARKS = {"→": "differs first", "!": "differs"}
MOST_SHOWN = 20  # rows of a shortened table
Tone = Literal["good", "bad", "open"]


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
    def style(self) -> str | None:
        """For a terminal."""
        return "bold red" if self.is_first else "red" if self.differs else None

    @property
    def marked(self) -> tuple[str, ...]:
        """The cells after a mark: an arrow where the two differ first, `!` where they differ."""
        return ("→" if self.is_first else "!" if self.differs else "", *self.cells)


def describe_marks(rows: Sequence[TableRow]) -> str:
    """What the marks of these rows mean; empty if none is marked."""
    marked = {row.marked[0] for row in rows}
    meanings = [f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in marked]
    return f"marks: {', '.join(meanings)}" if meanings else ""


class ComparedResult(ABC):
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
    def table_rows(self, most: int = MOST_SHOWN) -> list[TableRow]:
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

    def table(self, most: int = MOST_SHOWN) -> Table:
        """Return a table for `rich.print`.

        Raises:
            ImportError: rich is not installed.

        Examples:
            >>> import rich
            >>> from megatron_flex.compare import compare
            >>> table = compare("dumps/run", "dumps/changed").table(most=2)
            >>> table.row_count  # rich.print(table)
            2
        """
        from rich.table import Table

        table = Table("", *(head.removeprefix(">") for head in self.HEADS))
        for row in self.table_rows(most):
            table.add_row(*row.marked, style=row.style)
        return table

    def __str__(self) -> str:
        rows = self.table_rows() if self.exit_status == 1 else []
        table = ["", *format_table([row.marked for row in rows], ("", *self.HEADS))] if rows else []
        return "\n".join([*self.summary(), *table, *filter(None, [describe_marks(rows)])])


TONES: dict[str, Tone] = {  # of the first word of a line of a summary
    "equal": "good",
    "agrees": "good",
    "not distinguishable from round-off": "good",
    "diverges": "bad",
    "differs": "bad",
    "incomplete": "open",
    "cannot be compared": "open",
}


def get_tone(line: str) -> Tone | None:
    """What a line of a summary says by its verdict; None for a line that begins with none."""
    return TONES.get(line.partition(":")[0])


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
