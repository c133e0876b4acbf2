"""A terminal that a test looks at: what was written to it, and what is on its screen in the end."""

from __future__ import annotations

import os
import pty
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

ESCAPE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")


class Terminal:
    """A pseudoterminal.

    Attributes:
        file: to write to, as a program's stderr.
        written: all that was written, once it is closed.
    """

    def __init__(self) -> None:
        self._mine, its = pty.openpty()
        self.file: IO[str] = open(its, "w", encoding="utf-8", buffering=1)  # noqa: SIM115, closed by `close`
        self.written = ""
        self._data: list[bytes] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._mine, 65536):
                self._data.append(data)
        except OSError:
            pass  # the other end is closed: Linux tells it so

    def close(self) -> None:
        """Nothing more is written."""
        self.file.close()
        self._thread.join()
        os.close(self._mine)
        self.written = b"".join(self._data).decode()

    @property
    def screen(self) -> list[str]:
        """The lines that are seen, without blanks at their ends."""
        return screen(self.written)

    @property
    def cursor_is_seen(self) -> bool:
        """Whether the cursor was not left hidden."""
        return self.written.rfind("\x1b[?25l") <= self.written.rfind("\x1b[?25h")


@contextmanager
def terminal() -> Iterator[Terminal]:
    """One that is closed at the end of the scope."""
    one = Terminal()
    try:
        yield one
    finally:
        one.close()


def screen(written: str) -> list[str]:
    """What a terminal shows after some text: what was erased or written over is gone."""
    lines: list[list[str]] = [[]]
    row = column = at = 0
    while at < len(written):
        found = ESCAPE.match(written, at)
        if found:
            private, number, what = found.groups()
            if what == "K" and not private:
                lines[row] = [] if number == "2" else lines[row][:column]
            elif what == "A":
                row = max(0, row - int(number or 1))
            elif what not in "mhl":
                raise AssertionError(f"a terminal's order that is not known: {found[0]!r}")
            at = found.end()
            continue
        letter = written[at]
        at += 1
        if letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            if row == len(lines):
                lines.append([])
        else:
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = letter
            column += 1
    return ["".join(line).rstrip() for line in lines if "".join(line).strip()]
