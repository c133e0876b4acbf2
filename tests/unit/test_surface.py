"""The public surface is what `tests/surface/` says: nobody changes a name without seeing it."""

import difflib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import megatron_flex
from megatron_flex.dump import schema
from megatron_flex.statistics import statistics_files
from tests.support import surface

ROOT = Path(__file__).parents[2]

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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
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


REPLACED_WORDS = {  # a word of a public name, and the one that is used for the same thing
    "tag": "group",
    "tags": "groups",
    "untag": "remove_from_groups",
    "costs": "estimate",
    "cost": "estimate",
    "planned": "estimated",
    "whole": "full",
    "told": "described",
    "said": "given",
    "behind": "edited",
    "taker": "sink",
    "torn": "incomplete",
    "understood": "parse",
    "silence": "ablate",
    "silenced": "ablate",
}
PUBLIC_NAME = re.compile(r"[A-Za-z_]\w*")


def list_replaced_words(lines: Iterable[str]) -> list[str]:
    """The words of public names that another word has replaced."""
    out = []
    for line in lines:
        for name in PUBLIC_NAME.findall(line):
            out += [
                f"{word} in {name}: say {REPLACED_WORDS[word]}"
                for word in name.lower().split("_")
                if word in REPLACED_WORDS
            ]
    return out


@pytest.mark.parametrize("topic", ["names", "commands", "flags", "variables"])
def test_one_thing_has_one_word(topic: str) -> None:
    assert list_replaced_words(surface.kept(topic)) == []


def test_another_word_is_noticed() -> None:
    assert list_replaced_words(["megatron_flex.FlexModel.tag(self, whole: 'Tensor')"]) == [
        "tag in tag: say group",
        "whole in whole: say full",
    ]
    assert list_replaced_words(["megatron_flex.Layout.staged(self, costsless)"]) == []


def test_on_every_rank_is_everywhere() -> None:
    found = {n for line in surface.kept("names") for n in PUBLIC_NAME.findall(line)}
    assert "everywhere" in found
    assert [n for n in found if re.search("every_?rank|all_?ranks", n, re.IGNORECASE)] == []


def test_annotations_are_not_at_top_level() -> None:
    only_annotate = {"Key", "Captures", "Readings", "Cut", "Axis", "Detection", "Spread", "Links"}
    assert only_annotate.isdisjoint(dir(megatron_flex))
    assert dir(megatron_flex) == sorted(megatron_flex.__all__)
    for name in dir(megatron_flex):
        assert getattr(megatron_flex, name) is not None


def test_what_registers_returns_a_handle() -> None:
    """As in torch; the interface of 2023 keeps its own results."""
    native = [
        line
        for line in surface.kept("names")
        if re.search(r"\.register_\w+\(", line) and "megatron_flex.compat" not in line
    ]
    assert len(native) == 9
    assert [line for line in native if not line.endswith("-> 'Handle'")] == []
    assert megatron_flex.FlexModel.detach is not None
