"""Files of statistics as one rank writes them: a new one at each start of a run, its header first.

JSON lines: one line for each tensor of an iteration, so that a killed run leaves at most one incomplete line,
the last. Parquet: a folder with one file for each `ITERATIONS_PER_PART` iterations; a file gets its name once
it is complete. Each line has a checksum as its first key (lines of earlier versions have none), and each page
of a Parquet file has one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any, Protocol

from xxhash import xxh3_64_hexdigest

from megatron_flex.errors import FlexError
from megatron_flex.statistics.statistics_records import StatisticsHeader, TensorStatistics
from megatron_flex.statistics.statistics_settings import FileFormat

ITERATIONS_PER_PART = 64  # iterations of one Parquet file
STEM, SUFFIXES = "statistics", {"jsonl": ".jsonl", "parquet": ".parquet"}
FILE_NAME = re.compile(STEM + r"-([0-9]{4,})\.(jsonl|parquet)")
HEADER_NAME, PARQUET_NAME, PARQUET_KEY = "_header.json", "part-{:06d}.parquet", b"megatron_flex"
KEY_OF_ROWS = b"megatron_flex.rows"  # the checksum of what a part's footer and pages say together
INTEGER_COLUMNS = ("iteration", "order", "stage", "count", "nans", "infinities", "microbatches")
CHECKSUM_KEY, ZERO_CHECKSUM = "checksum", "0" * 16  # XXH3-64 of a line, with zeros in place of the digits
_SEAL = re.compile(rb'\{"checksum":"([0-9a-f]{16})"[,}]')  # the first key of a line
FILE_COLUMNS = tuple(f.name for f in fields(TensorStatistics))


class StatisticsFile(Protocol):
    """What rows are written to; one thread calls it.

    Attributes:
        path: of it.
        lost: iterations that could not be written.
    """

    path: Path
    lost: int

    def write(self, rows: Sequence[TensorStatistics]) -> None:
        """Write the rows of an iteration, or keep them for the next part. Raises OSError."""

    def close(self) -> None:
        """Write the buffered rows, and close. Raises OSError."""


def create_file(path: Path, form: FileFormat, header: StatisticsHeader) -> StatisticsFile:
    """Begin a file under the next number that is free. One rank calls it.

    Args:
        path: the folder; it is made if need be.
        form: which kind.
        header: what comes first.

    Raises:
        FlexError: the folder cannot be written, or pyarrow is absent and `form` needs it.
    """
    made = JsonLinesFile if form == "jsonl" else ParquetFolder
    if form == "parquet":
        _import_pyarrow()
    try:
        path.mkdir(parents=True, exist_ok=True)
        number = max((n for n, _ in list_files(path)), default=-1) + 1
        while True:
            try:
                return made(path / f"{STEM}-{number:04d}{SUFFIXES[form]}", header)
            except FileExistsError:  # another job has begun one at the same time
                number += 1
    except OSError as error:
        raise FlexError(f"{path}: no statistics can be written there: {error.strerror or error}") from error


def list_files(path: Path) -> list[tuple[int, Path]]:
    """The files of a folder by number. Raises OSError."""
    found = ((FILE_NAME.fullmatch(f.name), f) for f in path.iterdir())
    return sorted((int(match[1]), f) for match, f in found if match is not None)


class JsonLinesFile:
    """JSON lines: the header, then a line for each tensor of an iteration; an iteration is one write."""

    def __init__(self, path: Path, header: StatisticsHeader) -> None:
        self.path, self.lost = path, 0
        self._file = path.open("xb", buffering=0)
        self._torn = False
        try:
            self._put(_format_line(header.to_json()))
        except BaseException:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, rows: Sequence[TensorStatistics]) -> None:
        """Write the rows of an iteration. Raises OSError."""
        self.lost += 1
        self._put(b"".join(_format_line(_row_to_json(row)) for row in rows))
        self.lost -= 1

    def close(self) -> None:
        """Close the file. Raises OSError."""
        self._file.close()

    def _put(self, data: bytes) -> None:
        appended = (
            b"\n" + data if self._torn else data
        )  # ends what a full disk cut off: it is not one of our lines
        self._torn = True
        rest = memoryview(appended)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self._torn = False


class ParquetFolder:
    """A folder that readers of Parquet take for one table: parts, and the header beside them."""

    def __init__(self, path: Path, header: StatisticsHeader) -> None:
        path.mkdir()
        self.path, self.lost = path, 0
        self._header_json = json.dumps(_null_nonfinite(header.to_json()), allow_nan=False)
        try:
            (path / HEADER_NAME).write_bytes(_format_line(header.to_json()))
        except BaseException:
            rmtree(path, ignore_errors=True)
            raise
        self._rows: list[TensorStatistics] = []
        self._iterations = self._parts = 0

    def write(self, rows: Sequence[TensorStatistics]) -> None:
        """Buffer the rows of an iteration; write the buffer when it is full. Raises OSError."""
        self._rows += rows
        self._iterations += 1
        if self._iterations >= ITERATIONS_PER_PART:
            self._part()

    def close(self) -> None:
        """Write the buffered rows. Raises OSError."""
        if self._rows:
            self._part()

    def _part(self) -> None:
        """Write the buffered rows to a file, complete once it has its name; they are lost on failure."""
        rows, self._rows = self._rows, []
        held, self._iterations = self._iterations, 0
        self.lost += held
        arrow = _import_pyarrow()
        columns = {name: [getattr(row, name) for row in rows] for name in FILE_COLUMNS}
        table = arrow.table(columns, schema=_make_schema(arrow, self._header_json, digest_of(columns)))
        name = PARQUET_NAME.format(self._parts)
        rough = self.path / f".{name}.{os.getpid()}.tmp"
        try:
            import_module("pyarrow.parquet").write_table(
                table, rough, compression="zstd", write_page_checksum=True
            )
            rough.rename(self.path / name)
        except BaseException:
            rough.unlink(missing_ok=True)
            raise
        self._parts += 1
        self.lost -= held


def digest_of(columns: Mapping[str, Sequence[Any]]) -> str:
    """The checksum of a part's values, which does not depend on how Parquet stores them."""
    return compute_checksum(json.dumps([columns[name] for name in FILE_COLUMNS]).encode())


def _make_schema(arrow: Any, record: str, rows: str) -> Any:
    text, double, appended = arrow.string(), arrow.float64(), arrow.int64()
    kinds = {"site": text, "kind": text, "histogram": arrow.list_(appended)}
    kinds |= dict.fromkeys(INTEGER_COLUMNS, appended)
    return arrow.schema(
        [(n, kinds.get(n, double)) for n in FILE_COLUMNS],
        {PARQUET_KEY: record.encode(), KEY_OF_ROWS: rows.encode()},
    )


def _import_pyarrow() -> Any:
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError as error:
        raise FlexError(
            "statistics in Parquet need pyarrow, which is not installed: pip install pyarrow, or pass "
            "format='jsonl'"
        ) from error


def _format_line(record: Mapping[str, Any]) -> bytes:
    record = {CHECKSUM_KEY: ZERO_CHECKSUM, **record}
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_null_nonfinite(record), allow_nan=False, separators=(",", ":"))
    return seal_line(text.encode()) + b"\n"


def _row_to_json(row: TensorStatistics) -> dict[str, Any]:
    """A row in plain values; of the histogram the number of the first bin that is not empty, then the counts
    up to the last such bin."""
    record = {name: getattr(row, name) for name in FILE_COLUMNS}
    first, counts = trim_bins(row.histogram)
    record["histogram"] = ([first, *counts] if counts else []) if row.histogram else None
    return record


def trim_bins(counts: Sequence[int]) -> tuple[int, Sequence[int]]:
    """The first bin that is not empty, and the counts from there to the last such bin."""
    nonempty = [n for n, count in enumerate(counts) if count]
    return (nonempty[0], counts[nonempty[0] : nonempty[-1] + 1]) if nonempty else (0, ())


def _null_nonfinite(value: Any) -> Any:
    """The same values with null for floats that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _null_nonfinite(one) for key, one in value.items()}
    return [_null_nonfinite(one) for one in value] if isinstance(value, (list, tuple)) else value


def compute_checksum(data: bytes) -> str:
    """The checksum of some bytes."""
    return xxh3_64_hexdigest(data)


def seal_line(line: bytes) -> bytes:
    """A line that begins with a checksum of zeros, with its own."""
    at = _SEAL.match(line)
    if at is None:
        raise ValueError("no place for a checksum at the beginning of the line")
    return line[: at.start(1)] + compute_checksum(line).encode() + line[at.end(1) :]


def is_line_sealed(line: bytes) -> bool | None:
    """Whether a line is as it was written; None if it has no checksum."""
    at = _SEAL.match(line)
    if at is None:
        return None
    blank = line[: at.start(1)] + ZERO_CHECKSUM.encode() + line[at.end(1) :]
    return compute_checksum(blank).encode() == at[1]
