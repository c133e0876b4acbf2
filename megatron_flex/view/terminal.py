"""The tree in a terminal: a row for each point, layouts and shapes in columns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatron_flex.view.tree import Node, Place
from megatron_flex.view.words import numbers_in_words

WIDE = 4000  # columns of what is no terminal: nothing is cut for a program that reads on
FREE, FULL, HIDDEN, OFF = "○", "●", "x", "◌"
GUIDES = "│  ", "├─ ", "└─ ", "   "
PLAIN = {"○": "o", "●": "*", "◌": "-", "│": "|", "├": "+", "└": "+", "─": "-", "·": ";"}


@dataclass(frozen=True, slots=True)
class Line:
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


def lines(root: Node) -> Iterator[Line]:
    """The rows of a tree, from the top; its root is not shown."""
    for child in root.children:
        yield from _lines(child, "", "", root.stages)


def show(root: Node, head: str, file: TextIO, width: int | None = None) -> None:
    """Print a tree below a line that says what it is of; as wide as the terminal, or as it likes."""
    try:
        "│○".encode(getattr(file, "encoding", None) or "utf-8")
        unicode = True
    except (UnicodeEncodeError, LookupError):
        unicode = False
    if width is None and not file.isatty() and not os.environ.get("COLUMNS", "").isdigit():
        width = WIDE
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    console.print(Text(head, "bold"), soft_wrap=True)
    console.print()
    console.print(rendered(root, unicode))


def rendered(root: Node, unicode: bool = True) -> Group:
    """The tree as a table, and below it why hooks cannot be where they cannot.

    Args:
        root: what `tree` gave, folded or not.
        unicode: whether more than ASCII can be shown.
    """
    rows = list(lines(root))
    staged = len(root.stages) > 1
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    out.add_column("", no_wrap=True)
    out.add_column("layout", overflow="fold")
    out.add_column("whole", no_wrap=True)
    if staged:
        out.add_column("stage", no_wrap=True)
    out.add_column("", overflow="fold")
    reasons = {reason: n for n, reason in enumerate(dict.fromkeys(r.why for r in rows if r.why), 1)}
    for row in rows:
        name = Text(_shown(row.guide, unicode), "dim") + Text(_shown(row.name, unicode), row.style)
        cells = [name, Text(_shown(row.layout, unicode)), Text(row.shape)]
        cells += [Text(row.stage)] if staged else []
        more = row.more + (f" ({reasons[row.why]})" if row.why else "")
        out.add_row(*cells, Text(_shown(more.strip(), unicode), row.style))
    notes = [Text(f"({n}) {reason}", "dim") for reason, n in reasons.items()]
    return Group(out, *([Text(""), *notes] if notes else []))


def _lines(node: Node, first: str, rest: str, above: frozenset[int]) -> Iterator[Line]:
    label, inner = _label(node), node
    while not inner.places and len(inner.children) == 1:  # `decoder.layers 0-31 x 32` in one row
        inner = inner.children[0]
        label += (" " if inner.label[:1].isdigit() else ".") + _label(inner)
    stage = "" if inner.stages == above else numbers_in_words(inner.stages)
    yield Line(first, label, "bold", stage=stage)
    parts: list[Place | Node] = [*inner.places, *inner.children]
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        guide, under = rest + GUIDES[2 if last else 1], rest + GUIDES[3 if last else 0]
        if isinstance(part, Node):
            yield from _lines(part, guide, under, inner.stages)
        else:
            yield _line(part, guide)


def _label(node: Node) -> str:
    return node.label + (f" x {node.count}" if node.count > 1 else "")


def _line(place: Place, guide: str) -> Line:
    mark, style, more = FREE, "", "can be read only" if place.fixed else ""
    if place.hidden:
        mark, style, more = HIDDEN, "dim", "no hook"
    elif place.hooks:
        on = any(h.active for h in place.hooks)
        mark, style = (FULL, "green") if on else (OFF, "yellow")
        more = "; ".join(h.describe() for h in place.hooks)
    why = place.hidden or place.fixed
    return Line(
        guide,
        f"{mark} :{place.point}" if place.point else f"{mark} it",
        style,
        place.layout,
        place.shape,
        "",
        more,
        why,
    )


def _shown(text: str, unicode: bool) -> str:
    return text if unicode else "".join(PLAIN.get(c, c) for c in text)
