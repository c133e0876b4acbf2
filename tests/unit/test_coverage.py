"""The page and the file of compared cells: which figure a check counts for, which rows a model has."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(tmp_path: Path) -> Any:
    """The script, which writes into a folder of its own."""
    spec = importlib.util.spec_from_file_location("coverage_matrix", ROOT / "scripts" / "coverage_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.ROOT = tmp_path
    names = ("coverage.md", "coverage.csv", "frameworks.md")
    script.PAGE, script.FIGURES, script.SUMMARY = (tmp_path / name for name in names)
    script.SUMMARY.write_text(f"above\n{script.BEGIN}old\n{script.END}\nbelow\n")
    return script


def cell(model: str, site: str, check: str, error: float, bound: float = 1e-5, **more: Any) -> dict[str, Any]:
    plain = {"case": "tp2", "upstream": "", "own": 0.0, "hidden": ""}
    return {"model": model, "site": site, "check": check, "error": error, "bound": bound, **plain, **more}


def written(
    page: Any, tmp_path: Path, cells: list[dict[str, Any]], **more: Any
) -> tuple[list[str], list[str]]:
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
    return page.PAGE.read_text().splitlines(), page.SUMMARY.read_text().splitlines()


def test_runs_of_one_commit_are_read_together(page: Any, tmp_path: Path) -> None:
    gpt, apex = cell("GPT", "lm_head:output", "value", 1e-7), cell("apex", "layers.0:output", "value", 2e-7)
    plain = {"commit": "commit 0", "versions": "torch 0", "cores": 2}
    first = plain | {"seconds": 60.0, "packages": {"torch": "0", "apex": None}, "cells": [gpt]}
    second = plain | {"seconds": 120.0, "packages": {"torch": "0", "apex": "0.1"}, "cells": [apex]}
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file, run in zip(files, (first, second), strict=True):
        file.write_text(json.dumps(run))
    page.main(str(files[0]))
    assert "| apex | not run: apex is not installed" in page.SUMMARY.read_text()
    page.main(*map(str, files))
    assert "not run: apex" not in page.SUMMARY.read_text()
    assert "torch 0, apex 0.1; 3 minutes of tests" in page.PAGE.read_text()
    assert {row["model"] for row in rows_of(page)} == {"GPT", "apex"}
    files[1].write_text(json.dumps(second | {"commit": "commit 1"}))
    with pytest.raises(SystemExit, match=r"different commits \(commit 0; commit 1\)"):
        page.main(*map(str, files))


def rows_of(page: Any) -> list[dict[str, str]]:
    """The file, as a reader of CSV has it."""
    with page.FIGURES.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("check", "figure"),
    [
        ("value", "value"),
        ("computed value", "value"),
        ("trained gradient", "gradient"),
        ("edited loss", "edited"),
        ("edited parameter gradients", "edited"),
        ("edited logits", "edited"),
        ("dump", "dump"),
        ("dump of gradients", "dump"),
        ("unedited parameter gradients", None),
        ("hidden", None),
    ],
)
def test_each_check_counts_for_a_figure(page: Any, check: str, figure: str | None) -> None:
    assert page.group_of(check) == figure


def test_models_come_first_and_features_say_their_rows_and_bounds(page: Any, tmp_path: Path) -> None:
    trained = "GPT, modules trained in hooks"
    cells = [
        cell(trained, "lens.weight", "trained value", 3e-5, 1e-4),
        cell(trained, "lens.weight", "trained gradient", 2e-5, 1e-4),
        cell("BERT", "blocks.3.hook_k", "value", 2e-6),
        cell("BERT", "blocks.4.hook_k", "value", 1e-6),
        cell("GPT", "(none)", "unedited loss", 0.0),
        cell("GPT", "decoder.layers.1:mid", "value", 3e-5),
    ]
    found, summary = written(page, tmp_path, cells)
    assert "never by hand:\ncommit 0123456789ab; torch 0; 1 minutes of tests on 2 cores." in "\n".join(found)
    assert f"- {trained}: parameters of the modules, in several steps" in found
    rows = rows_of(page)
    assert [row["model"] for row in rows] == ["GPT", "GPT", "BERT", trained]
    assert [row["site"] for row in rows] == [
        page.UNHOOKED,
        "decoder.layers.N:mid",
        "blocks.N.hook_k",
        "lens.weight",
    ], "no hook: only where there are such cells"
    figures = [(row["value"], row["gradient"], row["edit"], row["note"]) for row in rows]
    assert figures == [
        ("0", "", "", ""),
        ("3e-5", "", "", "beyond the bound"),
        ("2e-6", "", "", ""),
        ("3e-5", "2e-5", "", "bound 1e-4"),
    ]
    assert "| trained value | 1 | 1 | 1e-4 | 3.0e-05 | `lens.weight`, tp2 |" in found
    assert summary[0] == "above"
    assert summary[-1] == "below"
    assert "6 comparisons, 5 in agreement. By hook point: [coverage](coverage.md)." in summary
    assert f"| {trained} (bound 1e-4) | 1 | 1 | 2 | 3e-5 | 2e-5 | - | - |" in summary
    assert "old" not in summary


def test_a_framework_that_was_not_run_is_named_with_the_reason(page: Any, tmp_path: Path) -> None:
    packages = {
        "fairscale": "0.4.13",
        "torch": "2",
        "transformers": "5",
        "accelerate": "1",
        "deepspeed": "0.19",
    }
    skipped = {
        "tests/distributed/test_deepspeed_zero.py": "it wants a compiler",
        "tests/unit/test_te.py": "no",
    }
    cells = [cell("GPT", "decoder:output", "value", 0.0), cell("fairscale", "output:output", "value", 1e-7)]
    found, summary = written(page, tmp_path, cells, packages=packages, skipped=skipped)
    why = [line for line in found if line.startswith("**Not run**")]
    assert why == [
        "**Not run**: apex, because apex is not installed.",
        "**Not run**: PyTorch, because no test of it was chosen.",
        "**Not run**: Hugging Face, because no test of it was chosen.",
        "**Not run**: DeepSpeed, because it wants a compiler.",
    ]
    assert [row["model"] for row in rows_of(page)] == ["GPT", "fairscale"]
    assert "| apex | not run: apex is not installed | | | | | | |" in summary
    assert sum("not run" in line for line in summary) == 4


def test_hidden_hook_points_and_upstreams_errors_have_reasons(page: Any, tmp_path: Path) -> None:
    cells = [
        cell("GPT", "decoder.layers.1:scores", "hidden", 0.0, hidden="a kernel keeps them"),
        cell("GPT", "decoder.layers.1:k", "gradient", 2e-3, upstream="one head alone", own=1e-7),
        cell("GPT", "decoder.layers.1:k", "dump", 1e-7, case="dp2"),
    ]
    found, _ = written(page, tmp_path, cells)
    assert "1. a kernel keeps them" in found
    assert "- one head alone (1 cells, greatest difference from plain Megatron 1.0e-07)" in found
    assert [(row["site"], row["gradient"], row["note"]) for row in rows_of(page)] == [
        ("decoder.layers.N:scores", "", "hidden: 1"),
        ("decoder.layers.N:k", "2e-3", "upstream differs"),
    ], "what dumps alone have compared has no row"


def test_the_page_has_one_screen_and_the_file_has_its_columns(page: Any) -> None:
    text = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    with (ROOT / "docs" / "coverage.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert tuple(head) == page.COLUMNS
    assert f"{len(rows):,} rows" in text
    assert {len(row) for row in rows} == {len(head)}


def test_the_features_are_those_of_the_tests(page: Any) -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    features = [name for name in page.FEATURES if name not in page.FRAMEWORKS]
    assert [name for name in features if f'"{name}"' not in tests] == []
    assert set(page.FRAMEWORKS) < set(page.FEATURES), "these say for themselves that they were not run"


def test_the_script_selects_the_tests_that_compare_cells() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "pytest_ran", "--co", "-q", "--product", "-m", "matrix"]
    done = subprocess.run(
        [*command, "tests/distributed/test_fairscale.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "::test_matrix[" in done.stdout, done.stdout + done.stderr
