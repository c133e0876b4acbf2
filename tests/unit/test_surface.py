"""The public surface is what `tests/surface/` says: nobody changes a name without seeing it."""

import difflib
import importlib.util
import subprocess
import sys

import pytest

from megatron_flex.dump import schema
from megatron_flex.statistics import statistics_files
from tests.support import surface

NEEDS = {"commands": "typer", "flags": "pydantic", "names": "numpy"}


@pytest.mark.parametrize("topic", surface.TOPICS)
def test_the_surface_is_the_one_that_is_kept(topic: str) -> None:
    if importlib.util.find_spec(NEEDS.get(topic, "torch")) is None:
        pytest.skip(f"{NEEDS[topic]} is not installed")
    now = list(surface.TOPICS[topic]())
    changes = list(difflib.unified_diff(surface.kept(topic), now, "kept", "now", lineterm="", n=0))
    assert not changes, "\n".join(
        [*changes, "where this is meant: python -m tests.support.surface, and an entry in the changelog"]
    )


def test_the_surface_does_not_depend_on_what_was_imported_before() -> None:
    """Names that are imported lazily are there from the start."""
    code = "from tests.support import surface; print(len(list(surface.names())))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(surface.kept("names")) > 1000


@pytest.mark.parametrize(
    ("module", "name", "line"),
    [
        ("megatron_flex.points", "fire_all", "megatron_flex.points.fire_all()"),
        ("megatron_flex.edits", "zeroed", "megatron_flex.edits.zeroed()"),
    ],
)
def test_a_new_name_is_noticed(monkeypatch: pytest.MonkeyPatch, module: str, name: str, line: str) -> None:
    def new() -> None: ...

    new.__module__ = module
    monkeypatch.setattr(f"{module}.{name}", new, raising=False)
    if hasattr(sys.modules[module], "__all__"):
        monkeypatch.setattr(f"{module}.__all__", [*sys.modules[module].__all__, name])
    assert any(found.startswith(line) for found in surface.names())


@pytest.mark.parametrize(
    ("where", "field", "line"),
    [
        ("MANIFEST", "color?", "dump 2 | manifest.color (optional): str"),
        ("INDEX", "color", "dump 2 | index.color: str"),
        ("META", "color", "dump 2 | meta.color: str"),
    ],
)
def test_a_new_field_on_disk_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: str, field: str, line: str
) -> None:
    monkeypatch.setitem(schema.FORMS[2][where], field, "str")
    assert set(surface.schema()) - set(surface.kept("schema")) == {line}


def test_another_field_of_statistics_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_files, "FILE_COLUMNS", (*statistics_files.FILE_COLUMNS[:-1], "count"))
    changed = set(surface.kept("schema")) - set(surface.schema())
    assert "statistics | Parquet | microbatches: int64" in changed
    assert any(line.startswith("statistics | JSON lines | row: checksum, ") for line in changed)


def test_entry_points_and_points_are_on_the_surface() -> None:
    assert any(line.startswith("entry point console_scripts: ") for line in surface.kept("registered"))
    assert any(line.startswith("megatron_flex.points.") and "(" in line for line in surface.kept("names"))
