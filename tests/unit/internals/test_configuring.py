"""Settings from YAML: what can be said, and errors in one line with file, line and key."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_flex.errors import FlexError
from megatron_flex.launch.launch_settings import Settings
from megatron_flex.launch.settings_file import read_settings_file
from tests.support.messages import assert_names, raises

DOCS = Path(__file__).parents[3] / "docs"


def of(folder: Path, text: str | bytes) -> Settings:
    file = folder / "hooks.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return Settings.model_validate(read_settings_file(file))


# --- what can be said


def test_the_file_of_the_page(tmp_path: Path) -> None:
    """It has every key but those that only flags are wanted for, each with another value than its default."""
    page = (DOCS / "launch.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    out = of(tmp_path, text)
    assert unsaid(Settings(), out) == {
        *("gradients", "list_sites", "estimate", "verify", "gradient_norms", "cpu"),
        *("weights_digest", "weights_digest_at"),
    }
    assert len(out.edits) == 2
    second = [n for n in type(out.edits[1]).model_fields if f"    {n}:" in text]
    assert {*second, "edit", "site"} == {*type(out.edits[1]).model_fields}
    assert set.intersection(*(unsaid(type(d)(path="x"), d) for d in out.dumps)) == set()
    assert out.statistics is not None
    assert unsaid(type(out.statistics)(), out.statistics) <= {"sites", "groups"}


def unsaid(default: Any, given: Any) -> set[str]:
    return {n for n in type(default).model_fields if getattr(default, n) == getattr(given, n)}


def test_the_error_of_the_page(tmp_path: Path) -> None:
    page = (DOCS / "launch.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\nhooks.yaml(:.*)\n```", page, re.MULTILINE)
    assert shown.startswith(":5:")
    assert_names(shown, "dumps.0.evry", "every")
    with raises(FlexError, f"{tmp_path}/hooks.yaml:5", "dumps.0.evry", "every"):
        of(tmp_path, "sites: a\n\ndumps:\n  - path: b\n    evry: 3\n")


def test_only_what_is_said_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("every: 3\ndumps: [{path: x}]\nstatistics: {}")
    assert read_settings_file(tmp_path / "a.yaml") == {
        "every": 3,
        "dumps": ({"path": "x"},),
        "statistics": {},
    }


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("sites: a.b", "sites", ("a.b",)),
        ("sites: [a.b, 'c*']", "sites", ("a.b", "c*")),
        ("tokens: 5", "tokens", "5"),
        ("tokens: [0, 5, -1]", "tokens", "0,5,-1"),
        ("tokens: 1:30", "tokens", "1:30"),  # 90 in YAML 1.1
        ("tokens: ::8", "tokens", "::8"),
        ("tokens: 0,-1", "tokens", "0,-1"),
        ("every: 010", "every", 10),  # 8 in YAML 1.1
        ("every: '4'", "every", 4),
        ("gradients: yes", "gradients", True),
        ("gradients: 'no'", "gradients", False),
        ("tokens: null", "tokens", None),
        ("control: ~/x", "control", Path("~/x")),
        ("list_sites: 2024-01-01", "list_sites", "2024-01-01"),
        ("list_sites: 1.10", "list_sites", "1.10"),
        ("list_sites: 0x10", "list_sites", "0x10"),
        ("list_sites: &a b\nsites: [*a, *a]", "sites", ("b", "b")),
        ("{}", "every", 1),
        ("# a comment\n---\nevery: 2\n", "every", 2),
        ("\ufeffevery: 2", "every", 2),
    ],
)
def test_what_values_mean(text: str, field: str, value: Any, tmp_path: Path) -> None:
    assert getattr(of(tmp_path, text), field) == value


# --- what cannot be


@pytest.mark.parametrize(
    ("text", "line", "values"),
    [
        ("evry: 3", 1, ["evry", "every"]),
        ("sites: a\nzzzzzz: 3", 2, ["zzzzzz", "sites", "every"]),
        ("dumps:\n  - path: a\n  - {path: b,\n     evry: 3}", 4, ["dumps.1.evry", "every"]),
        ("edits:\n- edit: zero\n  sit: a", 3, ["edits.0.sit", "site"]),
        ("statistics:\n  histogramm: no", 2, ["statistics.histogramm", "histogram"]),
        ("dumps:\n\n  - groups: [a]", 3, ["dumps.0.path"]),
        ("every: 0", 1, ["every", "0", "1"]),
        ("every: x", 1, ["every", "'x'"]),
        ("every: yes", 1, ["every", "true"]),
        ("sites: a\nevery:\n  x", 2, ["every", "'x'"]),  # the key's line, not the value's
        ("every: 1.5", 1, ["every", "'1.5'"]),
        ("every: [1]", 1, ["every", "[1]"]),
        ("every:", 1, ["every", "None"]),
        ("gradients: maybe", 1, ["gradients", "'maybe'"]),
        ("on_error: ignore", 1, ["on_error", "'ignore'", "'raise'", "'skip'"]),
        ("tokens: 0.5", 1, ["tokens", "'0.5'"]),
        ("tokens: [a]", 1, ["tokens", "['a']"]),
        ("tokens: true", 1, ["tokens", "True"]),
        ("dumps: [{path: a, iterations: 1:x}]", 1, ["dumps.0.iterations", "'1:x'"]),
        ("dumps: [{path: a, samples: '3,4:'}]", 1, ["dumps.0.samples", "'3,4:'"]),
        ("dumps: [{path: ''}]", 1, ["dumps.0.path"]),
        ("sites: [a,\n b, '']", 2, ["sites.2"]),
        ("control: ''", 1, ["control"]),
        ("sites: {a: 1}", 1, ["sites", "{'a': 1}"]),
        ("sites: 5", 1, ["sites", "5"]),
        ("dumps: a", 1, ["dumps", "'a'"]),
        ("dumps: [a]", 1, ["dumps.0", "'a'"]),
        ("statistics: folder", 1, ["statistics", "'folder'"]),
        ("sites: a\nevery: 2\nsites: b", 3, ["sites", "1"]),
        ("dumps:\n- path: a\n  path: b", 3, ["dumps.0.path", "2"]),
        ("sites: a\nsites: a", 2, ["sites", "1"]),
        ("? [a]\n: b", 1, []),
        ("- a\n- b", 1, ["sites: [decoder.layers.*]"]),
        ("\nword", 2, ["sites: [decoder.layers.*]"]),
        ("sites: &a [*a]", 1, ["sites.0"]),
        ("sites: !!python/name:os.system ''", 1, ["sites", "tag:yaml.org,2002:python/name:os.system"]),
        ("sites: !mine [a]", 1, ["sites", "!mine"]),
        ("sites: !!binary aGk=", 1, ["sites", "tag:yaml.org,2002:binary"]),
        ("statistics: !!python/dict {}", 1, ["statistics"]),
        ("<<: {every: 2}", 1, ["<<"]),
        ("sites: [a\nevery: 2", 2, []),
        ("sites: a\n---\nsites: b", 2, []),
        ("sites: *a", 1, ["'a'"]),
        ("\tsites: a", 1, ["'\\t'"]),
        ("every: 0\nevry: 1", 1, ["every", "0", "1"]),  # of two errors the first
        ("evry: 1\nevery: 0", 1, ["evry"]),
    ],
)
def test_what_cannot_be_is_told_in_one_line(text: str, line: int, values: list[str], tmp_path: Path) -> None:
    with raises(FlexError, f"{tmp_path}/hooks.yaml:{line}", *values) as raised:
        of(tmp_path, text)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (b"", []),
        (b"# only a comment\n", []),
        (b"\xff\xfe\x00", [0, "UTF-8"]),
        (b"every: 2\x00", [8]),
    ],
)
def test_files_that_are_no_settings(content: bytes, values: list[object], tmp_path: Path) -> None:
    with raises(FlexError, f"{tmp_path}/hooks.yaml", *values):
        of(tmp_path, content)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with raises(FlexError, tmp_path / "none.yaml", os.strerror(errno.ENOENT)):
        read_settings_file(tmp_path / "none.yaml")
    with raises(FlexError, tmp_path, os.strerror(errno.EISDIR)):
        read_settings_file(tmp_path)


def test_aliases_of_aliases_come_to_an_end(tmp_path: Path) -> None:
    levels = [f"  - &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30)]
    text = "\n".join(["sites:", "  - &l0 [a, a]", *levels])
    with raises(FlexError, tmp_path / "hooks.yaml", 10000):
        of(tmp_path, text)
