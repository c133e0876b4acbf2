"""What a result shows, whatever shows it: notes, tables, trees, bars and drawings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Tone = Literal["", "strong", "dim", "good", "bad", "differs", "open", "note", "on", "off"]


class Span(NamedTuple):
    """A piece of text in one tone."""

    text: str
    tone: Tone = ""


Text: TypeAlias = str | tuple[Span, ...]


def plain(text: Text) -> str:
    """The text without its tones."""
    return text if isinstance(text, str) else "".join(span.text for span in text)


def split_spans(text: Text, tone: Tone = "") -> tuple[Span, ...]:
    """The spans of a text; what has no tone of its own has this one."""
    if isinstance(text, str):
        return (Span(text, tone),)
    return tuple(Span(span.text, span.tone or tone) for span in text)


class Note(NamedTuple):
    """A line of text."""

    text: Text
    tone: Tone = ""


class Row(NamedTuple):
    """A row of a table; cells at its end may be left out."""

    cells: Sequence[Text]
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        columns: their titles; those that begin with `>` are numbers and are aligned right.
        rows: the rows, or the first of them.
        name: the column of names, which no output breaks.
        title: of the table; in a notebook the table folds below it.
        opened: whether it is unfolded at first.
        count: the number of rows in all, if `rows` has the first only.
        rest: how to see the rows that are not shown.
        header: whether the titles of the columns are shown.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    name: int = 0
    title: str = ""
    opened: bool = True
    count: int = 0
    rest: str = ""
    header: bool = True


@dataclass(frozen=True, slots=True)
class Branch:
    """A row of a tree, with the rows below it.

    Attributes:
        label: its name.
        mark: a sign before the name.
        tone: of the name and of `more`.
        cells: below the tree's columns.
        more: what else is said of it.
        reason: why; a terminal lists each reason once, below the tree.
        badge: what a fold of a notebook says of what is in it.
        opened: whether it is unfolded at first.
        children: the rows below it.
    """

    label: str
    mark: str = ""
    tone: Tone = ""
    cells: Sequence[str] = ()
    more: str = ""
    reason: str = ""
    badge: str = ""
    opened: bool = True
    children: Sequence[Branch] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree.

    Attributes:
        columns: the titles of the cells beside the names; those that begin with `>` are numbers.
        branches: the rows at the top.
        rest: how to see what a notebook does not show of a large tree.
    """

    columns: Sequence[str]
    branches: Sequence[Branch]
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: a label and a count for each bar."""

    title: str
    bars: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture as SVG, which notebooks show."""

    svg: str


Part: TypeAlias = Note | Table | Tree | Bars | Drawing


def shorten_notes(lines: Sequence[str], tone: Tone, most: int, rest: str) -> Iterable[Note]:
    """A note for each of the first lines; then how many more there are and `rest`, how to see them."""
    notes = [Note(line, tone) for line in lines[:most]]
    return [*notes, Note(f"and {len(lines) - most:,} more; {rest}")] if len(lines) > most else notes
