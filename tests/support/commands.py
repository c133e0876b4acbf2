"""The command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_flex.cli import main


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
