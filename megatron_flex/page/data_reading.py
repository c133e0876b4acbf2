"""What is measured of a dump's tensors for the page: each read once, and no more of it than is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megatron_flex.dump.reader import DumpArray, NoActivationError
from megatron_flex.errors import DumpError
from megatron_flex.statistics.measured import TensorStatistics
from megatron_flex.statistics.moments import MomentSums
from megatron_flex.statistics.table import HEAD_WIDTH, MomentEntry, MomentTable

THERE, ABSENT, DAMAGED, NANS, INFINITIES, PARTLY = (
    0,
    1,
    2,
    4,
    8,
    16,
)  # what is known of a tensor in an iteration
MAX_SINGLE_SAMPLES = 64  # that are tried one by one where not all can be read


@dataclass(slots=True)
class TensorCell:
    """A tensor in one iteration.

    Attributes:
        state: THERE, ABSENT or DAMAGED, and what else is to be told, added up.
        found: its numbers; None where there are none.
        text: what is wrong with it; empty if nothing is.
        cut: whether some of its values only were read, to read no more than was allowed.
    """

    state: int
    found: TensorStatistics | None = None
    text: str = ""
    cut: bool = False


def read_cell(array: DumpArray, iteration: int, most: int, one_by_one: bool = True) -> TensorCell:
    """Read a tensor in one iteration and measure it.

    Args:
        array: over iterations, of a site or parameter.
        iteration: which.
        most: values that are read: of the first samples, and of rows that are evenly spread.
        one_by_one: where not all samples can be read, take those that can; only where the dump checks what it
            reads of a shard by all of it.
    """
    if iteration not in array.iterations:
        return TensorCell(ABSENT)
    sums, read, failed = MomentSums(), 0, ""
    try:
        one = array.at(iteration)[0]
        part = limit_values(one, most)
        for values, trouble in _readable_values(part, one_by_one):
            failed = failed or trouble
            if values is not None:
                sums.add(values.float() if not values.is_floating_point() else values)
                read += values.numel()
    except NoActivationError:
        return TensorCell(ABSENT)
    except DumpError as error:
        return TensorCell(DAMAGED, text=str(error))
    if not read:
        return TensorCell(DAMAGED if failed else ABSENT, text=failed)
    found = measure_sums(array.name, iteration, sums)
    state = (
        (PARTLY if failed else THERE) | (NANS if found.nans else 0) | (INFINITIES if found.infinities else 0)
    )
    return TensorCell(state, found, failed, part.shape != one.shape)


def nonfinite_state(found: TensorStatistics) -> int:
    """Whether there are NaNs and infinities."""
    return (NANS if found.nans else 0) | (INFINITIES if found.infinities else 0)


def measure_sums(name: str, iteration: int, sums: MomentSums) -> TensorStatistics:
    """The numbers that follow from sums over a tensor's values, which are not none."""
    table = MomentTable((MomentEntry(name, "value", 0),), ranks=1, histogram=True)
    head = [1.0, float(iteration), 1.0]
    assert len(head) == HEAD_WIDTH
    (found,) = table.measured(iteration, table.pack({0: sums}, set(), head, 0), None)
    return found


def limit_values(array: DumpArray, most: int) -> DumpArray:
    """No more than so many values of an array: its first samples; of one, tokens or rows evenly spread."""
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
    """The values; of an array with samples that cannot be read those of the others, and what is wrong.

    Raises:
        DumpError: nothing of it can be read.
    """
    try:
        values = array.torch()
    except DumpError as error:
        sampled = bool(array.dims) and array.dims[0] in ("sample", "microbatch")
        if not (one_by_one and sampled) or not 1 < len(array) <= MAX_SINGLE_SAMPLES:
            raise
        trouble = error
    else:
        yield values, ""
        return
    read = 0
    for sample in array:
        try:
            values = sample.torch()
        except DumpError:
            continue  # the first one's words stand for all of them
        read += 1
        yield values, str(trouble)
    if not read:
        raise trouble
