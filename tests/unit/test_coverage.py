"""The page of compared cells: which figure a check counts for, which table a model has."""

from __future__ import annotations

import importlib.util
import json
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
    script.ROOT, script.PAGE, script.SUMMARY = tmp_path, tmp_path / "coverage.md", tmp_path / "frameworks.md"
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
    assert "never by hand: commit 0123456789ab;\ntorch 0; 1 minutes of tests on 2 cores." in "\n".join(found)
    titles = [line.removeprefix("## ") for line in found if line.startswith("## ")]
    assert titles == ["GPT", "BERT", trained, *page.FRAMEWORKS]
    assert "Rows are the modules' parameters, in several steps. Bound: 1e-4." in found
    assert "| `lens.weight` | 3e-5 / 2e-5 / - |" in found
    assert "| `blocks.N.hook_k` | 2e-6 / - / - |" in found
    assert "| `decoder.layers.N:mid` | **3e-5** / - / - |" in found
    assert sum("no hook" in line for line in found) == 1, "only where there are such cells"
    assert "| trained value | 1 | 1 | 1e-4 | 3.0e-05 | `lens.weight`, tp2 |" in found
    assert summary[0] == "above"
    assert summary[-1] == "below"
    assert "6 cells, 5 in agreement. Site by site: [coverage](coverage.md)." in summary
    assert f"| {trained} (bound 1e-4) | 1 | 1 | 2 | 3e-5 | 2e-5 | - | - |" in summary
    assert "old" not in summary


def test_a_framework_that_was_not_run_has_a_section_that_says_why(page: Any, tmp_path: Path) -> None:
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
    told = {found[i]: found[i + 2] for i, line in enumerate(found) if line.startswith("## ")}
    assert told["## apex"] == "**Not run**: apex is not installed."
    assert told["## DeepSpeed"] == "**Not run**: it wants a compiler."
    assert told["## PyTorch"] == "**Not run**: no test of it was chosen."
    assert told["## fairscale"].startswith("| site |")
    assert list(told) == ["## GPT", *(f"## {name}" for name in page.FRAMEWORKS)]
    assert "| apex | not run: apex is not installed | | | | | | |" in summary
    assert sum("not run" in line for line in summary) == 4


def test_the_features_are_those_of_the_tests(page: Any) -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    features = [name for name in page.FEATURES if name not in page.FRAMEWORKS]
    assert [name for name in features if f'"{name}"' not in tests] == []
    assert set(page.FRAMEWORKS) < set(page.FEATURES), "these say for themselves that they were not run"
