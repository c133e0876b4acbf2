"""The command line in this process, and texts that it is held to."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_flex.cli import main

KEPT = Path(__file__).parents[1] / "unit" / "kept"
AGAIN = "FLEX_KEEP"  # set it to write the texts anew; then read them


class Done(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str


class Command:
    """Runs `megatron-flex` as the console script does, at a fixed width, in a folder of the test's."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self.monkeypatch, self.capsys, self.folder = monkeypatch, capsys, folder
        monkeypatch.chdir(folder)
        self.width(80)

    def width(self, columns: int | None) -> None:
        """The width of the terminal; None for no terminal."""
        if columns is None:
            self.monkeypatch.delenv("COLUMNS", raising=False)
        else:
            self.monkeypatch.setenv("COLUMNS", str(columns))

    def __call__(self, *words: object) -> Done:
        self.monkeypatch.setattr(sys, "argv", ["megatron-flex", *map(str, words)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self.capsys.readouterr()
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0 if code is None else 1, out, err)


def kept(name: str, text: str) -> None:
    """Hold a text to the one that is kept under that name; bytes, which other tests hold, are left out."""
    path = KEPT / f"{name}.txt"
    text = re.sub(r"\d+\.\d\d(?= [KM]iB)", lambda found: "#" * len(found[0]), text)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if os.environ.get(AGAIN):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; {AGAIN}=1 writes it anew"
