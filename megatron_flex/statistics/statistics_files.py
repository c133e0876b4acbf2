"""Files of statistics as one rank writes them: JSON lines, a new file at each start of a run.

The header comes first, then one line for each tensor of an iteration, so that a killed run leaves at most one
incomplete line, the last. The first key of a line is its checksum, as in the JSON texts of dumps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_flex.checksums import ZERO_CHECKSUM, seal_json
from megatron_flex.errors import FlexError
from megatron_flex.statistics.statistics_records import StatisticsHeader, TensorStatistics

STEM = "statistics"
FILE_NAME = re.compile(STEM + r"-([0-9]{4,})\.jsonl")
INTEGER_COLUMNS = ("iteration", "order", "stage", "count", "nans", "infinities", "microbatches")
FILE_COLUMNS = tuple(f.name for f in fields(TensorStatistics))


def create_file(path: Path, header: StatisticsHeader) -> StatisticsFile:
    """Begin a file under the next number that is free. One rank calls it.

    Args:
        path: the folder; it is made if need be.
        header: what comes first.

    Raises:
        FlexError: the folder cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        number = max((n for n, _ in list_files(path)), default=-1) + 1
        while True:
            try:
                return StatisticsFile(path / f"{STEM}-{number:04d}.jsonl", header)
            except FileExistsError:  # another job has begun one at the same time
                number += 1
    except OSError as error:
        raise FlexError(f"{path}: no statistics can be written there: {error.strerror or error}") from error


def list_files(path: Path) -> list[tuple[int, Path]]:
    """The files of a folder by number. Raises OSError."""
    matches = ((FILE_NAME.fullmatch(f.name), f) for f in path.iterdir())
    return sorted((int(match[1]), f) for match, f in matches if match is not None)


def has_statistics(path: Path) -> bool:
    """Whether a path has the name of a file of statistics, or is a folder with one. Raises OSError."""
    return FILE_NAME.fullmatch(path.name) is not None or (path.is_dir() and bool(list_files(path)))


class StatisticsFile:
    """The header, then a line for each tensor of an iteration; an iteration is one write, by one thread.

    Attributes:
        path: of the file.
        lost: iterations that could not be written.
    """

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


def _format_line(record: Mapping[str, Any]) -> bytes:
    record = {"checksum": ZERO_CHECKSUM.decode(), **record}
    try:
        text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_null_nonfinite(record), allow_nan=False, separators=(",", ":"))
    return seal_json(text.encode()) + b"\n"


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
        return {key: _null_nonfinite(item) for key, item in value.items()}
    return [_null_nonfinite(item) for item in value] if isinstance(value, (list, tuple)) else value
