"""`megatron-flex align` before a run begins: a folder without a model, and a run that ends early."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")
from tests.support.commands import Command
from tests.support.messages import assert_names


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(monkeypatch, capsys, tmp_path)


def test_a_folder_without_a_model(command: Command, tmp_path: Path) -> None:
    done = command("align", tmp_path / "nothing", "--", "train.py")
    assert done.status == 2
    assert_names(done.err, tmp_path / "nothing", "config.json", "save_pretrained")
