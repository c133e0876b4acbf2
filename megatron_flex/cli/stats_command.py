"""`megatron-flex stats`: what a run measured while it trained, by site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_flex.cli.command_options import IterationsOption, JsonOption, select_iterations, select_names
from megatron_flex.cli.json_output import print_json
from megatron_flex.document import Document, Note, Row, Span, Table
from megatron_flex.dump.schema import list_dim_names
from megatron_flex.errors import FlexError, suggest_nearest
from megatron_flex.layout.layout_drawing import format_shape
from megatron_flex.mesh import describe_sizes
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.statistics.statistics_reader import (
    FLOAT_COLUMNS,
    OpenStatistics,
    StatisticsSeries,
    open_statistics,
)
from megatron_flex.wording import count_words, format_number, format_series

stats_app = typer.Typer(
    add_completion=False,
    help="List and show the statistics that a run wrote.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
BARS = "▁▂▃▄▅▆▇█"
CURVE_LENGTH = 16  # characters of a curve

StatisticsArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="The folder of the statistics, or one statistics-0000 in it.", show_default=False
    ),
]


@stats_app.command()
def ls(path: StatisticsArgument, as_json: JsonOption = False) -> None:
    """List the starts of the run, and the measured tensors."""
    opened = open_statistics(path)
    if as_json:
        content = {"starts": [h.to_json() for h in opened.headers], "tensors": opened.sites}
        print_json(
            {
                **content,
                "iterations": opened.iterations,
                "incomplete": opened.incomplete,
                "replaced": opened.replaced,
                "damaged": opened.damaged,
            }
        )
        return
    starts = []
    for n, header in enumerate(opened.headers):
        mesh = describe_sizes(header.axes)
        every = str(header.settings.get("every", "–"))
        starts.append(Row((str(n), header.created, header.framework, mesh, every)))
    records = {p.name: p for header in opened.headers for p in header.sites}
    tensors = []
    for name in opened.sites:
        record = records.get(name.removesuffix(GRADIENT_SUFFIX))
        dims = list_dim_names(record.layout) if record is not None else []
        shape = format_shape(dims, record.shape) if record is not None else "–"
        tensors.append(Row((name, shape, format_series(opened[name].iterations))))
    head = (
        f"{path}: {count_words(len(opened.headers), 'start')}, {count_words(len(opened.sites), 'tensor')}, "
        f"iterations {format_series(opened.iterations)}"
    )
    Document(
        "",
        [
            *_list_incomplete(opened),
            Note(head),
            Table((">start", "created", "framework", "mesh", ">every"), starts),
            Table(("tensor", "shape", "iterations"), tensors),
        ],
    ).print()


@stats_app.command()
def show(
    path: StatisticsArgument,
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--site",
            "-s",
            metavar="PATTERN",
            help="Only hook points of this name or pattern; may be repeated.",
            show_default=False,
        ),
    ] = None,
    of: Annotated[
        str, typer.Option("--of", metavar="STATISTIC", help=f"The statistic: {', '.join(FLOAT_COLUMNS)}.")
    ] = "rms",
    iterations: IterationsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one statistic of each hook point over the iterations.

    The table has the first, last, least and greatest value, and a curve. `!` marks NaNs and infinities.
    """
    if of not in FLOAT_COLUMNS:
        raise FlexError(
            f"--of {of}: no statistic{suggest_nearest(of, FLOAT_COLUMNS)}; they are "
            f"{', '.join(FLOAT_COLUMNS)}"
        )
    statistics = open_statistics(path)
    numbers = set(select_iterations(iterations, statistics.iterations, str(path)))
    names = select_names(sites, statistics.sites, str(path), statistics.gpt_names.pattern)
    content = {name: StatisticSummary(statistics[name], of, numbers) for name in names}
    if as_json:
        print_json({name: summary.to_json(of) for name, summary in content.items()})
        return
    odd = any(summary.odd for summary in content.values())
    columns = [f"{of} of", ">first", ">last", ">min", ">max", "curve", *([">nan", ">inf"] if odd else [])]
    rows = []
    for name, summary in content.items():
        ends = map(format_number, (summary.first, summary.last, summary.least, summary.most))
        bad = [(Span(f"{count:,}", "bad"),) for count in (summary.nans, summary.infinities) if summary.odd]
        rows.append(Row((name, *ends, summary.curve(CURVE_LENGTH), *bad)))
    last = f"iterations {format_series(sorted(numbers))}"
    Document("", [*_list_incomplete(statistics), Table(columns, rows), Note(""), Note(last)]).print()


class StatisticSummary:
    """A statistic of one tensor over some iterations.

    Attributes:
        iterations: which they are.
        values: of the statistic; None where there is none. nans, infinities: in all of them.
        odd: whether there were any.
    """

    def __init__(self, series: StatisticsSeries, of: str, iterations: set[int]) -> None:
        at = [n for n, i in enumerate(series.iterations) if i in iterations]
        column: list[float] = getattr(series, of)
        self.iterations = [series.iterations[n] for n in at]
        self.values = [None if math.isnan(column[n]) else column[n] for n in at]
        self._marks = [series.nans[n] + series.infinities[n] > 0 for n in at]
        self.nans, self.infinities = (sum(c[n] for n in at) for c in (series.nans, series.infinities))
        self.odd = any(self._marks)
        numbers = [v for v in self.values if v is not None]
        self.first, self.last = (self.values[0], self.values[-1]) if self.values else (None, None)
        self.least, self.most = min(numbers, default=None), max(numbers, default=None)

    def to_json(self, of: str) -> dict[str, Any]:
        """In plain values."""
        out = {"first": self.first, "last": self.last, "min": self.least, "max": self.most}
        counts = {"nans": self.nans, "infinities": self.infinities}
        return {**out, **counts, "iterations": self.iterations, of: self.values}

    def curve(self, length: int) -> tuple[Span, ...]:
        """The values from the least to the greatest, of several iterations their mean."""
        low, high = self.least or 0.0, self.most or 0.0
        out = []
        for part in _split_range(len(self.values), length):
            values = [v for v in self.values[part] if v is not None]
            if any(self._marks[part]):
                out.append(Span("!", "bad"))
            elif values:
                height = (sum(values) / len(values) - low) / (high - low) if high > low else 0.0
                out.append(Span(BARS[max(0, min(len(BARS) - 1, int(height * len(BARS))))]))
            else:
                out.append(Span(" "))
        return tuple(out)


def _split_range(count: int, most: int) -> Sequence[slice]:
    """So many things in at most so many parts, in order."""
    parts = min(count, most)
    return [slice(n * count // parts, (n + 1) * count // parts) for n in range(parts)]


def _list_incomplete(statistics: OpenStatistics) -> list[Note]:
    notes = [Note(f"note: {line}", "note") for line in statistics.replaced]
    if statistics.incomplete:
        lines = count_words(statistics.incomplete, "incomplete line")
        notes.append(Note(f"note: {lines} left out, of a run that was killed or a full disk", "note"))
    return notes
