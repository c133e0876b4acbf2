"""Reading statistics back: what a run wrote over all its starts, by site and iteration."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import Any, get_args

from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.progress import BYTES, ProgressBar, progress
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.statistics.files import FILE_COLUMNS, HEADER_NAME, FILE_NAME, INTEGER_COLUMNS, list_files
from megatron_flex.statistics.header import StatisticsHeader
from megatron_flex.statistics.measured import BINS_PER_SIGN, StatisticsKind, TensorStatistics

HISTOGRAM_BINS = 2 * BINS_PER_SIGN + 1
STATISTICS_KINDS = get_args(StatisticsKind)
TEXT_COLUMNS = ("site", "kind", "histogram")
FLOAT_COLUMNS = tuple(name for name in FILE_COLUMNS if name not in (*INTEGER_COLUMNS, *TEXT_COLUMNS))
NameFilter = Callable[[str], bool]
RowsByIteration = dict[int, dict[str, TensorStatistics]]  # by iteration and name; histograms are as in the file


def open_statistics(path: str | PathLike[str], sites: Sequence[str] | str | None = None) -> OpenStatistics:
    """Read the statistics of a run; no process group, framework or GPU is needed. The run may go on.

    Args:
        path: the folder that `Statistics` was given; or one file of it.
        sites: names or patterns of what is read; `*` is any text. Everything if None.

    Raises:
        FlexError: no statistics are there, or they need pyarrow, or a newer version of this package.
    """
    folder = Path(fspath(path))
    words = [sites] if isinstance(sites, str) else sites
    found = OpenStatistics(folder, *_read_files(folder, lambda name: _is_wanted(name, words)))
    if words and not found.sites:
        known = [p.name for h in found.headers for p in h.sites]
        raise FlexError(f"{folder}: nothing is named {words[0]!r}{suggest_nearest(words[0], known)}")
    return found


@dataclass(frozen=True, slots=True)
class StatisticsSeries:
    """The statistics of one tensor over iterations: lists of equal lengths; NaN where there is no number.

    Attributes:
        site: its name.
        iterations: which they are.
        histogram: for each the counts of all bins (`statistics.measured.edges`); empty where not wanted.

    The others are as in `statistics.measured.Measured`.
    """

    site: str
    iterations: list[int]
    count: list[int]
    mean: list[float]
    std: list[float]
    rms: list[float]
    absmax: list[float]
    zeros: list[float]
    kurtosis: list[float]
    norm: list[float]
    nans: list[int]
    infinities: list[int]
    histogram: list[tuple[int, ...]]
    microbatches: list[int]

    def __len__(self) -> int:
        return len(self.iterations)


class OpenStatistics:
    """What was read. Where starts of a run repeat an iteration, it is as the last of them wrote it.

    Attributes:
        path: where it is from.
        headers: what each start says of itself, in order.
        torn: lines and files that were not whole, and are left out: of killed runs and full disks.
    """

    def __init__(self, path: Path, headers: list[StatisticsHeader], rows: RowsByIteration, torn: int) -> None:
        self.path, self.headers, self.torn = path, headers, torn
        self._rows = {number: rows[number] for number in sorted(rows)}

    @property
    def iterations(self) -> list[int]:
        """Iterations of which anything is known, ascending."""
        return list(self._rows)

    @property
    def sites(self) -> list[str]:
        """The names of tensors that were measured, in model order, each one's gradient behind it."""
        order: dict[str, int] = {}
        for rows in self._rows.values():
            order |= {name: row.order for name, row in rows.items()}
        return sorted(order, key=lambda name: order[name])

    def __getitem__(self, name: str) -> StatisticsSeries:
        """The statistics of a site, as `rows` and `table` name it; of a module's output by its own name.

        Raises:
            FlexError: nothing has that name.
        """
        name = self._named(name)
        rows = [rows[name] for rows in self._rows.values() if name in rows]
        columns: dict[str, list[Any]] = {n: [getattr(row, n) for row in rows] for n in INTEGER_COLUMNS}
        columns |= {n: [_replace_none(getattr(row, n)) for row in rows] for n in FLOAT_COLUMNS}
        columns["histogram"] = [_expand_histogram(row).histogram for row in rows]
        columns["iterations"] = columns["iteration"]
        wanted = [f.name for f in fields(StatisticsSeries) if f.name != "site"]
        return StatisticsSeries(name, **{n: columns[n] for n in wanted})

    def rows(self) -> Iterator[TensorStatistics]:
        """All rows, by iteration, each in model order."""
        for rows in self._rows.values():
            for row in sorted(rows.values(), key=lambda row: row.order):
                yield _expand_histogram(row)

    def table(self) -> dict[str, list[Any]]:
        """All rows as columns, for `pandas.DataFrame(...)` and the like; None where there is no number."""
        rows = list(self.rows())
        return {name: [getattr(row, name) for row in rows] for name in FILE_COLUMNS}

    def pandas(self) -> Any:
        """All rows as a DataFrame.

        Raises:
            FlexError: pandas is not installed.
        """
        try:
            frame = import_module("pandas").DataFrame
        except ImportError as error:
            raise FlexError("pandas is not installed: pip install pandas, or use table()") from error
        return frame(self.table())

    def _named(self, name: str) -> str:
        known = self.sites
        if name in known:
            return name
        module, grad = name.removesuffix(GRADIENT_SUFFIX), GRADIENT_SUFFIX if name.endswith(GRADIENT_SUFFIX) else ""
        points = [n for n in known if n.endswith(GRADIENT_SUFFIX) == bool(grad) and n.partition(":")[0] == module]
        chosen = f"{module}:output{grad}"
        if chosen in points or len(points) == 1:
            return chosen if chosen in points else points[0]
        if points:
            raise FlexError(
                f"{name!r} was measured at several points ({', '.join(points)}); name one of them"
            )
        raise FlexError(f"{self.path} has no {name!r}{suggest_nearest(name, known)}")

    @property
    def by_iteration(self) -> RowsByIteration:
        """The rows by iteration and name; histograms are as in the file, without empty bins at their ends."""
        return self._rows

    def _repr_html_(self) -> str:
        from megatron_flex.statistics.notebook import render_statistics  # which needs this file

        return render_statistics(self)

    def __repr__(self) -> str:
        return f"OpenStatistics({self.path}: {len(self.sites)} tensors, {len(self._rows)} iterations)"


def _is_wanted(name: str, words: Sequence[str] | None) -> bool:
    """Whether a name is meant; `decoder.layers.*` means outputs, as it does where sites are named."""
    if words is None:
        return True
    short = name.replace(":output", "", 1)
    return any(fnmatchcase(name, word) or fnmatchcase(short, word) for word in words)


def _replace_none(value: float | None) -> float:
    return math.nan if value is None else value


def _expand_histogram(row: TensorStatistics) -> TensorStatistics:
    """A row whose histogram has all its bins."""
    if not row.histogram:
        return row
    first, *counts = row.histogram
    return replace(row, histogram=(0,) * first + tuple(counts) + (0,) * (HISTOGRAM_BINS - first - len(counts)))


# -- files ---------------------------------------------------------------------------------------------


def _read_files(path: Path, wanted: NameFilter) -> tuple[list[StatisticsHeader], RowsByIteration, int]:
    """The headers, rows and number of torn lines of a folder or file."""
    headers: list[StatisticsHeader] = []
    out: RowsByIteration = {}
    torn = 0
    try:
        one = FILE_NAME.fullmatch(path.name) is not None
        files = [path] if one else [file for _, file in list_files(path)]
        if not files:
            raise FlexError(f"{path}: no statistics: neither statistics-0000.jsonl nor .parquet is in it")
        parts = [p for f in files for p in (sorted(f.glob("part-*")) if f.is_dir() else [f])]
        with progress("reading statistics", sum(p.stat().st_size for p in parts), BYTES) as bar:
            for file in files:
                read = _read_parquet if file.suffix == ".parquet" else _read_json_lines
                header, rows, bad = read(file, wanted, bar)
                headers += [] if header is None else [header]
                out |= rows
                torn += bad
    except OSError as error:
        raise FlexError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    return headers, out, torn


def _parse_file_header(path: Path, text: bytes) -> StatisticsHeader | None:
    """The header; None where it is torn."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    try:
        return StatisticsHeader.from_json(record)
    except (ValueError, KeyError, TypeError) as error:
        raise FlexError(f"{path}: no statistics, or damaged ones: {error}") from error


def _read_json_lines(path: Path, wanted: NameFilter, bar: ProgressBar) -> tuple[StatisticsHeader | None, RowsByIteration, int]:
    out: RowsByIteration = {}
    torn = 0
    with path.open("rb") as file:
        first = file.readline()
        header = _parse_file_header(path, first) if first.endswith(b"\n") else None
        if header is None:
            return None, out, 1
        for line in file:
            bar.advance(len(line))
            row = _parse_line(line) if line.endswith(b"\n") else None
            if row is None:
                torn += 1
            elif wanted(row.site):
                out.setdefault(row.iteration, {})[row.site] = row
    return header, out, torn


def _parse_line(line: bytes) -> TensorStatistics | None:
    try:
        return _parse_row(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _read_parquet(path: Path, wanted: NameFilter, bar: ProgressBar) -> tuple[StatisticsHeader | None, RowsByIteration, int]:
    try:
        read = import_module("pyarrow.parquet").read_table
    except ImportError as error:
        raise FlexError(f"{path}: pyarrow reads it, and is not installed: pip install pyarrow") from error
    file = path / HEADER_NAME
    header = _parse_file_header(path, file.read_bytes()) if file.exists() else None
    out: RowsByIteration = {}
    torn = 0 if header is not None else 1
    for part in sorted(path.glob("part-*.parquet")):
        bar.advance(part.stat().st_size)
        try:
            rows = [_parse_row({**record, "histogram": _compress_histogram(record)}) for record in read(part).to_pylist()]
        except (ValueError, KeyError, TypeError, OSError):  # what pyarrow raises of a damaged file, and ours
            torn += 1
            continue
        for row in rows:
            if wanted(row.site):
                out.setdefault(row.iteration, {})[row.site] = row
    return header, out, torn


def _compress_histogram(record: dict[str, Any]) -> list[int] | None:
    """A histogram as JSON lines have it: the number of the first bin that is not empty, and the counts."""
    counts = record["histogram"]
    known = [n for n, count in enumerate(counts) if count]
    return ([known[0], *counts[known[0] : known[-1] + 1]] if known else []) if counts else None


def _parse_row(record: dict[str, Any]) -> TensorStatistics:
    """A row of plain values.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    integers = [record[name] for name in INTEGER_COLUMNS]
    numbers = [record[name] for name in FLOAT_COLUMNS]
    bins = record["histogram"]
    counts = (() if bins is None else (0,)) if not bins else tuple(bins)
    if any(type(n) is not int for n in (*integers, *counts)) or record["kind"] not in STATISTICS_KINDS:
        raise ValueError("no row")
    if any(n is not None and type(n) not in (int, float) for n in numbers):
        raise ValueError("no row")
    if counts and not 0 <= counts[0] <= HISTOGRAM_BINS - (len(counts) - 1):
        raise ValueError("no histogram")
    plain = {name: record[name] for name in (*INTEGER_COLUMNS, *FLOAT_COLUMNS)}
    return TensorStatistics(site=str(record["site"]), kind=record["kind"], histogram=counts, **plain)
