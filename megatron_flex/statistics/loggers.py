"""The writers of a framework's own training loop: scalars and histograms beside the curves that it draws."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

from megatron_flex.errors import FlexWarning
from megatron_flex.statistics.files import trim_bins
from megatron_flex.statistics.measured import BINS_PER_SIGN, TensorStatistics, compute_bin_edges

LOGGED_STATISTICS = ("mean", "std", "rms", "absmax", "zeros", "kurtosis")
LOGGED_COUNTS = ("nans", "infinities")  # told where there are any
LARGEST_FLOAT = sys.float_info.max  # where the outermost bins end, for writers that want numbers


class FrameworkWriters(Protocol):
    """The writers of this rank."""

    @property
    def tensorboard(self) -> Any:
        """A SummaryWriter, or None."""

    @property
    def wandb(self) -> Any:
        """What has W&B's `log`, or None."""

    @property
    def every(self) -> int:
        """Of how many iterations they get one."""


class FindWriters(Protocol):
    """Tells which writers there are by now."""

    def __call__(self) -> FrameworkWriters | None:
        """Those of this rank; None where there can be none."""


def find_no_writers() -> None:
    """No framework: no writers."""


class FrameworkLoggers:
    """Writes rows to the framework's writers under `flex/SITE/STATISTIC`.

    The number of the step is the iteration's plus one, which is what Megatron's own curves of it have: it
    counts up before it logs, and W&B joins what it logs later to the same step.
    """

    def __init__(self, find: FindWriters) -> None:
        self._find = find
        self._told: set[str] = set()

    @property
    def wanted(self) -> bool:
        """Whether this rank has a writer."""
        found = self._find()
        return found is not None and (found.tensorboard is not None or found.wandb is not None)

    def write(self, iteration: int, rows: Sequence[TensorStatistics]) -> None:
        """Write the rows of an iteration. What a writer raises is a warning, once of each kind."""
        found, step = self._find(), iteration + 1
        if found is None or step % found.every:
            return
        for writer, write in ((found.tensorboard, to_tensorboard), (found.wandb, to_wandb)):
            if writer is not None:
                self._try(write, writer, step, rows)

    def _try(self, write: Callable[[Any, int, Sequence[TensorStatistics]], None], *args: Any) -> None:
        try:
            write(*args)
        except Exception as error:  # a full disk, a service that is away: training goes on whatever it is
            kind = f"{write.__name__} {type(error).__name__}"
            if kind not in self._told:
                self._told.add(kind)
                content = f"statistics cannot be written {write.__name__.replace('_', ' ')}: {error}"
                warnings.warn(f"{content}; training goes on, and their file has them", FlexWarning, stacklevel=4)


def iterate_scalars(rows: Sequence[TensorStatistics]) -> Iterator[tuple[str, float]]:
    """What is drawn, by tag. A gradient's norm is, too; counts of NaNs where there are any."""
    for row in rows:
        names = LOGGED_STATISTICS if row.kind == "value" else (*LOGGED_STATISTICS, "norm")
        for name in (*names, *(n for n in LOGGED_COUNTS if getattr(row, n))):
            value = getattr(row, name)
            if value is not None:
                yield f"flex/{row.site}/{name}", float(value)


def to_tensorboard(writer: Any, step: int, rows: Sequence[TensorStatistics]) -> None:
    """Write to a SummaryWriter: all scalars as one event, as one for each takes twenty times as long."""
    file = getattr(writer, "file_writer", None)
    if file is None:
        for tag, value in iterate_scalars(rows):
            writer.add_scalar(tag, value, step)
    else:
        proto = import_module("tensorboard.compat.proto.summary_pb2").Summary
        values = [proto.Value(tag=tag, simple_value=value) for tag, value in iterate_scalars(rows)]
        file.add_summary(proto(value=values), step)
    limits = _compute_finite_edges()
    for row in rows:
        first, counts = trim_bins(row.histogram)
        finite = row.count - row.nans - row.infinities
        if counts and row.absmax is not None and row.mean is not None and row.norm is not None:
            writer.add_histogram_raw(
                f"flex/{row.site}",
                min=max(-row.absmax, limits[first]),
                max=min(row.absmax, limits[first + len(counts)]),
                num=finite,
                sum=row.mean * finite,
                sum_squares=row.norm**2,
                bucket_limits=limits[first + 1 : first + 1 + len(counts)],
                bucket_counts=list(counts),
                global_step=step,
            )


def to_wandb(writer: Any, step: int, rows: Sequence[TensorStatistics]) -> None:
    """Log to W&B: one call, of the step that the framework logs to next."""
    content: dict[str, Any] = dict(iterate_scalars(rows))
    limits, wandb = _compute_finite_edges(), import_module("wandb")
    for row in rows:
        first, counts = trim_bins(row.histogram)
        if counts:
            bounds = limits[first : first + len(counts) + 1]
            content[f"flex/{row.site}/histogram"] = wandb.Histogram(np_histogram=(list(counts), bounds))
    writer.log(content, step=step)


def _compute_finite_edges() -> list[float]:
    """The bounds of bins as writers want them: numbers that ascend, also where a bin is of zero alone."""
    out = [max(-LARGEST_FLOAT, min(LARGEST_FLOAT, edge)) for edge in compute_bin_edges()]
    out[BINS_PER_SIGN + 1] = sys.float_info.min
    return out
