"""`Document`: what a result shows, as text, on a terminal and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from megatron_flex.document.html import format_html
from megatron_flex.document.record import Part
from megatron_flex.document.terminal import format_rich, format_text, print_parts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


@dataclass(frozen=True, slots=True)
class Document:
    """A title and what is below it; `print`, `rich.print` and notebooks show it.

    Attributes:
        title: the first line in a notebook; a terminal has the command above it instead.
        parts: in order.
    """

    title: str
    parts: Sequence[Part]

    def __str__(self) -> str:
        return format_text(self.parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return format_rich(self.parts, options.max_width, console.file)

    def _repr_html_(self) -> str:
        return format_html(self.title, self.parts)

    def print(self, file: TextIO | None = None, width: int | None = None) -> None:
        """Print it, with colours on a terminal.

        Args:
            file: where to; None for stdout.
            width: the columns of the terminal; None to find out.
        """
        print_parts(self.parts, file, width)


class Renderable(ABC):
    """A result that is shown by its document."""

    __slots__ = ()

    @abstractmethod
    def to_document(self) -> Document:
        """Return what is shown of it."""

    def __str__(self) -> str:
        return str(self.to_document())

    def _repr_html_(self) -> str:
        return self.to_document()._repr_html_()
