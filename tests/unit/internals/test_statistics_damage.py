"""A damaged byte of statistics gives no other number on any road: what has it is named, and left out."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

import megatron_flex as mf
from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.figures.figure_sources import open_source
from megatron_flex.page.data_pane import statistics_source
from megatron_flex.statistics.statistics_records import TensorStatistics
from tests.support.commands import Command
from tests.support.dump_roads import FIXTURE
from tests.support.measured import SITES, write
from tests.support.messages import assert_names, raises, warns

DIGIT = re.compile(rb'"rms":\d\.(\d)')


def opened(path: Path) -> tuple[list[TensorStatistics], list[str], list[str]]:
    """The rows, what is damaged, the warnings; an error is one line of damage."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlexWarning)
        try:
            found = mf.open_statistics(path)
        except FlexError as error:
            return [], [str(error)], [str(error)]
    return list(found.rows()), found.damaged, [str(w.message) for w in caught]


def change(path: Path, line: int) -> None:
    """Another digit in a line, which stays JSON of the right form."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = DIGIT.search(lines[line])
    assert at is not None
    lines[line] = lines[line][: at.start(1)] + str((int(at[1]) + 1) % 10).encode() + lines[line][at.end(1) :]
    path.write_bytes(b"".join(lines))


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    write(tmp_path / "s", range(1, 3))
    return tmp_path / "s" / "statistics-0000.jsonl"


def test_a_digit_that_changed_is_named_on_every_road(
    jsonl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right, damaged, told = opened(jsonl)
    assert (damaged, told) == ([], [])
    change(jsonl, 3)
    rows, damaged, (told,) = opened(jsonl)
    assert rows == [*right[:2], *right[3:]]
    assert damaged == ["statistics-0000.jsonl, line 4"]
    assert_names(told, "statistics-0000.jsonl, line 4")
    with (
        warns(FlexWarning, tmp_path / "s", "statistics-0000.jsonl, line 4"),
        open_source(jsonl.parent) as source,
    ):
        assert list(source.rows(SITES)) == rows
    with warns(FlexWarning, tmp_path / "s", "statistics-0000.jsonl, line 4"):
        found = mf.open_statistics(jsonl.parent, SITES[0])
    assert any("line 4" in note["text"] for note in statistics_source(found, SITES)["notes"])
    assert "line 4" in found._repr_html_()
    command = Command(monkeypatch, capsys, tmp_path)
    for words in (("ls", "s"), ("show", "s")):
        done = command("stats", *words)
        assert done.status == 0
        assert "line 4" in done.err
    assert json.loads(command("stats", "ls", "s", "--json").out)["damaged"] == damaged


def test_no_byte_of_json_lines_changes_a_number(jsonl: Path) -> None:
    right, _, _ = opened(jsonl)
    data = jsonl.read_bytes()
    for at in range(0, len(data), 3):
        jsonl.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        rows, damaged, told = opened(jsonl)
        assert {id_(r): r for r in right} | {id_(r): r for r in rows} == {id_(r): r for r in right}, at
        assert rows == right or told or at == len(data) - 1, at
        assert bool(damaged) == bool(told)


def id_(row: TensorStatistics) -> tuple[int, str]:
    return row.iteration, row.site


def test_lines_without_a_checksum_are_damaged(jsonl: Path) -> None:
    right, _, _ = opened(jsonl)
    lines = jsonl.read_bytes().splitlines(keepends=True)
    bare = [re.sub(rb'"checksum":"[0-9a-f]{16}",', b"", line) for line in lines]
    jsonl.write_bytes(b"".join([*lines[:2], bare[2], *lines[3:]]))
    assert opened(jsonl)[:2] == ([right[0], *right[2:]], ["statistics-0000.jsonl, line 3"])
    jsonl.write_bytes(b"".join([bare[0], *lines[1:]]))
    with raises(FlexError, jsonl):
        mf.open_statistics(jsonl)


def test_the_committed_file_is_read() -> None:
    rows, damaged, told = opened(FIXTURE / "statistics")
    assert [r.site for r in rows] == ["decoder.layers.0:output"]
    assert (damaged, told) == ([], [])


def test_a_header_that_changed_is_an_error(jsonl: Path) -> None:
    jsonl.write_bytes(jsonl.read_bytes().replace(b'"2.13.0"', b'"2.12.0"', 1))
    with raises(FlexError, jsonl):
        mf.open_statistics(jsonl)
