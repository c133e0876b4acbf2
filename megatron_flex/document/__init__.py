"""What results show: one record of notes, tables and trees, for `print`, terminals and notebooks."""

from megatron_flex.document.document import Document, Renderable
from megatron_flex.document.html import MAX_TABLE_ROWS
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
    shorten_notes,
)
from megatron_flex.document.terminal import make_console

__all__ = [
    "MAX_TABLE_ROWS",
    "Bars",
    "Branch",
    "Document",
    "Drawing",
    "Note",
    "Part",
    "Renderable",
    "Row",
    "Span",
    "Table",
    "Text",
    "Tone",
    "Tree",
    "make_console",
    "shorten_notes",
]
