"""Rows of the exam: bugs that others reported are found where they are, and clean runs raise no alarm."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.exam import ROWS, Row
from tests.support.exam.runs import ask
from tests.support.pages import ROOT
from tests.support.planted import Bench

pytest.importorskip("megatron.core")

CHEAP = [
    "final layernorm under sequence parallelism",
    "attention sinks in the gradient norm",
    "prediction beside the embedding",
]


@pytest.mark.parametrize("row", [r for r in ROWS if r.name in CHEAP], ids=lambda r: r.name)
def test_a_row_is_found_and_its_clean_run_is_silent(row: Row, tmp_path: Path) -> None:
    outcome = ask(row, Bench(tmp_path))
    assert (outcome.found, outcome.right, outcome.named, outcome.silent) == (True,) * 4, outcome


def exam() -> Any:
    spec = importlib.util.spec_from_file_location("exam", ROOT / "scripts" / "dev" / "exam.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_show_what_was_measured(tmp_path: Path) -> None:
    """Written anew from what is kept, the page and the README are what they are; every row was run."""
    command = exam()
    pages = [tmp_path / "exam.md", tmp_path / "README.md"]
    for copy, page in zip(pages, (command.PAGE, command.README), strict=True):
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    kept = tmp_path / "exam.json"
    kept.write_text(command.KEPT.read_text(encoding="utf-8"), encoding="utf-8")
    names = [*(row.name for row in ROWS), *(name for *_, name in command.PAIR_NAMES)]
    assert list(json.loads(kept.read_text(encoding="utf-8"))) == names
    command.main(
        ["--rows", "none of them", "--json", str(kept), "--page", str(pages[0]), "--readme", str(pages[1])]
    )
    for copy, page in zip(pages, (command.PAGE, command.README), strict=True):
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_rows_name_threads_and_differ() -> None:
    command = exam()
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert all(command.link(thread).startswith("[") for thread in row.threads)
        assert row.clean or row.planted or row.mend is not row.patch or row.clean_setting is not None, (
            row.name
        )
