"""A damaged byte of statistics gives no other number on any road: what has it is named, and left out."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

import megatron_flex as mf
from megatron_flex.errors import FlexError, FlexWarning
from megatron_flex.figures.figure_sources import open_source
from megatron_flex.page.data_pane import statistics_source
from megatron_flex.statistics.statistics_files import ITERATIONS_PER_PART, is_line_sealed
from megatron_flex.statistics.statistics_records import TensorStatistics
from tests.support.commands import Command
from tests.support.dump_roads import OLD
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


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow")
    write(tmp_path / "s", range(3 * ITERATIONS_PER_PART), "parquet")
    return tmp_path / "s" / "statistics-0000.parquet"


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


def test_lines_without_a_checksum_are_read_where_none_has_one(jsonl: Path) -> None:
    """Those of a version before; one among lines that have some is somebody else's."""
    right, _, _ = opened(jsonl)
    lines = jsonl.read_bytes().splitlines(keepends=True)
    old = [re.sub(rb'"checksum":"[0-9a-f]{16}",', b"", line) for line in lines]
    assert all(is_line_sealed(line[:-1]) is None for line in old)
    jsonl.write_bytes(b"".join(old))
    assert opened(jsonl) == (right, [], [])
    jsonl.write_bytes(b"".join([*lines[:2], old[2], *lines[3:]]))
    assert opened(jsonl)[:2] == ([right[0], *right[2:]], ["statistics-0000.jsonl, line 3"])
    jsonl.write_bytes(b"".join([old[0], *lines[1:]]))
    with raises(FlexError, jsonl):
        mf.open_statistics(jsonl)


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    shutil.copytree(OLD / "statistics", tmp_path / "s")
    rows, damaged, told = opened(tmp_path / "s")
    assert rows
    assert (damaged, told) == ([], [])


def test_a_header_that_changed_is_an_error(jsonl: Path) -> None:
    jsonl.write_bytes(jsonl.read_bytes().replace(b'"2.13.0"', b'"2.12.0"', 1))
    with raises(FlexError, jsonl):
        mf.open_statistics(jsonl)


def test_no_byte_of_parquet_changes_a_number(tmp_path: Path) -> None:
    """Pages have checksums of the format's own, and the values one that the footer has to agree with."""
    pytest.importorskip("pyarrow")
    right = write(tmp_path / "s", [0], "parquet")
    (part,) = tmp_path.glob("s/*/part-*")
    data = part.read_bytes()
    silent = 0
    for at in range(0, len(data), 5):
        part.write_bytes(data[:at] + bytes([data[at] ^ (1 << (7 - at % 8))]) + data[at + 1 :])
        rows, damaged, told = opened(tmp_path / "s")
        assert rows == right or (rows == [] and told), at
        assert damaged in ([], [f"statistics-0000.parquet/{part.name}"])
        silent += not told
    assert silent < len(data) / 10, "what has no meaning: statistics of pages, names of writers"


def test_pages_of_parquet_have_checksums_that_are_compared(
    parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checksum of the values, which parts of a version before do not have."""
    monkeypatch.setattr("megatron_flex.statistics.statistics_reader.KEY_OF_ROWS", b"another")
    part = parquet / "part-000001.parquet"
    data = part.read_bytes()
    noticed = 0
    for at in range(len(data) // 10, len(data) // 2, len(data) // 8):  # of pages, which come first
        part.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        noticed += opened(parquet)[1] == [f"{parquet.name}/{part.name}"]
    assert noticed >= 3


def test_a_footer_that_says_other_values_is_noticed(parquet: Path) -> None:
    """Written by Parquet's own writer with pages that are right: two columns have changed their names."""
    arrow = pytest.importorskip("pyarrow.parquet")
    part = parquet / "part-000001.parquet"
    table = arrow.read_table(part)
    names = [{"mean": "norm", "norm": "mean"}.get(n, n) for n in table.column_names]
    metadata = table.schema.metadata
    arrow.write_table(table.rename_columns(names).replace_schema_metadata(metadata), part)
    assert opened(parquet)[1] == [f"{parquet.name}/{part.name}"]


def test_a_part_of_parquet_that_is_gone_is_named(parquet: Path) -> None:
    (parquet / "part-000001.parquet").unlink()
    rows, damaged, (told,) = opened(parquet.parent)
    assert {r.iteration for r in rows} == {
        *range(ITERATIONS_PER_PART),
        *range(2 * ITERATIONS_PER_PART, 3 * ITERATIONS_PER_PART),
    }
    (part,) = damaged
    assert_names(part, "statistics-0000.parquet/part-000001.parquet")
    assert "part-000001" in told


def test_a_header_of_parquet_that_changed_is_an_error(parquet: Path) -> None:
    header = parquet / "_header.json"
    header.write_bytes(header.read_bytes().replace(b'"2.13.0"', b'"2.12.0"', 1))
    with raises(FlexError, header):
        mf.open_statistics(parquet)
