"""Parts of a document as lines of text, for a terminal of some width or for a program that reads on.

Names are whole at any width, so that they can be copied from any terminal. rich prints the lines in their
tones; its own tables break names, and take a hundred times as long for thousands of rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import IO, TYPE_CHECKING, NamedTuple, TextIO

from megatron_flex.document.record import (
    Bars,
    Branch,
    Drawing,
    Note,
    Part,
    Row,
    Span,
    Table,
    Text,
    Tone,
    Tree,
    plain,
    split_spans,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text as RichText

Line = tuple[Span, ...]
UNBOUNDED_WIDTH = 4000  # columns of what is not a terminal: nothing is cut for a program that reads on
STYLES: dict[Tone, str] = {
    "strong": "bold",
    "dim": "dim",
    "good": "green",
    "bad": "bold red",
    "differs": "red",
    "open": "bold yellow",
    "note": "yellow",
    "on": "green",
    "off": "yellow",
}
EIGHTHS = "▏▎▍▌▋▊▉█"
LETTERS = "○●◌│├└─·–…→▁▂▃▄▅▆▇" + EIGHTHS
ASCII_LETTERS = str.maketrans(LETTERS, "o*-|++-;-.>_.-=+*%########")  # of a terminal without Unicode
GAP = 2  # blanks between two columns
INDENT = 2  # blanks before the cells of a row whose name has a line of its own
MIN_TEXT_WIDTH = 12  # letters that a column of words needs at least
MAX_BARS_WIDTH = 100  # columns of a histogram
ZERO_CELLS = ("0", "0 B")
NO_BREAK = "\N{NO-BREAK SPACE}"
GUIDES = "│  ", "├─ ", "└─ ", "   "


def make_console(file: TextIO | None = None, width: int | None = None) -> Console:
    """Where output goes: as wide as the terminal, or as wide as it likes."""
    from rich.console import Console

    stream = sys.stdout if file is None else file
    if width is None and not stream.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = UNBOUNDED_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def supports_unicode(file: IO[str]) -> bool:
    """Whether a stream can show more than ASCII."""
    try:
        LETTERS.encode(getattr(file, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def print_parts(parts: Sequence[Part], file: TextIO | None = None, width: int | None = None) -> None:
    """Print parts of a document, with colours on a terminal.

    Args:
        parts: of the document.
        file: where to; None for stdout.
        width: the columns of the terminal; None to find out.
    """
    console = make_console(file, width)
    for line in format_rich(parts, console.width, console.file):
        console.print(line, soft_wrap=True)


def format_rich(parts: Sequence[Part], width: int, file: IO[str]) -> Iterator[RichText]:
    """The lines of `format_lines` for rich, in letters that the file can hold."""
    from rich.text import Text as RichText

    letters = {} if supports_unicode(file) else ASCII_LETTERS
    for line in format_lines(parts, width):
        yield RichText.assemble(*((text.translate(letters), STYLES.get(tone, "")) for text, tone in line))


def format_text(parts: Sequence[Part]) -> str:
    """Parts of a document as plain text of any width."""
    lines = ("".join(span.text for span in line).rstrip() for line in format_lines(parts, UNBOUNDED_WIDTH))
    return "\n".join(lines)


def format_lines(parts: Sequence[Part], width: int) -> Iterator[Line]:
    """The lines of parts of a document; before a table, a tree or a histogram an empty one.

    Args:
        parts: of the document.
        width: the columns of the terminal; only words and names that are longer make a line longer.
    """
    for number, part in enumerate(parts):
        if isinstance(part, Note):
            yield from _note_lines(part, width)
        elif number and not isinstance(part, Drawing):
            yield ()
        if isinstance(part, Table):
            yield from _TableLayout(part).lines(width)
        elif isinstance(part, Tree):
            yield from _tree_lines(part, width)
        elif isinstance(part, Bars):
            yield from _bar_lines(part, min(width, MAX_BARS_WIDTH))


def _note_lines(note: Note, width: int) -> Iterator[Line]:
    """A note, broken between words; the terminal breaks what has several tones."""
    if not isinstance(note.text, str) or _cell_width(note.text) <= width:
        yield split_spans(note.text, note.tone)
        return
    indent = " " * (len(note.text) - len(note.text.lstrip()))
    for line in _wrap(note.text, width, indent):
        yield (Span(line, note.tone),)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """A text in lines, broken between words only."""
    return wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _cell_width(text: Text) -> int:
    """How many columns of a terminal a text takes."""
    letters = plain(text)
    if letters.isascii():
        return len(letters)
    from rich.cells import cell_len

    return cell_len(letters)


def _pad(text: Text, width: int, tone: Tone, right: bool) -> Line:
    """A cell of that width."""
    blanks = Span(" " * max(0, width - _cell_width(text)))
    return (blanks, *split_spans(text, tone)) if right else (*split_spans(text, tone), blanks)


# -- tables ----------------------------------------------------------------------------------------------


class _TableLayout:
    """The lines of a table.

    Where the terminal is too narrow, columns of words are folded down to half of their width; where that is
    not enough, each row takes two lines, the name and below it the other cells; where that is not enough
    either, the other cells follow their titles, in as many lines as they take.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.titles = [column.removeprefix(">") for column in table.columns]
        self.right = [column.startswith(">") for column in table.columns]
        count = len(table.columns)
        head = [Row(self.titles, "strong")] if table.header else []
        rows = [Row(row.cells[:count], row.tone) for row in (*head, *table.rows)]
        self.rows = [Row([*row.cells, *[""] * (count - len(row.cells))], row.tone) for row in rows]
        self.widths = [max((_cell_width(row.cells[n]) for row in self.rows), default=0) for n in range(count)]

    def lines(self, width: int) -> Iterator[Line]:
        if self.table.title:
            yield (Span(self.table.title, "strong"),)
        rest = range(self.table.name + 1, len(self.widths))
        gaps = GAP * (len(self.widths) - 1)
        if sum(self.widths) + gaps <= width:
            for row in self.rows:
                yield self._join(row.cells, range(len(self.widths)), self.widths, row.tone)
        elif sum(map(self._least, range(len(self.widths)))) + gaps <= width:
            yield from self._folded_lines(self._fold_widths(width - gaps))
        elif INDENT + sum(self.widths[n] for n in rest) + GAP * (len(rest) - 1) <= width:
            for row in self.rows:
                yield self._name_line(row)
                yield (Span(" " * INDENT), *self._join(row.cells, rest, self.widths, row.tone))
        else:
            yield from self._described_lines(rest, width)

    def _join(self, cells: Sequence[Text], columns: range, widths: Sequence[int], tone: Tone) -> Line:
        """Cells side by side."""
        spans: list[Span] = []
        for n in columns:
            spans += [Span(" " * GAP)] if spans else []
            spans += _pad(cells[n], widths[n], tone, self.right[n])
        return tuple(spans)

    def _least(self, column: int) -> int:
        """How many letters a column needs."""
        widest = self.widths[column]
        if column == self.table.name or self.right[column]:
            return widest
        cells = [row.cells[column] for row in self.rows]
        words = (
            word
            for cell in cells
            for word in (plain(cell).split() if isinstance(cell, str) else [plain(cell)])
        )
        return max(min(widest, MIN_TEXT_WIDTH), -(-widest // 2), *map(_cell_width, words))

    def _fold_widths(self, room: int) -> list[int]:
        """Widths of columns that need no more than `room` in all: the widest ones give way."""
        widths, least = list(self.widths), [self._least(n) for n in range(len(self.widths))]
        while sum(widths) > room:
            widest = max((n for n, width in enumerate(widths) if width > least[n]), key=widths.__getitem__)
            widths[widest] -= 1
        return widths

    def _folded_lines(self, widths: Sequence[int]) -> Iterator[Line]:
        for row in self.rows:
            folded = [
                [cell] if _cell_width(cell) <= width else _wrap(plain(cell), width)
                for cell, width in zip(row.cells, widths, strict=True)
            ]
            for number in range(max(map(len, folded))):
                cells = [cell[number] if number < len(cell) else "" for cell in folded]
                yield self._join(cells, range(len(cells)), widths, row.tone)

    def _name_line(self, row: Row) -> Line:
        """What is before the name, and the name, in a line that the terminal may break."""
        first = [cell for cell in row.cells[: self.table.name + 1] if cell]
        spans = [span for cell in first for span in (Span(" "), *split_spans(cell, row.tone or "strong"))]
        return tuple(spans[1:])

    def _described_lines(self, columns: range, width: int) -> Iterator[Line]:
        name = self.table.name
        for row in self.rows[self.table.header :]:
            title = (Span(f"{self.titles[name]} "),) if self.right[name] else ()
            yield (*title, *self._name_line(row))
            words = [
                f"{self.titles[n]} {plain(row.cells[n])}".strip().replace(" ", NO_BREAK)
                for n in columns
                if plain(row.cells[n]) not in ("", *ZERO_CELLS)
            ]
            for line in _wrap(", ".join(words), width - INDENT):
                yield (Span(" " * INDENT + line.replace(NO_BREAK, " "), row.tone),)


# -- trees -----------------------------------------------------------------------------------------------


class _TreeLine(NamedTuple):
    """A row of a tree: what is drawn before the name, and below it on further lines; the cells."""

    guide: str
    under: str
    cells: list[Text]
    tone: Tone


def _tree_lines(tree: Tree, width: int) -> Iterator[Line]:
    """The tree in columns, and below it the reasons that its rows name by numbers."""
    reasons: dict[str, int] = {}
    titles = ["", *(title.removeprefix(">") for title in tree.columns), ""]
    rows = [_TreeLine("", "", [*titles], "strong")]
    for branch in tree.branches:
        rows += _branch_lines(branch, "", "", reasons, len(tree.columns))
    starts = _column_starts(rows, width)
    for row in rows:
        yield from _place_cells(row, starts, width)
    for number, (reason, n) in enumerate(reasons.items()):
        if not number:
            yield ()
        for line in _wrap(f"({n}) {reason}", width):
            yield (Span(line, "dim"),)


def _branch_lines(
    branch: Branch, guide: str, under: str, reasons: dict[str, int], columns: int
) -> Iterator[_TreeLine]:
    """The rows of a branch, from the top; new reasons are added."""
    number = f" ({reasons.setdefault(branch.reason, len(reasons) + 1)})" if branch.reason else ""
    cells = [*branch.cells, *[""] * (columns - len(branch.cells))]
    name = f"{branch.mark} {branch.label}".strip()
    yield _TreeLine(guide, under, [name, *cells, branch.more + number], branch.tone)
    for child in branch.children:
        last = child is branch.children[-1]
        below = under + GUIDES[3 if last else 0]
        yield from _branch_lines(child, under + GUIDES[2 if last else 1], below, reasons, columns)


def _column_starts(rows: Sequence[_TreeLine], width: int) -> list[int]:
    """Where each column starts.

    The second column is as wide as its widest cell for which the other columns fit, and the last column
    counts only if those cells fit beside it: what is wider has a line of its own.
    """
    names = max(len(row.guide) + _cell_width(row.cells[0]) for row in rows)
    columns = zip(*(row.cells[1:] for row in rows), strict=True)
    widths = [names, *(max(map(_cell_width, column)) for column in columns)]
    for rest in (widths[2:], widths[2:-1]):
        room = width - widths[0] - sum(rest) - GAP * (len(rest) + 1)
        fitting = [cell for row in rows[1:] if 0 < (cell := _cell_width(row.cells[1])) <= room]
        if fitting:
            widths[1] = max(*fitting, _cell_width(rows[0].cells[1]))
            break
    return [sum(widths[:n]) + GAP * n for n in range(len(widths))]


def _place_cells(row: _TreeLine, starts: Sequence[int], width: int) -> Iterator[Line]:
    """The lines of a row: each cell in its column; below, with the guide, what has no room beside them."""
    line = [Span(row.guide, "dim"), *split_spans(row.cells[0], row.tone)]
    for number, cell in enumerate(row.cells[1:], 1):
        if not cell:
            continue
        start, used = starts[number], sum(_cell_width(span.text) for span in line)
        fits = start + _cell_width(cell) <= width
        if not fits or used + GAP > start:
            yield tuple(line)
            line, used = [Span(row.under, "dim")], len(row.under)
        pieces = [plain(cell)]
        if not fits:
            start = len(row.under) + GAP
            pieces = wrap(pieces[0], max(width - start, MIN_TEXT_WIDTH))
        tone = row.tone if number == len(row.cells) - 1 or row.tone == "strong" else ""
        for at, piece in enumerate(pieces):
            if at:
                yield tuple(line)
                line, used = [Span(row.under, "dim")], len(row.under)
            line += [Span(" " * max(start - used, 0)), Span(piece, tone)]
    yield tuple(line)


# -- histograms ------------------------------------------------------------------------------------------


def _bar_lines(bars: Bars, width: int) -> Iterator[Line]:
    """A line for each bar: its label, the bar, its count."""
    yield (Span(bars.title, "strong"),)
    most = max(count for _, count in bars.bars)
    labels = max(len(label) for label, _ in bars.bars)
    counts = len(f"{most:,}")
    room = max(8, width - labels - counts - 3)
    for label, count in bars.bars:
        share = count / most if most else 0.0
        yield (Span(f"{label:>{labels}} {format_bar(share, room):<{room}} {count:>{counts},}"),)


def format_bar(share: float, width: int) -> str:
    """A bar of so much of a width; something is shown of whatever is not nothing."""
    eighths = max(1, round(share * width * 8)) if share else 0
    return EIGHTHS[-1] * (eighths // 8) + (EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")
