"""scripts/dev/mutate: faults that are noticed, survive or cannot be tried; the committed list holds."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.messages import assert_names

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A tiny package."""


def double(n):
    return 2 * n


def half(n):
    return n / 2


def half_again(n):
    return n / 2
'''
TESTS = """import tiny
import pytest


def test_double():
    assert tiny.double(3) == 6


def test_wrong():
    assert tiny.double(3) == 7


@pytest.mark.skip
def test_skipped():
    assert tiny.double(3) == 6
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "dev"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take longer than what is run here
    return importlib.import_module("mutate")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a package, its tests, and the plugin that writes down their outcomes."""
    root = tmp_path / "checkout"
    (root / "scripts" / "dev").mkdir(parents=True)
    plugin = (ROOT / "scripts" / "dev" / "mutate_record.py").read_text()
    for name, text in {
        "tiny.py": SOURCE,
        "test_tiny.py": TESTS,
        "pytest.ini": "[pytest]\n",
        "scripts/dev/mutate_record.py": plugin,
    }.items():
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def fault_of(tool: Any, name: str, before: str, after: str, test: str = "test_double") -> Any:
    return tool.Fault(name, "It is wrong.", "tiny.py", before, after, (f"test_tiny.py::{test}",))


def test_each_outcome_has_its_name(tool: Any, checkout: Path, tmp_path: Path) -> None:
    faults = [
        fault_of(tool, "noticed", "2 * n", "3 * n"),
        fault_of(tool, "same size, at once", "2 * n", "4 * n"),
        fault_of(tool, "survives", "return n / 2\n\n\ndef half_again", "return n / 3\n\n\ndef half_again"),
        fault_of(tool, "missing", "5 * n", "6 * n"),
        fault_of(tool, "twice", "n / 2", "n / 3"),
        fault_of(tool, "nothing", "2 * n", "2 * n"),
        fault_of(tool, "no Python", "2 * n", "2 * * n"),
        fault_of(tool, "fails anyhow", "2 * n", "3 * n", "test_wrong"),
        fault_of(tool, "skipped", "2 * n", "3 * n", "test_skipped"),
        fault_of(tool, "not collected", "def double(n):", "raise ValueError\n\n\ndef double(n):"),
    ]
    said: list[str] = []
    record = tool.Record(tmp_path / "results.json", "digest")
    results = tool.mutate(checkout, faults, record, jobs=2, package="tiny", say=said.append)
    outcomes = {r.name: r.outcome for r in results}
    assert outcomes == {
        "noticed": "noticed",
        "same size, at once": "noticed",
        "survives": "survived",
        "missing": "anchor",
        "twice": "anchor",
        "nothing": "anchor",
        "no Python": "anchor",
        "fails anyhow": "broken",
        "skipped": "broken",
        "not collected": "broken",
    }
    whys = {r.name: r.why for r in results}
    assert_names(whys["missing"], "before", 0, "tiny.py")
    assert_names(whys["twice"], "before", 2, "tiny.py")
    assert "test_tiny.py::test_wrong" in whys["fails anyhow"]
    assert results[0].by == "test_tiny.py::test_double"
    assert "assert 9 == 6" in whys["noticed"]
    assert sum("noticed" in line for line in said) == 2
    assert_names(tool.summary(results).partition("\n")[0], 2, 10)
    assert (checkout / "tiny.py").read_text() == SOURCE, "the checkout was changed"
    assert {r["name"]: r["outcome"] for r in json.loads(record.path.read_text())["results"]} == outcomes


def test_a_test_that_hangs_is_ended(tool: Any, checkout: Path) -> None:
    fault = fault_of(tool, "hangs", "return 2 * n", "while n:\n        pass")
    record = tool.Record(None, "digest", {fault.tests[0]: ""})
    (result,) = tool.mutate(checkout, [fault], record, limit=2, package="tiny", say=str)
    assert result.outcome == "timeout"


def test_results_are_used_again_only_of_the_same_state(tool: Any, checkout: Path, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    fault = fault_of(tool, "noticed", "2 * n", "3 * n")
    record = tool.Record(path, tool.digest(checkout))
    tool.mutate(checkout, [fault], record, package="tiny", say=str)

    again = tool.Record(path, tool.digest(checkout))
    again.load(path)
    assert again.has(fault)
    assert not again.has(fault_of(tool, "noticed", "2 * n", "4 * n")), "another fault of the same name"
    assert tool.mutate(checkout, [fault], again, package="tiny", say=pytest.fail)[0].outcome == "noticed"

    (checkout / "tiny.py").write_text(SOURCE.replace("n / 2", "0.5 * n"))
    other = tool.Record(path, tool.digest(checkout))
    other.load(path)
    assert not other.has(fault)


def test_the_committed_list_can_be_applied(tool: Any) -> None:
    wrong = []
    for fault in tool.read_faults(ROOT / tool.FAULTS):
        try:
            tool.mutated(fault, ROOT)
        except tool.FaultError as error:
            wrong.append(f"{fault.name}: {error}")
        for test in fault.tests:
            file, _, function = test.partition("::")
            path = ROOT / file
            if not path.is_file():
                wrong.append(f"{fault.name}: there is no {file}")
            elif function and f"def {function.partition('[')[0]}(" not in path.read_text():
                wrong.append(f"{fault.name}: {file} has no {function}")
    assert not wrong, "\n".join(wrong)
