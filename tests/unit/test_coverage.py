"""scripts/dev/coverage_matrix: which cells the page and the file of compared cells have."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import any_names, assert_names, raises

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(tmp_path: Path) -> Any:
    """The script, which writes into a folder of its own."""
    spec = importlib.util.spec_from_file_location(
        "coverage_matrix", ROOT / "scripts" / "dev" / "coverage_matrix.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.ROOT = tmp_path
    script.PAGE, script.FIGURES = tmp_path / "coverage.md", tmp_path / "build" / "coverage.csv"
    return script


def cell(model: str, site: str, check: str, error: float, bound: float = 1e-5, **more: Any) -> dict[str, Any]:
    plain = {"case": "tp2", "upstream": "", "own": 0.0, "hidden": ""}
    return {"model": model, "site": site, "check": check, "error": error, "bound": bound, **plain, **more}


def written(page: Any, tmp_path: Path, cells: list[dict[str, Any]], **more: Any) -> list[str]:
    run = {
        "commit": "commit 0123456789ab",
        "versions": "torch 0",
        "seconds": 60.0,
        "cores": 2,
        "cells": cells,
        **more,
    }
    (tmp_path / "cells.json").write_text(json.dumps(run))
    page.main(str(tmp_path / "cells.json"))
    return page.PAGE.read_text().splitlines()


def test_runs_of_one_commit_are_read_together(page: Any, tmp_path: Path) -> None:
    gpt, apex = cell("GPT", "lm_head:output", "value", 1e-7), cell("apex", "layers.0:output", "value", 2e-7)
    plain = {"commit": "commit 0", "versions": "torch 0", "cores": 2}
    first = plain | {"seconds": 60.0, "packages": {"torch": "0", "apex": None}, "cells": [gpt]}
    second = plain | {"seconds": 120.0, "packages": {"torch": "0", "apex": "0.1"}, "cells": [apex]}
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file, run in zip(files, (first, second), strict=True):
        file.write_text(json.dumps(run))
    page.main(str(files[0]))
    (absent,) = (row for row in page.PAGE.read_text().splitlines() if row.startswith("| apex |"))
    page.main(*map(str, files))
    assert absent not in page.PAGE.read_text(), "that it is not installed"
    assert_names(page.PAGE.read_text(), "torch 0, apex 0.1", "3 minutes")
    assert {row["model"] for row in rows_of(page)} == {"GPT", "apex"}
    files[1].write_text(json.dumps(second | {"commit": "commit 1"}))
    with raises(SystemExit, "commit 0", "commit 1"):
        page.main(*map(str, files))


def rows_of(page: Any) -> list[dict[str, str]]:
    """The file, as a reader of CSV has it."""
    with page.FIGURES.open(newline="") as file:
        return list(csv.DictReader(file))


def test_hidden_hook_points_and_upstreams_errors_have_reasons(page: Any, tmp_path: Path) -> None:
    cells = [
        cell("GPT", "decoder.layers.1:scores", "hidden", 0.0, hidden="a kernel keeps them"),
        cell("GPT", "decoder.layers.1:k", "gradient", 2e-3, upstream="one head alone", own=1e-7),
        cell("GPT", "decoder.layers.1:k", "dump", 1e-7, case="dp2"),
    ]
    found = written(page, tmp_path, cells)
    assert any_names(found, "a kernel keeps them")
    assert any_names(found, "one head alone", 1, "1.0e-07")
    assert [(row["site"], row["gradient"], row["note"]) for row in rows_of(page)] == [
        ("decoder.layers.N:scores", "", "hidden: 1"),
        ("decoder.layers.N:k", "2e-3", "upstream differs"),
    ], "what dumps alone have compared has no row"


def test_pages_have_the_count_of_the_coverage_page() -> None:
    docs = ROOT / "docs"
    text = (docs / "contributing" / "coverage.md").read_text(encoding="utf-8")
    numbers = [f"{int(n):,}" for n in re.findall(r"\*\*(\d+) comparisons, (\d+) in agreement", text)[0]]
    for page in (ROOT / "README.md", docs / "frameworks.md"):
        assert re.findall(r"\b\d{2},\d{3}\b", page.read_text(encoding="utf-8")) == numbers, page
