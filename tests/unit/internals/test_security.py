"""Drafts of files are made anew: a link in their place is not followed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def test_a_draft_is_made_anew(tmp_path: Path) -> None:
    from megatron_flex.dump.file_names import MANIFEST_NAME
    from megatron_flex.dump.schema import Manifest

    aim = tmp_path / "aim"
    aim.write_text("mine")
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / (MANIFEST_NAME + ".tmp")).symlink_to(aim)
    mappings = {"axes", "experts", "model", "settings"}
    made: dict[str, Any] = {n: {} if n in mappings else () for n in Manifest.__dataclass_fields__}
    Manifest(**made).write(folder)
    assert aim.read_text() == "mine"
    assert not (folder / MANIFEST_NAME).is_symlink()


def test_a_draft_of_a_page_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_flex.page import html_page

    aim = tmp_path / "aim"
    aim.write_text("mine")
    (tmp_path / f".page.html.{os.getpid()}.tmp").symlink_to(aim)
    monkeypatch.setattr(html_page, "html", lambda page: "<p>")
    unknown: Any = None
    html_page.write(unknown, tmp_path / "page.html")
    assert aim.read_text() == "mine"
    assert (tmp_path / "page.html").read_text() == "<p>"
