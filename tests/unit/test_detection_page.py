"""The page on what a comparison detects has the figures that were measured, of the bugs that there are."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.bugs import BUGS
from tests.support.pages import ROOT

PAGE, KEPT = ROOT / "docs" / "detection.md", ROOT / "docs" / "detection.json"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "measure"))
    return importlib.import_module("detection_page")


def test_the_tables_are_those_of_the_kept_figures(page: Any) -> None:
    kept, text = json.loads(KEPT.read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    for name, section in page.sections(kept).items():
        assert f"<!-- {name}: written by scripts/bench -->\n{section}\n<!-- {name}: end -->" in text, name


def test_the_kept_bugs_are_those_that_are_planted() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))["bugs"]
    now = {b.name: {"group": b.group, "sweep": b.sweep and list(b.sweep), "measure": b.measure} for b in BUGS}
    assert kept == now


def test_a_table_shows_what_was_not_detected(page: Any) -> None:
    swept = {"group": "TP", "sweep": [1e-7, 0.1], "measure": "relative"}
    found = {
        "alarm": 0,
        "hints": "",
        "probes": [[0.1, True, True, True, "a"], [1e-3, True, False, None, "b"]],
    }
    missed = {"alarm": 0, "hints": "", "probes": [[0.1, False, False, False, ""]]}
    found["comparer"] = "new"
    kept = {
        "comparer": "new",
        "bugs": {"one": swept, "two": swept},
        "results": {
            "bug/fp32/one": found,
            "bug/bf16/one": missed,
            "bug/fp32/two": {**found, "alarm": 1},
            "bug/fp8/one": {"error": "none"},
            "right/fp32/tp2/0": {"status": 1, "steps": 20, "closest": 1.5, "tensors": 7},
            "right/fp32/tp2/1": {"status": 0, "steps": 20, "closest": 0.5, "tensors": 7},
            "held-out/fp32/tp2/100": {
                "status": 0,
                "steps": 20,
                "closest": 0.7,
                "tensors": 9,
                "comparer": "new",
            },
        },
    }
    rows = page.bugs(kept).splitlines()
    assert rows[2] == "| TP | one | relative | 1.0e-03 † | not at 0.1 ° |  |  | 1 of 1 |"
    assert rows[3].startswith("| TP | two | relative | false alarm |")
    assert page.right_pairs(kept).splitlines()[2:] == [
        "| fp32 | of calibration | earlier | 2 | 20 | 14 | 1 | 1.50 |",
        "| fp32 | held out | present | 1 | 20 | 9 | 0 | 0.70 |",
    ]
    assert page.comparer(kept).splitlines() == [
        "| part | precision | comparer new | an earlier comparer |",
        "| --- | --- | --- | --- |",
        "| correct runs, seeds of calibration | fp32 | 0 | 2 |",
        "| correct runs, seeds held out | fp32 | 1 | 0 |",
        "| bugs | fp32 | 2 | 0 |",
        "| bugs | bf16 | 0 | 1 |",
    ]
    assert page.summary(kept).splitlines()[2:] == [
        "| fp32 | 2 of 2 | 2 of 2 | 2 of 2 |",
        "| bf16 | 0 of 1 | 0 of 0 | 0 of 0 |",
    ]


def test_the_version_of_the_comparer_is_that_of_its_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other words in a docstring or a comment change no result."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "measure"))
    digest = importlib.import_module("bench_detection").digest_comparer

    def version(code: str) -> str:
        (tmp_path / "a.py").write_text(code, encoding="utf-8")
        return str(digest(tmp_path))

    first = version('def f(a):\n    """One."""\n    return a + 1  # more\n')
    assert version('def f(a):\n    """Two."""\n    # less\n    return (a + 1)\n') == first
    assert version('def f(a):\n    """One."""\n    return a + 2  # more\n') != first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert digest(tmp_path) != first
