"""The numbers of all tensors over iterations for the page: measured in one pass over each tensor, and packed.

Pictures are quantised, and of too many some are chosen evenly.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from megatron_flex.dump.reader import DumpArray, NoActivationError
from megatron_flex.errors import DumpError
from megatron_flex.figures.histogram_bins import fold_bins
from megatron_flex.statistics.moments import HEAD_WIDTH, MomentEntry, MomentSums, MomentTable
from megatron_flex.statistics.statistics_records import TensorStatistics

if TYPE_CHECKING:
    from numpy.typing import NDArray


NAN_CODE, POSITIVE_CODE, NEGATIVE_CODE, STEPS = (
    255,
    254,
    253,
    252,
)  # codes of non-finite values, and the highest code
MEASURE_DIGITS = 8  # of a number in the tables: those of fp32
T = TypeVar("T")


def quantise(values: NDArray[Any] | Tensor) -> dict[str, Any]:
    """Values in 8 bits each, row by row: `lo + code * (hi - lo) / 252`; NaN and infinities have own codes.

    Args:
        values: of any shape.

    Returns:
        `lo` and `hi`, the ends of the finite values (0 and 0 of none), and `q`, the codes in base64. A finite
        value comes back within `(hi - lo) / 504`.
    """
    table = torch.as_tensor(values).double()
    good = table.isfinite()
    finite = table[good]
    lo, hi = (float(v) for v in finite.aminmax()) if finite.numel() else (0.0, 0.0)
    scale = STEPS / (hi - lo) if hi > lo and math.isfinite(hi - lo) else 0.0
    codes = ((table - lo) * scale).round().where(good, torch.zeros_like(table)).clamp(0, STEPS)
    codes[table.isnan()] = NAN_CODE
    codes[table == math.inf] = POSITIVE_CODE
    codes[table == -math.inf] = NEGATIVE_CODE
    return {
        "lo": json_number(lo, 7),  # more digits than the step has are useless
        "hi": json_number(hi, 7),
        "q": b64encode(bytes(codes.to(torch.uint8).flatten().tolist())).decode("ascii"),
    }


def json_number(value: float | None, digits: int = 5) -> float | None:
    """A number for JSON, rounded to so many digits; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def nonfinite_flag(value: float) -> str:
    """A non-finite number as text: `NaN`, `inf`, `-inf`; empty for others."""
    if math.isnan(value):
        return "NaN"
    return "" if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def choose_evenly(several: Sequence[T], most: int) -> list[T]:
    """At most this many of several, evenly spread, with the first and the last; all if there are fewer."""
    if len(several) <= most:
        return list(several)
    if most < 2:
        return [several[-1]][:most]
    return [several[round(i * (len(several) - 1) / (most - 1))] for i in range(most)]


def shrink(values: NDArray[Any], most: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    """Means over blocks of the last two dims, so that at most `most` entries of each remain.

    Returns:
        `[..., rows, columns]`, and the entries of a block; `(1, 1)` where nothing was to be done.
    """
    table = torch.as_tensor(values).float()
    block = ceil(table.shape[-2] / most[0]), ceil(table.shape[-1] / most[1])
    for dim, size in ((-2, block[0]), (-1, block[1])):
        if size > 1:
            table = torch.stack([part.mean(dim) for part in table.split(size, dim)], dim)
    return table, block


def encode_labels(labels: Sequence[int]) -> list[int] | dict[str, int]:
    """Labels of rows or columns: first, step and count where they are evenly spread, else a list."""
    numbers = [int(n) for n in labels]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if numbers and all(b - a == step for a, b in pairwise(numbers)):
        return {"first": numbers[0], "step": step, "count": len(numbers)}
    return numbers


THERE, ABSENT, DAMAGED, NANS, INFINITIES, PARTLY = (
    0,
    1,
    2,
    4,
    8,
    16,
)  # the state of a tensor in an iteration
MAX_SINGLE_SAMPLES = 64  # to try one by one if not all are readable


@dataclass(slots=True)
class TensorCell:
    """A tensor in one iteration.

    Attributes:
        state: THERE, ABSENT or DAMAGED, plus flags.
        statistics: its numbers; None if there are none.
        text: the damage; empty if there is none.
        cut: whether only some of its values were read, because of the limit.
    """

    state: int
    statistics: TensorStatistics | None = None
    text: str = ""
    cut: bool = False


def read_cell(array: DumpArray, iteration: int, most: int, one_by_one: bool = True) -> TensorCell:
    """Read and measure a tensor in one iteration; complex numbers by their magnitudes.

    Args:
        array: over iterations, of a site or parameter.
        iteration: which.
        most: maximum values to read: of the first samples, and of evenly spread rows.
        one_by_one: where not all samples can be read, take those that can; only where the dump checks what it
            reads of a shard by all of it.
    """
    if iteration not in array.iterations:
        return TensorCell(ABSENT)
    sums, read, failed = MomentSums(), 0, ""
    try:
        full = array.at(iteration)[0]
        part = limit_values(full, most)
        for values, trouble in _readable_values(part, one_by_one):
            failed = failed or trouble
            if values is not None:
                values = values.abs() if values.is_complex() else values
                sums.add(values if values.is_floating_point() else values.float())
                read += values.numel()
    except NoActivationError:
        return TensorCell(ABSENT)
    except DumpError as error:
        return TensorCell(DAMAGED, text=str(error))
    if not read:
        return TensorCell(DAMAGED if failed else ABSENT, text=failed)
    measured = measure_sums(array.name, iteration, sums)
    state = (PARTLY if failed else THERE) | nonfinite_state(measured)
    return TensorCell(state, measured, failed, part.shape != full.shape)


def nonfinite_state(measured: TensorStatistics) -> int:
    """Whether there are NaNs and infinities."""
    return (NANS if measured.nans else 0) | (INFINITIES if measured.infinities else 0)


def measure_sums(name: str, iteration: int, sums: MomentSums) -> TensorStatistics:
    """The numbers that follow from sums over at least one value."""
    table = MomentTable((MomentEntry(name, "value", 0),), ranks=1, histogram=True)
    head = [1.0, float(iteration), 1.0, 0.0]
    assert len(head) == HEAD_WIDTH
    (measured,) = table.measured(iteration, table.pack({0: sums}, set(), head, 0), None)
    return measured


def limit_values(array: DumpArray, most: int) -> DumpArray:
    """At most this many values of an array: its first samples; of one sample, tokens evenly spread."""
    if array.size <= most or not array.shape:
        return array
    each = max(1, prod(array.shape[1:]))
    sampled = array.dims[0] in ("sample", "microbatch")
    if not sampled:
        return array[:: max(1, -(-array.shape[0] * each // most))]
    if each <= most or array.ndim < 2:
        return array[: max(1, most // each)]
    return array[:1, :: -(-each // most)]


def _readable_values(array: DumpArray, one_by_one: bool) -> Iterator[tuple[Tensor | None, str]]:
    """The values; if some samples are damaged those of the others, and the damage.

    Raises:
        DumpError: nothing of it can be read.
    """
    try:
        values = [part.torch() for part in array.regular_parts()]
    except DumpError as error:
        sampled = bool(array.dims) and array.dims[0] in ("sample", "microbatch")
        if not (one_by_one and sampled) or not 1 < len(array) <= MAX_SINGLE_SAMPLES:
            raise
        trouble = error
    else:
        yield from ((part, "") for part in values)
        return
    read = 0
    for sample in array:
        try:
            values = [part.torch() for part in sample.regular_parts()]
        except DumpError:
            continue  # the first error is enough
        read += 1
        yield from ((part, str(trouble)) for part in values)
    if not read:
        raise trouble


MEASURES = ("rms", "absmax", "mean", "std", "zeros")
MAX_TROUBLES, MAX_TEXTS = 4000, 300


class TensorTables:
    """Cells by iteration and tensor.

    Args:
        iterations: their numbers.
        names: names of tensors.
    """

    def __init__(self, iterations: Sequence[int], names: Sequence[str]) -> None:
        self.iterations, self.names = list(iterations), list(names)
        self._measures: dict[str, list[list[float | None]]] = {
            m: [[None] * len(names) for _ in iterations] for m in MEASURES
        }
        self._state = [[ABSENT] * len(names) for _ in iterations]
        self._counts: dict[tuple[int, int], Sequence[int]] = {}
        self._histograms: dict[int, dict[str, Any]] = {}
        self._texts: dict[str, int] = {}
        self._troubles: list[tuple[int, int, int]] = []

    def put(self, tensor: int, at: int, cell: TensorCell) -> None:
        """Record a tensor in an iteration."""
        self._state[at][tensor] = cell.state
        if cell.text and len(self._troubles) < MAX_TROUBLES:
            if cell.text not in self._texts and len(self._texts) < MAX_TEXTS:
                self._texts[cell.text] = len(self._texts)
            self._troubles.append((tensor, at, self._texts.get(cell.text, -1)))
        if cell.statistics is not None:
            for name, table in self._measures.items():
                table[at][tensor] = getattr(cell.statistics, name)
            if cell.statistics.histogram:
                self._counts[tensor, at] = cell.statistics.histogram

    def histogram(self, tensor: int, most: int) -> None:
        """Pack the histograms of a tensor, with the bins that are drawn."""
        iterations = sorted(at for t, at in self._counts if t == tensor) if self._counts else []
        chosen = choose_evenly(iterations, most)
        rows = [self._counts[tensor, at] for at in chosen]
        for at in iterations:
            del self._counts[tensor, at]
        if any(map(any, rows)):
            bins = fold_bins(rows)._asdict()
            self._histograms[tensor] = {"at": chosen, **bins}

    def state(self, tensor: int, at: int) -> int:
        """The state of a tensor in an iteration, as `data_reading` has it."""
        return self._state[at][tensor]

    @property
    def texts(self) -> list[str]:
        """The damage, each text once."""
        return list(self._texts)

    def to_json(self) -> dict[str, Any]:
        return {
            "iterations": self.iterations,
            "measures": {
                m: [json_number(v, MEASURE_DIGITS) for row in table for v in row]
                for m, table in self._measures.items()
            },
            "state": [state for row in self._state for state in row],
            "troubles": [list(t) for t in self._troubles],
            "texts": list(self._texts),
            "histograms": {str(t): histogram for t, histogram in self._histograms.items()},
        }
