"""`open_statistics`: read the statistics of all starts of a run, by hook point and iteration."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from megatron_flex.checksums import is_sealed
from megatron_flex.document import Document, Note, Renderable, Row, Table, shorten_notes
from megatron_flex.errors import FlexError, FlexWarning, list_some, suggest_nearest
from megatron_flex.gpt_names import GptNames, layer_pattern
from megatron_flex.progress import BYTES, ProgressBar, progress
from megatron_flex.ranges import describe_numbers, normalize_path
from megatron_flex.sites import find_recorded_names
from megatron_flex.statistics.statistics_files import (
    FILE_COLUMNS,
    FILE_NAME,
    INTEGER_COLUMNS,
    list_files,
)
from megatron_flex.statistics.statistics_records import (
    BINS_PER_SIGN,
    StatisticsHeader,
    StatisticsKind,
    TensorStatistics,
)
from megatron_flex.wording import count_words

HISTOGRAM_BINS = 2 * BINS_PER_SIGN + 1
STATISTICS_KINDS = get_args(StatisticsKind)
TEXT_COLUMNS = ("site", "kind", "histogram")
MAX_NAMED = 3  # lines and files that a warning names
FLOAT_COLUMNS = tuple(name for name in FILE_COLUMNS if name not in (*INTEGER_COLUMNS, *TEXT_COLUMNS))
NameFilter = Callable[[str], bool]
RowsByIteration = dict[
    int, dict[str, TensorStatistics]
]  # by iteration and name; histograms are as in the file


def open_statistics(path: str | PathLike[str], sites: Sequence[str] | str | None = None) -> OpenStatistics:
    """Read the statistics of a run; no process group, framework or GPU is needed. The run may be in progress.

    Data whose checksum is wrong are left out, with a warning that names them.

    Args:
        path: the folder that was passed to `Statistics`; or one file in this folder.
        sites: names or patterns of the tensors to read; `*` is any text. None reads all.

    Returns:
        The statistics: a mapping of names to the statistics of a tensor, iteration by iteration.

    Raises:
        FlexError: there are no statistics, or they need another version of this package.

    Examples:
        >>> [round(rms, 3) for rms in open_statistics("stats/run")["decoder.layers.3"].rms]
        [1.514, 1.514]
    """
    folder = Path(normalize_path("path", path))
    words = [sites] if isinstance(sites, str) else sites
    read = _read_files(folder, lambda name: _is_wanted(name, words))
    opened = OpenStatistics(folder, read.headers, read.rows, read.incomplete, read.damaged, read.replaced)
    if words and not opened.sites:
        known = [p.name for h in opened.headers for p in h.sites]
        raise FlexError(f"{folder}: no hook point matches {words[0]!r}{suggest_nearest(words[0], known)}")
    if opened.damaged:
        damaged = list_some(opened.damaged, MAX_NAMED, "; ")
        warnings.warn(f"{folder}: damaged, and left out: {damaged}", FlexWarning, stacklevel=2)
    return opened


SHOWN_COLUMNS = ("mean", "std", "rms", "absmax", "zeros", "nans", "infinities")  # of a printed series
MAX_SHOWN_ROWS = 20


@dataclass(frozen=True, slots=True)
class StatisticsSeries(Renderable):
    """The statistics of one tensor over iterations: lists of equal lengths; NaN for missing numbers.

    Attributes:
        site: the name of the tensor.
        iterations: the numbers of the iterations.
        histogram: for each iteration the counts of all bins (`compute_bin_edges`); empty without
            histograms.

    The other attributes are those of `TensorStatistics`.
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

    def to_document(self) -> Document:
        """Return the first and the last iterations, a row for each."""
        columns = [getattr(self, name) for name in SHOWN_COLUMNS]
        rows = [
            Row((str(iteration), *(f"{column[n]:.4g}" for column in columns)))
            for n, iteration in enumerate(self.iterations)
        ]
        if len(rows) > MAX_SHOWN_ROWS:
            half = MAX_SHOWN_ROWS // 2
            rows[half:-half] = [Row((f"... {len(rows) - MAX_SHOWN_ROWS:,} more",))]
        heads = (">iteration", *(f">{name}" for name in SHOWN_COLUMNS))
        return Document("StatisticsSeries", [Table(heads, rows, title=self.site)])


class OpenStatistics(Renderable):
    """The statistics of a run.

    If several starts of a run have an iteration, as after a rollback to a checkpoint, the last start that has
    completed it is used, as for dumps; `replaced` names such iterations.

    Args:
        path: the file or folder.
        headers: the header of each start, in order.
        rows: the rows of each iteration.
        incomplete: the number of incomplete lines and files.
        damaged: a description of each of these whose checksum is wrong.
        replaced: the iterations of a start that are read from a later one, a line for each start.

    Attributes:
        path: the file or folder.
        headers: the header of each start, in order.
        incomplete: the number of incomplete lines and files (killed runs, full disks), which are left out.
        damaged: a description of each of these whose checksum is wrong.
        replaced: the iterations of a start that are read from a later one, a line for each start.

    Examples:
        >>> statistics = open_statistics("stats/run")
        >>> statistics
        OpenStatistics(stats/run: 8 tensors, 2 iterations)
        >>> [round(rms, 3) for rms in statistics["decoder.layers.3"].rms]
        [1.514, 1.514]
    """

    def __init__(
        self,
        path: Path,
        headers: list[StatisticsHeader],
        rows: RowsByIteration,
        incomplete: int,
        damaged: Sequence[str] = (),
        replaced: Sequence[str] = (),
    ) -> None:
        self.path, self.headers, self.incomplete, self.damaged = path, headers, incomplete, list(damaged)
        self.replaced = list(replaced)
        self._rows = {number: rows[number] for number in sorted(rows)}

    @property
    def iterations(self) -> list[int]:
        """The iterations that have statistics, ascending."""
        return list(self._rows)

    @property
    def sites(self) -> list[str]:
        """The names of the measured tensors, in model order, each followed by its gradient."""
        order: dict[str, int] = {}
        for rows in self._rows.values():
            order |= {name: row.order for name, row in rows.items()}
        return sorted(order, key=lambda name: order[name])

    def __getitem__(self, name: str) -> StatisticsSeries:
        """Return the statistics of a tensor, by its name in `rows` and `table`, or by a module's name.

        A module's name means the module's output.

        Raises:
            FlexError: no tensor has that name.
        """
        name = self._named(name)
        rows = [rows[name] for rows in self._rows.values() if name in rows]
        columns: dict[str, list[Any]] = {n: [getattr(row, n) for row in rows] for n in INTEGER_COLUMNS}
        for column in FLOAT_COLUMNS:
            numbers = (getattr(row, column) for row in rows)
            columns[column] = [math.nan if number is None else number for number in numbers]
        columns["histogram"] = [expand_histogram(row).histogram for row in rows]
        columns["iterations"] = columns["iteration"]
        column_names = [f.name for f in fields(StatisticsSeries) if f.name != "site"]
        return StatisticsSeries(name, **{n: columns[n] for n in column_names})

    def rows(self) -> Iterator[TensorStatistics]:
        """Return all rows, by iteration, each iteration in model order.

        Examples:
            >>> for row in open_statistics("stats/run").rows():
            ...     if row.site == "decoder.layers.3:output":
            ...         print(row.iteration, row.count, row.nans)
            0 2048 0
            1 2048 0
        """
        for rows in self._rows.values():
            for row in sorted(rows.values(), key=lambda row: row.order):
                yield expand_histogram(row)

    def table(self) -> dict[str, list[Any]]:
        """Return all rows as columns, for `pandas.DataFrame(...)`; None for missing numbers.

        Examples:
            >>> table = open_statistics("stats/run").table()
            >>> list(table)
            ['iteration', 'site', 'kind', 'order', 'stage', 'count', 'mean', 'std', 'rms', 'absmax', 'zeros',
             'kurtosis', 'norm', 'nans', 'infinities', 'histogram', 'microbatches']
        """
        rows = list(self.rows())
        return {name: [getattr(row, name) for row in rows] for name in FILE_COLUMNS}

    def pandas(self) -> Any:
        """Return all rows as a DataFrame, which `.to_parquet(path)` writes as Parquet.

        Raises:
            FlexError: pandas is not installed.

        Examples:
            >>> frame = open_statistics("stats/run").pandas()
            >>> frame.groupby("site").rms.max().round(2)["decoder.layers.3:output"]
            np.float64(1.51)
        """
        try:
            frame = import_module("pandas").DataFrame
        except ImportError as error:
            raise FlexError("pandas is not installed: pip install pandas, or use table()") from error
        return frame(self.table())

    def _named(self, name: str) -> str:
        names = find_recorded_names(name, self.sites, str(self.path), self.gpt_names.pattern)
        if not names:
            raise FlexError(f"{self.path} has no {name!r}{suggest_nearest(name, self.sites)}")
        if len(names) > 1:
            raise FlexError(f"{self.path}: {name!r} means {len(names)} tensors; name one, such as {names[0]}")
        return names[0]

    @property
    def gpt_names(self) -> GptNames:
        """The correspondence with the names of a GPTModel."""
        models = [header.settings.get("model") for header in self.headers]
        layers = next((m["layers"] for m in models if isinstance(m, dict) and m.get("layers")), "")
        return GptNames(str(layers) or layer_pattern(self.sites))

    @property
    def by_iteration(self) -> RowsByIteration:
        """The rows by iteration and name; histograms are as in the file, without empty bins at their ends."""
        return self._rows

    def to_document(self) -> Document:
        """Return the last row of each tensor; those with values that are not finite are first, and marked."""
        last = {name: row for rows in self.by_iteration.values() for name, row in rows.items()}
        rows = sorted(last.values(), key=lambda row: (not _count_nonfinite(row), row.order))
        iterations = self.iterations
        ends = f" ({iterations[0]} to {iterations[-1]})" if iterations else ""
        head = (
            f"{count_words(len(self.headers), 'start')} of the run, {count_words(len(rows), 'tensor')}, "
            f"{count_words(len(iterations), 'iteration')}{ends}"
        )
        incomplete = [f"incomplete lines and files, of killed runs or full disks: {self.incomplete}"]
        damaged = [f"not as it was written: {line}" for line in self.damaged]
        return Document(
            f"OpenStatistics · {self.path}",
            [
                Note(head),
                *shorten_notes(incomplete if self.incomplete else [], "note", MAX_DAMAGED, ""),
                *shorten_notes(damaged, "note", MAX_DAMAGED, "found.damaged lists all"),
                *shorten_notes(self.replaced, "note", MAX_DAMAGED, "found.replaced lists all"),
                Table(
                    STATISTICS_HEADS,
                    [
                        Row(_format_statistics_cells(row), "bad" if _count_nonfinite(row) else "")
                        for row in rows
                    ],
                    rest=SITES_HINT,
                ),
            ],
        )

    def __repr__(self) -> str:
        tensors, iterations = (
            count_words(len(self.sites), "tensor"),
            count_words(len(self._rows), "iteration"),
        )
        return f"OpenStatistics({self.path}: {tensors}, {iterations})"


def _is_wanted(name: str, words: Sequence[str] | None) -> bool:
    """Return whether a name is selected; `decoder.layers.*` selects outputs, as in other patterns."""
    if words is None:
        return True
    short = name.replace(":output", "", 1)
    return any(fnmatchcase(name, word) or fnmatchcase(short, word) for word in words)


def expand_histogram(row: TensorStatistics) -> TensorStatistics:
    """A row whose histogram has all its bins."""
    if not row.histogram:
        return row
    first, *counts = row.histogram
    return replace(
        row, histogram=(0,) * first + tuple(counts) + (0,) * (HISTOGRAM_BINS - first - len(counts))
    )


# -- files ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    """What files have.

    Attributes:
        headers: of each.
        rows: those that are wanted.
        incomplete: the number of incomplete lines and files, which are left out.
        damaged: those of them that are not as they were written, in words.
        torn: the iteration that was being written when the file ended; None if its last line is complete.
        replaced: the iterations of a file that are read from a later one, in words.
    """

    headers: list[StatisticsHeader] = field(default_factory=list)
    rows: RowsByIteration = field(default_factory=dict)
    incomplete: int = 0
    damaged: list[str] = field(default_factory=list)
    torn: int | None = None
    replaced: list[str] = field(default_factory=list)

    def add(self, row: TensorStatistics) -> None:
        """Add a row, which replaces a row of the same iteration and name."""
        self.rows.setdefault(row.iteration, {})[row.site] = row

    def merge(self, name: str, later: _Found, names: dict[int, str]) -> None:
        """Add what a later file has; of an iteration the last file that has it complete is used.

        Args:
            name: of the file.
            later: what it has.
            names: the file that each iteration is read from.
        """
        self.headers += later.headers
        self.incomplete += later.incomplete
        self.damaged += later.damaged
        numbers: dict[str, list[int]] = {}
        for number, rows in later.rows.items():
            if number in self.rows:
                if number == later.torn:
                    continue
                numbers.setdefault(names[number], []).append(number)
            self.rows[number], names[number] = rows, name
        for earlier, several in numbers.items():
            self.replaced.append(
                f"{describe_numbers('iteration', several)} of {earlier} are read from {name}"
            )

    def leave_out(self, damage: str = "") -> None:
        """Something is left out."""
        self.incomplete += 1
        self.damaged += [damage] if damage else []


def _read_files(path: Path, is_selected: NameFilter) -> _Found:
    out, names = _Found(), dict[int, str]()
    try:
        is_file = FILE_NAME.fullmatch(path.name) is not None
        files = [path] if is_file else [file for _, file in list_files(path)]
        if not files:
            raise FlexError(f"{path}: no statistics: statistics-0000.jsonl is not in it")
        with progress("reading statistics", sum(f.stat().st_size for f in files), BYTES) as bar:
            for file in files:
                out.merge(file.name, _read_lines(file, is_selected, bar), names)
    except OSError as error:
        raise FlexError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    return out


def _parse_file_header(path: Path, text: bytes) -> StatisticsHeader | None:
    """Parse the header; None if the header is incomplete."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    try:
        header = StatisticsHeader.from_json(record)
    except (ValueError, KeyError, TypeError) as error:
        raise FlexError(f"{path}: not statistics, or damaged ones: {error}") from error
    if not _is_sealed(text):
        raise FlexError(f"{path}: the checksum of its header is wrong: it is damaged, or somebody changed it")
    return header


def _read_lines(path: Path, is_selected: NameFilter, bar: ProgressBar) -> _Found:
    out, latest = _Found(), None
    with path.open("rb") as file:
        first = file.readline()
        header = _parse_file_header(path, first) if first.endswith(b"\n") else None
        if header is None:
            out.leave_out(f"{path.name}, its header" if first.endswith(b"\n") else "")
            return out
        out.headers.append(header)
        for number, line in enumerate(file, 2):
            bar.advance(len(line))
            if not line.endswith(b"\n"):
                out.leave_out()
                out.torn = latest
                continue
            row = _parse_line(line) if _is_sealed(line) else None
            if row is None:
                out.leave_out(f"{path.name}, line {number}")
                continue
            latest = row.iteration
            if is_selected(row.site):
                out.add(row)
    return out


def _is_sealed(line: bytes) -> bool:
    """Whether a line has the right checksum."""
    try:
        return is_sealed(line.removesuffix(b"\n"))
    except ValueError:
        return False


def _parse_line(line: bytes) -> TensorStatistics | None:
    try:
        return _parse_row(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


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


STATISTICS_HEADS = (
    "tensor",
    ">iteration",
    ">rms",
    ">mean",
    ">std",
    ">greatest",
    ">zeros",
    ">kurtosis",
    ">not finite",
)
MAX_DAMAGED = 8  # damaged lines and files, in one picture
SITES_HINT = "found.sites lists the names, found['NAME'] has one over iterations, found.pandas() everything"


def _count_nonfinite(row: TensorStatistics) -> int:
    return row.nans + row.infinities


def _format_statistics_cells(row: TensorStatistics) -> tuple[str, ...]:
    numbers = (row.rms, row.mean, row.std, row.absmax, row.zeros, row.kurtosis)
    texts = ("–" if n is None else f"{n:.4g}" for n in numbers)
    broken = f"{row.nans:,} NaN, {row.infinities:,} infinite" if _count_nonfinite(row) else ""
    return row.site, str(row.iteration), *texts, broken
