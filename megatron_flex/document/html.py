"""Parts of a document as HTML for notebooks: inline styles for dark and light, bounded, all text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from megatron_flex.document.record import (
    Bars,
    Branch,
    Drawing,
    Note,
    Part,
    Row,
    Table,
    Text,
    Tone,
    Tree,
)

MAX_TABLE_ROWS = 60  # rows of one table
MAX_TREE_ROWS = 600  # rows of one tree
MAX_TEXT_LETTERS = 300  # characters of one text
BORDER = "1px solid rgba(128,128,128,.4)"  # visible on white and on black
CELL = "vertical-align:top;padding:1px 12px 1px 0"
ALIGNED = {"left": "text-align:left;white-space:pre-wrap", "right": "text-align:right;white-space:nowrap"}
BACKGROUNDS: dict[Tone, str] = {
    "good": "rgba(42,157,74,.25)",
    "bad": "rgba(220,50,50,.25)",
    **dict.fromkeys(("differs", "open", "note"), "rgba(214,158,0,.25)"),
}
LETTERS: dict[Tone, str] = {
    "strong": "font-weight:bold",
    "dim": "opacity:.6",
    "on": "color:#2a9d4a",  # like the next one, seen on white and on black
    "off": "color:#c08a00",
    "bad": "font-weight:bold",
}


def format_html(title: str, parts: Sequence[Part]) -> str:
    """A complete fragment: a title line and the content."""
    head = f"<div><b>{_escape(title)}</b></div>" if title else ""
    return (
        '<div style="color:inherit;background:transparent;font-size:13px;line-height:1.45;overflow-x:auto">'
        f"{head}{''.join(map(_part_html, parts))}</div>"
    )


def _part_html(part: Part) -> str:
    match part:
        case Note(text, tone):
            return _line_html(text, tone)
        case Table():
            return _table_html(part)
        case Tree():
            return _tree_html(part)
        case Bars():
            return _bars_html(part)
        case Drawing():
            return part.svg


def _escape(text: str) -> str:
    """Text as HTML; a text that is too long is cut, with its length."""
    if len(text) > MAX_TEXT_LETTERS:
        text = f"{text[:MAX_TEXT_LETTERS]}… ({len(text):,} letters)"
    return escape(text)


def _text_html(text: Text) -> str:
    """A text; its spans in their tones."""
    if isinstance(text, str):
        return _escape(text)
    return "".join(_span_html(span.text, LETTERS.get(span.tone, "")) for span in text)


def _span_html(text: str, style: str) -> str:
    return f'<span style="{style}">{_escape(text)}</span>' if style else _escape(text)


def _line_html(text: Text, tone: Tone = "") -> str:
    colour, letters = BACKGROUNDS.get(tone, ""), LETTERS.get(tone, "")
    style = f";background:{colour};padding:1px 6px" if colour else f";{letters}" if letters else ""
    return f'<div style="margin:2px 0;white-space:pre-wrap{style}">{_text_html(text)}</div>'


def _details_html(summary: str, content: str, opened: bool) -> str:
    """A fold; both arguments are HTML."""
    return (
        f'<details style="margin:2px 0"{" open" if opened else ""}>'
        f'<summary style="cursor:pointer">{summary}</summary>'
        f'<div style="margin-left:14px;border-left:{BORDER};padding-left:8px">{content}</div></details>'
    )


def _table_html(table: Table) -> str:
    aligned = ["right" if column.startswith(">") else "left" for column in table.columns]
    titles = [column.removeprefix(">") for column in table.columns]
    head = _row_html("th", Row(titles), aligned, f";border-bottom:{BORDER}") if table.header else ""
    shown = table.rows[:MAX_TABLE_ROWS]
    body = "".join(_row_html("td", row, aligned) for row in shown)
    left = max(table.count, len(table.rows)) - len(shown)
    more = _line_html(f"and {left:,} more; {table.rest}".removesuffix("; ")) if left else ""
    content = (
        '<table style="border-collapse:collapse;border:0;margin:4px 0;color:inherit;background:transparent">'
        f"<thead>{head}</thead><tbody>{body}</tbody></table>{more}"
    )
    return _details_html(_escape(table.title), content, table.opened) if table.title else content


def _row_html(tag: str, row: Row, aligned: Sequence[str], more: str = "") -> str:
    cells = "".join(
        f'<{tag} style="{ALIGNED[side]};{CELL}{more}">{_text_html(cell)}</{tag}>'
        for cell, side in zip(row.cells, aligned, strict=False)
    )
    return f'<tr style="background:{BACKGROUNDS.get(row.tone, "transparent")}">{cells}</tr>'


class _TreeRows:
    """The rows of a tree, as many as are shown; `left_out` counts the others."""

    def __init__(self, tree: Tree) -> None:
        self.titles = tree.columns
        self.room, self.left_out = MAX_TREE_ROWS, 0

    def html(self, branch: Branch) -> str:
        """A branch that is a fold, or a line if nothing is below it."""
        if not self.room:
            self.left_out += _count_rows(branch)
            return ""
        self.room -= 1
        cells = [
            f"{title[1:]} {cell}" if title.startswith(">") else cell
            for title, cell in zip(self.titles, branch.cells, strict=False)
            if cell
        ]
        name = f"{_escape(branch.mark + ' ') if branch.mark else ''}<b>{_escape(branch.label)}</b>"
        if branch.children:
            badge = f" {_span_html(branch.badge, LETTERS['on'])}" if branch.badge else ""
            summary = "".join([name, *(f" · {_escape(cell)}" for cell in cells), badge])
            return _details_html(summary, "".join(map(self.html, branch.children)), branch.opened)
        more = ": ".join(filter(None, (branch.more, branch.reason)))
        why = f"  <i>{_escape(more)}</i>" if more else ""
        style = f"white-space:pre-wrap;{LETTERS.get(branch.tone, '')}"
        return f'<div style="{style}">{name}  {_escape(" · ".join(cells))}{why}</div>'


def _tree_html(tree: Tree) -> str:
    rows = _TreeRows(tree)
    shown = "".join(map(rows.html, tree.branches))
    return shown + (
        _line_html(f"and {rows.left_out:,} more rows; {tree.rest}", "note") if rows.left_out else ""
    )


def _count_rows(branch: Branch) -> int:
    return 1 + sum(map(_count_rows, branch.children))


def _bars_html(bars: Bars) -> str:
    most = max(count for _, count in bars.bars) or 1
    bar, right = "background:currentColor;opacity:.5;height:10px", f"{ALIGNED['right']};{CELL}"
    rows = "".join(
        f'<tr><td style="{right}">{_escape(label)}</td>'
        f'<td style="width:300px"><div style="{bar};width:{count / most:.1%}"></div></td>'
        f'<td style="{right}">{count:,}</td></tr>'
        for label, count in bars.bars
    )
    table = f'<table style="border-collapse:collapse;color:inherit">{rows}</table>'
    return _line_html(bars.title, "strong") + table
