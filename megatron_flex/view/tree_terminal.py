"""The tree in a terminal: a row for each point, layouts and shapes in columns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatron_flex.view.model_tree import TreeNode, TreePoint, describe_numbers

PIPE_COLUMNS = 4000  # columns of what is no terminal: nothing is cut for a program that reads on
FREE, FULL, HIDDEN, OFF = "○", "●", "x", "◌"
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
    console.print(render_tree(root, unicode))


def render_tree(root: TreeNode, unicode: bool = True) -> Group:
    """The tree as a table, and below it why hooks cannot be where they cannot.

    Args:
        root: what `tree` gave, folded or not.
        unicode: whether more than ASCII can be shown.
    """
    rows = list(tree_rows(root))
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
        name = Text(_to_ascii(row.guide, unicode), "dim") + Text(_to_ascii(row.name, unicode), row.style)
        cells = [name, Text(_to_ascii(row.layout, unicode)), Text(row.shape)]
        cells += [Text(row.stage)] if staged else []
        more = row.more + (f" ({reasons[row.why]})" if row.why else "")
        out.add_row(*cells, Text(_to_ascii(more.strip(), unicode), row.style))
    notes = [Text(f"({n}) {reason}", "dim") for reason, n in reasons.items()]
    return Group(out, *([Text(""), *notes] if notes else []))


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
