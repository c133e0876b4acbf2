"""The tree in a terminal: a row for each point, layouts and shapes in columns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from typing import TextIO

from rich.console import Console, Group
from rich.text import Text

from megatron_flex.view.model_tree import TreeNode, TreePoint, describe_numbers

PIPE_COLUMNS = 4000  # columns of what is not a terminal: nothing is cut for a program that reads on
FREE, FULL, HIDDEN, OFF = "○", "●", "x", "◌"
GAP = 2  # blanks between two columns
MIN_TEXT_WIDTH = 12  # letters of a line of words, however narrow the terminal is
GUIDES = "│  ", "├─ ", "└─ ", "   "
ASCII_LETTERS = {"○": "o", "●": "*", "◌": "-", "│": "|", "├": "+", "└": "+", "─": "-", "·": ";"}


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A row.

    Attributes:
        guide: what is drawn before the name.
        name: a module's label, or a point with its mark.
        style: of the name.
        layout: in words.
        shape: in words.
        stage: in words.
        more: hooks, or that there can be none.
        why: the reason for that.
    """

    guide: str
    name: str
    style: str = ""
    layout: str = ""
    shape: str = ""
    stage: str = ""
    more: str = ""
    why: str = ""


def tree_rows(root: TreeNode) -> Iterator[TreeRow]:
    """The rows of a tree, from the top; its root is not shown."""
    for child in root.children:
        yield from _node_rows(child, "", "", root.stages)


def print_tree(root: TreeNode, head: str, file: TextIO, width: int | None = None) -> None:
    """Print a tree below a title line; as wide as the terminal, or as wide as the tree needs."""
    try:
        "│○".encode(getattr(file, "encoding", None) or "utf-8")
        unicode = True
    except (UnicodeEncodeError, LookupError):
        unicode = False
    if width is None and not file.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = PIPE_COLUMNS
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    console.print(Text(head, "bold"), soft_wrap=True)
    console.print()
    console.print(render_tree(root, unicode, console.width))


def render_tree(root: TreeNode, unicode: bool = True, width: int = PIPE_COLUMNS) -> Group:
    """The tree in columns, and below it why hooks cannot be where they cannot.

    Args:
        root: what `tree` gave, folded or not.
        unicode: whether more than ASCII can be shown.
        width: the columns of the terminal. In a narrow one, cells that do not fit get lines of their own.
    """
    rows = list(tree_rows(root))
    reasons = {reason: n for n, reason in enumerate(dict.fromkeys(r.why for r in rows if r.why), 1)}
    titles = ["", "layout", "full shape", "stage", ""]
    made = [(Text(""), [Text(title, "bold") for title in titles])]
    for row in rows:
        guide = Text(_to_ascii(row.guide, unicode), "dim")
        more = row.more + (f" ({reasons[row.why]})" if row.why else "")
        cells = [
            guide + Text(_to_ascii(row.name, unicode), row.style),
            Text(_to_ascii(row.layout, unicode)),
            Text(row.shape),
            Text(row.stage),
            Text(_to_ascii(more.strip(), unicode), row.style),
        ]
        under = row.guide.replace(GUIDES[1], GUIDES[0]).replace(GUIDES[2], GUIDES[3])
        made.append((Text(_to_ascii(under, unicode), "dim"), cells))
    if len(root.stages) <= 1:
        made = [(under, [*cells[:3], cells[4]]) for under, cells in made]
    starts = _column_starts([cells for _, cells in made], width)
    lines = [line for under, cells in made for line in _place_cells(cells, under, starts, width)]
    notes = [Text(f"({n}) {reason}", "dim") for reason, n in reasons.items()]
    return Group(*lines, *([Text(""), *notes] if notes else []))


def _column_starts(rows: list[list[Text]], width: int) -> list[int]:
    """Where each column starts.

    The column of layouts is as wide as the widest layout for which the other columns fit, and the last column
    counts only if the layouts fit beside it: what is wider gets a line of its own.
    """
    widths = [max(cell.cell_len for cell in column) for column in zip(*rows, strict=True)]
    for rest in (widths[2:], widths[2:-1]):
        left = width - widths[0] - sum(rest) - GAP * (len(rest) + 1)
        fitting = [cells[1].cell_len for cells in rows[1:] if 0 < cells[1].cell_len <= left]
        if fitting:
            widths[1] = max(*fitting, rows[0][1].cell_len)
            break
    return [sum(widths[:n]) + GAP * n for n in range(len(widths))]


def _place_cells(cells: list[Text], under: Text, starts: list[int], width: int) -> Iterator[Text]:
    """The lines of a row: each cell in its column; below, with the guide, what has no room beside the others.

    Args:
        cells: the name and the other cells.
        under: the guide of further lines.
        starts: where each column starts.
        width: the columns of the terminal.
    """
    line = cells[0].copy()
    for cell, start in zip(cells[1:], starts[1:], strict=True):
        if not cell:
            continue
        fits = start + cell.cell_len <= width
        if not fits or line.cell_len + GAP > start:
            yield line
            line = under.copy()
        parts = [cell]
        if not fits:
            start = under.cell_len + GAP
            parts = [Text(part, cell.style) for part in wrap(cell.plain, max(width - start, MIN_TEXT_WIDTH))]
        for number, part in enumerate(parts):
            if number:
                yield line
                line = under.copy()
            line.pad_right(max(start - line.cell_len, 0))
            line.append_text(part)
    yield line


def _node_rows(node: TreeNode, first: str, rest: str, above: frozenset[int]) -> Iterator[TreeRow]:
    label, inner = _node_label(node), node
    while not inner.points and len(inner.children) == 1:  # `decoder.layers 0-31 x 32` in one row
        inner = inner.children[0]
        label += (" " if inner.label[:1].isdigit() else ".") + _node_label(inner)
    stage = "" if inner.stages == above else describe_numbers(inner.stages)
    yield TreeRow(first, label, "bold", stage=stage)
    parts: list[TreePoint | TreeNode] = [*inner.points, *inner.children]
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        guide, under = rest + GUIDES[2 if last else 1], rest + GUIDES[3 if last else 0]
        if isinstance(part, TreeNode):
            yield from _node_rows(part, guide, under, inner.stages)
        else:
            yield _point_row(part, guide)


def _node_label(node: TreeNode) -> str:
    return node.label + (f" x {node.count}" if node.count > 1 else "")


def _point_row(place: TreePoint, guide: str) -> TreeRow:
    mark, style, more = FREE, "", "can be read only" if place.read_only_reason else ""
    if place.hidden:
        mark, style, more = HIDDEN, "dim", "no hook"
    elif place.hooks:
        on = any(h.active for h in place.hooks)
        mark, style = (FULL, "green") if on else (OFF, "yellow")
        more = "; ".join(h.describe() for h in place.hooks)
    why = place.hidden or place.read_only_reason
    return TreeRow(
        guide,
        f"{mark} :{place.point}" if place.point else f"{mark} it",
        style,
        place.layout,
        place.shape,
        "",
        more,
        why,
    )


def _to_ascii(text: str, unicode: bool) -> str:
    return text if unicode else "".join(ASCII_LETTERS.get(c, c) for c in text)
