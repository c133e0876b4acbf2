"""Fragments of HTML for notebooks: inline styles only, readable on dark and light, bounded, all text escaped.

A `Markup` is inserted as HTML; anything else is escaped as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

PAGE_BYTES = 20_000_000  # maximum size of a page, unless a larger one is requested
MAX_TABLE_ROWS = 60  # rows of one table
MAX_TEXT_LETTERS = 300  # characters of one text
BORDER_COLOUR = "rgba(128,128,128,.4)"  # visible on white and on black
WARN_COLOUR = "rgba(214,158,0,.25)"
BAD_COLOUR = "rgba(220,50,50,.25)"
CELL = "text-align:left;vertical-align:top;padding:1px 12px 1px 0;white-space:pre-wrap"


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def html_text(content: object) -> Markup:
    """Text as HTML; a text that is too long is cut, with its length."""
    if isinstance(content, Markup):
        return content
    words = str(content)
    if len(words) > MAX_TEXT_LETTERS:
        words = f"{words[:MAX_TEXT_LETTERS]}… ({len(words):,} letters)"
    return Markup(escape(words))


def html_fragment(head: object, *parts: Markup) -> Markup:
    """A complete fragment: a title line and the content."""
    return Markup(
        '<div style="color:inherit;background:transparent;font-size:13px;line-height:1.45;overflow-x:auto">'
        f"<div><b>{html_text(head)}</b></div>{''.join(parts)}</div>"
    )


def html_line(content: object, colour: str = "") -> Markup:
    """A line of text, with a background if there is a colour."""
    mark = f";background:{colour};padding:1px 6px" if colour else ""
    return Markup(f'<div style="margin:2px 0{mark}">{html_text(content)}</div>')


def html_lines(content: Sequence[object], rest: str, colour: str = "", most: int = MAX_TABLE_ROWS) -> Markup:
    """One line for each text; at most `most`, then how many more there are and `rest`, how to see them."""
    out = [html_line(one, colour) for one in content[:most]]
    if len(content) > most:
        out.append(html_line(f"and {len(content) - most:,} more; {rest}"))
    return Markup("".join(out))


def html_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    count: int,
    rest: str,
    marked: dict[int, str] | None = None,
) -> Markup:
    """A table.

    Args:
        heads: of the columns; those that begin with `>` hold numbers.
        rows: the first rows, at most MAX_TABLE_ROWS.
        count: the number of rows in total.
        rest: how to see the rows that are not shown.
        marked: background colours by row number.
    """
    ends = ["right" if h.startswith(">") else "left" for h in heads]
    under = f";border-bottom:1px solid {BORDER_COLOUR}"
    cells = [
        f'<th style="{CELL.replace("left", end, 1)}{under}">{html_text(h.removeprefix(">"))}</th>'
        for h, end in zip(heads, ends, strict=True)
    ]
    body = []
    shown = 0
    for number, row in enumerate(rows):
        if number == MAX_TABLE_ROWS:
            break
        shown += 1
        colour = (marked or {}).get(number, "transparent")
        content = "".join(
            f'<td style="{CELL.replace("left", end, 1)}">{html_text(cell)}</td>'
            for cell, end in zip(row, ends, strict=True)
        )
        body.append(f'<tr style="background:{colour}">{content}</tr>')
    more = html_line(f"and {count - shown:,} more; {rest}") if count > shown else ""
    return Markup(
        '<table style="border-collapse:collapse;border:0;margin:4px 0;color:inherit;background:transparent">'
        f"<thead><tr>{''.join(cells)}</tr></thead><tbody>{''.join(body)}</tbody></table>{more}"
    )


def html_details(summary: object, *parts: Markup, opened: bool = False) -> Markup:
    """A collapsible section."""
    return Markup(
        f'<details style="margin:2px 0"{" open" if opened else ""}>'
        f'<summary style="cursor:pointer">{html_text(summary)}</summary>'
        '<div style="margin-left:14px;border-left:1px solid '
        f'{BORDER_COLOUR};padding-left:8px">{"".join(parts)}</div>'
        "</details>"
    )


def count_words(count: int, one: str, many: str = "") -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
