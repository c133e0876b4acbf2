"""Statistics of two runs, or a dump and statistics: the first tensor whose numbers differ beyond round-off.

Statistics have no entries to align. What they can show is a factor (norm, std), an offset (mean), an outlier
(absmax), zeros, NaNs, and another distribution (the histogram).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import torch

from megatron_flex.compare.block_sums import split_into_blocks
from megatron_flex.compare.compared_dump import ComparedDump, ComparedTensor
from megatron_flex.compare.comparison import Comparison, Row
from megatron_flex.compare.overflow import GRADIENT_KINDS, suggest_remedy
from megatron_flex.compare.structural_tests import Outcome
from megatron_flex.compare.tolerance import (
    DERIVED_MARGIN,
    FP32_ROUNDOFF,
    MAX_TOLERANCE,
    ReductionDepths,
    get_unit_roundoff,
    read_precision,
)
from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE
from megatron_flex.dump.run_folders import has_runs
from megatron_flex.errors import DumpError, list_some
from megatron_flex.gpt_names import GptNames
from megatron_flex.mesh import describe_sizes
from megatron_flex.progress import track
from megatron_flex.ranges import Span, normalize_path, select_present
from megatron_flex.sites import GRADIENT_SUFFIX
from megatron_flex.statistics.moments import MomentSums, make_statistics
from megatron_flex.statistics.statistics_files import has_statistics
from megatron_flex.statistics.statistics_reader import OpenStatistics, expand_histogram, open_statistics
from megatron_flex.statistics.statistics_records import StatisticsKind, TensorStatistics
from megatron_flex.wording import count_words

GROWTH = 4.0  # from what the statistics so far differ by to the next tensor's; correct pairs reach 2
POOLED_POWER, MIN_POOLED = (
    0.25,
    1.0,
)  # a sum of n entries has derived / n^(1/4) of round-off; they reach 0.17
ZERO_SHARE = 0.02  # of entries that round-off may turn into zeros or from them
HISTOGRAM_SHARE = 3.0  # entries that cross a power of two, over the relative difference
KINDS: dict[str, StatisticsKind] = {
    VALUE: "value",
    GRADIENT: "gradient",
    PARAMETER_GRADIENT: "parameter_gradient",
}
ASSUMED_DTYPE = torch.bfloat16  # of statistics whose header has none


def find_statistics(source: object) -> OpenStatistics | None:
    """The statistics that an argument of `compare` is, or is the folder or file of; None for a dump."""
    if isinstance(source, OpenStatistics):
        return source
    if not isinstance(source, (str, PathLike)):
        return None
    path = Path(normalize_path("path", source))
    return open_statistics(path) if has_statistics(path) and not has_runs(path) else None


class StatisticsFiles:
    """Statistics that a run wrote.

    Args:
        statistics: the result of `open_statistics`.
        label: `A` or `B`.
    """

    def __init__(self, statistics: OpenStatistics, label: str) -> None:
        self.statistics, self.label = statistics, label
        self.iterations: Sequence[int] = statistics.iterations
        self.names: Sequence[str] = _sort_by_execution(statistics)
        self._stored_names: dict[str, str] = {}  # the names in the files, where others are used here

    @property
    def gpt_names(self) -> GptNames:
        """The correspondence of the names in the files and a GPTModel's."""
        return self.statistics.gpt_names

    def use_gpt_names(self) -> None:
        """Name tensors as a GPTModel with the same weights does; what such a model has not is left out."""
        gpt, names = self.gpt_names, _sort_by_execution(self.statistics)
        self._stored_names = {
            gpt_name: stored_name
            for stored_name in names
            if (gpt_name := gpt.to_gpt(stored_name)) is not None
        }
        self.names = list(self._stored_names)

    def describe(self) -> str:
        """The folder, the mesh and the number of iterations."""
        axes = {} if not self.statistics.headers else self.statistics.headers[-1].axes
        mesh = describe_sizes(axes)
        return (
            f"{self.statistics.path} ({mesh}, {count_words(len(self.iterations), 'iteration')} of statistics)"
        )

    def row(self, name: str, iteration: int) -> TensorStatistics | None:
        """The statistics of one tensor."""
        row = self.statistics.by_iteration.get(iteration, {}).get(self._stored_names.get(name, name))
        return None if row is None else expand_histogram(replace(row, site=name))

    def precision(self) -> tuple[torch.dtype | None, int]:
        """From the header."""
        model: Mapping[str, object] = {}
        if self.statistics.headers:
            known = self.statistics.headers[-1].settings.get("model")
            model = known if isinstance(known, Mapping) else {}
        dtype = getattr(torch, str(model.get("dtype") or "none"), None)
        width = model.get("hidden_size")
        return (dtype if isinstance(dtype, torch.dtype) else None), width if isinstance(width, int) else 0


class StatisticsOfDump:
    """The statistics of a dump's tensors, computed when they are asked for, block by block.

    Args:
        dump: the dump.
        most: bytes of one block in fp64.
    """

    def __init__(self, dump: ComparedDump, most: int) -> None:
        self.dump, self.label, self.most = dump, dump.label, most
        self.iterations: Sequence[int] = dump.iterations
        self._items: dict[str, list[ComparedTensor]] = {}
        for item in dump.items():
            if item.kind != PARAMETER:
                name = ComparedTensor(item.site, item.kind).name
                self._items.setdefault(name, []).append(item)
        self.names: Sequence[str] = list(self._items)

    def describe(self) -> str:
        return self.dump.describe()

    def precision(self) -> tuple[torch.dtype | None, int]:
        """From the manifest."""
        precision = read_precision(self.dump.manifest, [self.dump.array(i).dtype for i in self.dump.items()])
        return precision.computed or torch.float32, precision.width

    def row(self, name: str, iteration: int) -> TensorStatistics | None:
        """The statistics of all calls of a tensor."""
        sums, microbatches, items = MomentSums(), 0, self._items.get(name, [])
        for item in items:
            array = self.dump.array(item)
            if iteration not in array.iterations:
                return None
            of_iteration = array.at(iteration)
            pieces = [piece.array for piece in of_iteration.microbatch_arrays()]
            microbatches += len(pieces)
            if of_iteration.packed:  # the padding of a pack is not counted
                pieces = [each.array for each in of_iteration.sequence_arrays()]
            for piece in pieces:
                for block in split_into_blocks(piece.shape, self.most):
                    sums.add(piece[block].torch())
        kind = KINDS.get(items[0].kind) if items else None
        return None if kind is None else make_statistics(name, kind, iteration, sums, microbatches)


def _sort_by_execution(opened: OpenStatistics) -> list[str]:
    """Values forward, gradients backward, gradients of parameters."""
    kinds: dict[str, str] = {}
    for rows in opened.by_iteration.values():
        kinds |= {name: row.kind for name, row in rows.items()}
    order = {kind: [n for n in opened.sites if kinds[n] == kind] for kind in set(kinds.values())}
    return [
        *order.get(VALUE, []),
        *reversed(order.get(GRADIENT, [])),
        *reversed(order.get(PARAMETER_GRADIENT, [])),
    ]


@dataclass
class StatisticsTester:
    """Tests the statistics of tensors, in the order in which these were computed.

    Args:
        depths: reductions before each tensor.
        unit: the unit roundoff of the less precise run.
        half: whether a run computes in fp16, whose loss scale may overflow gradients.
    """

    depths: ReductionDepths
    unit: float
    half: bool = False
    noise: float = 0.0

    def test(self, a: TensorStatistics, b: TensorStatistics, steps: int) -> tuple[Outcome, float]:
        """The test that exceeds its bound by most, and the smallest factor that would be detected.

        Args:
            a: of the first side.
            b: of the second.
            steps: earlier optimizer steps, in which parameters may have come apart.
        """
        site = a.site.removesuffix(GRADIENT_SUFFIX)
        depth = self.depths.depth_of(ComparedTensor(site, a.kind))
        derived = min(DERIVED_MARGIN * self.unit * math.sqrt(depth) * (1 + steps), MAX_TOLERANCE)
        pooled = derived * min(1.0, MIN_POOLED * max(a.count, 1) ** -POOLED_POWER)
        bound = max(min(GROWTH * self.noise, derived), pooled)
        if self.count_not_finite(a, b) == a.count:
            return Outcome("norm of statistics", 0.0, bound), math.inf
        outcomes = list(self._list_outcomes(a, b, derived, bound))
        worst = max(outcomes, key=lambda o: o.excess)
        if worst.excess <= 1:
            worst = outcomes[0]
            self.noise = max(self.noise, outcomes[0].statistic)
        return worst, bound

    def count_not_finite(self, a: TensorStatistics, b: TensorStatistics) -> int:
        """The entries that are not evidence; all entries of gradients that overflowed in both runs."""
        broken = a.nans + a.infinities, b.nans + b.infinities
        overflowed = self.half and a.kind in GRADIENT_KINDS and all(broken)
        return a.count if overflowed else min(max(broken), a.count) if all(broken) else 0

    def _list_outcomes(
        self, a: TensorStatistics, b: TensorStatistics, derived: float, bound: float
    ) -> Iterator[Outcome]:
        norms = a.norm or 0.0, b.norm or 0.0
        ratio = norms[1] / norms[0] if norms[0] else (1.0 if not norms[1] else math.inf)
        yield Outcome("norm of statistics", abs(ratio - 1), bound, f"the norm of B is {ratio:.6g} times A's")
        # The mean and the std on the scale of the values: a mean near zero has none of its own.
        scale = max(a.rms or 0.0, b.rms or 0.0)
        if scale:
            shift = ((b.mean or 0.0) - (a.mean or 0.0)) / scale
            yield Outcome("mean", abs(shift), bound, f"the mean of B is {shift:+.3g} rms from A's")
            spread = abs((b.std or 0.0) - (a.std or 0.0)) / scale
            yield Outcome("std", spread, bound, f"std is {a.std:.6g} in A and {b.std:.6g} in B")
        peak = max(a.absmax or 0.0, b.absmax or 0.0)
        if peak:
            gap = abs((b.absmax or 0.0) - (a.absmax or 0.0)) / peak
            # The bound of sums would be too small: the round-off of one entry does not average out.
            yield Outcome("absmax", gap, derived, f"absmax is {a.absmax:.6g} in A and {b.absmax:.6g} in B")
        zeros = abs((b.zeros or 0.0) - (a.zeros or 0.0))
        text = f"{a.zeros or 0.0:.1%} of A and {b.zeros or 0.0:.1%} of B are zero"
        yield Outcome("zeros", zeros, ZERO_SHARE, text)
        broken = abs(a.nans - b.nans) + abs(a.infinities - b.infinities)
        yield Outcome("NaN", float(broken), 0.0, f"{b.nans + b.infinities} entries of B are NaN or infinite")
        if a.histogram and b.histogram:
            moved = _compare_histograms(a, b)
            most = max(HISTOGRAM_SHARE * derived, ZERO_SHARE)
            yield Outcome("histogram", moved, most, f"{moved:.1%} of the entries have another magnitude")


def _compare_histograms(a: TensorStatistics, b: TensorStatistics) -> float:
    """The greatest difference of the two distributions (Kolmogorov and Smirnov's statistic)."""
    gaps, sum_a, sum_b = [0.0], 0, 0
    for left, right in zip(a.histogram, b.histogram, strict=True):
        sum_a, sum_b = sum_a + left, sum_b + right
        gaps.append(abs(sum_a / max(a.count, 1) - sum_b / max(b.count, 1)))
    return max(gaps)


def compare_statistics(
    a: StatisticsFiles | StatisticsOfDump,
    b: StatisticsFiles | StatisticsOfDump,
    *,
    allow_missing: bool = False,
    only: Sequence[Span] | None = None,
) -> Comparison:
    """Compare the statistics of two runs, or of a dump and a run.

    Args:
        a: the first side.
        b: the second side.
        allow_missing: whether tensors or iterations may be in only one of them.
        only: the iterations to compare; None for all that both have.

    Raises:
        DumpError: they have nothing in common.
        FlexError: they have not all of `only`.
    """
    missing, notes = _list_missing(a, b), []
    common = [n for n in a.names if n in set(b.names)]
    both = sorted(set(a.iterations) & set(b.iterations))
    if not common or not both:
        raise DumpError(f"{a.describe()} and {b.describe()} have no tensor and iteration in common")
    chosen = both if only is None else select_present(only, both, f"both {a.describe()} and {b.describe()}")
    known = [s.precision() for s in (a, b)]
    if any(dtype is None for dtype, _ in known):
        notes.append("the dtype of a run is not recorded; bf16 is assumed for its round-off")
    unit = max(
        get_unit_roundoff(dtype or ASSUMED_DTYPE) + FP32_ROUNDOFF * math.sqrt(width or 4096)
        for dtype, width in known
    )
    half = any(dtype == torch.float16 for dtype, _ in known)
    values = [n for n in common if not n.endswith(GRADIENT_SUFFIX)]
    rows: list[Row] = []
    for iteration in track(chosen, "comparing", unit="iterations"):
        tester = StatisticsTester(ReductionDepths(values), unit, half)
        for name in common:
            row_a, row_b = a.row(name, iteration), b.row(name, iteration)
            if row_a is None or row_b is None:
                missing.append(f"iteration {iteration} of {name} is in one of them only")
            elif row_a.count != row_b.count:
                missing.append(
                    f"not compared: {name}, iteration {iteration}: {row_a.count:,} entries in A and "
                    f"{row_b.count:,} in B"
                )
            else:
                tested = tester.test(row_a, row_b, iteration)
                rows.append(_make_row(row_a, row_b, *tested, tester.count_not_finite(row_a, row_b)))
    if not rows:
        raise DumpError(f"{a.describe()} and {b.describe()} have nothing in common: {'; '.join(missing)}")
    return Comparison(
        a.describe(),
        b.describe(),
        tuple(rows),
        (),
        tuple(_explain(rows)),
        (*missing, *notes),
        tuple(missing),
        allow_missing,
        remedy=suggest_remedy(rows, half),
    )


def _list_missing(a: StatisticsFiles | StatisticsOfDump, b: StatisticsFiles | StatisticsOfDump) -> list[str]:
    out = []
    for source, other in ((a, b), (b, a)):
        names = [n for n in source.names if n not in set(other.names)]
        out += [f"only in {source.label}: {list_some(names)}"] * bool(names)
        numbers = sorted(set(source.iterations) - set(other.iterations))
        out += [f"iterations only in {source.label}: {list_some(numbers)}"] * bool(numbers)
    return out


def _make_row(a: TensorStatistics, b: TensorStatistics, worst: Outcome, floor: float, not_finite: int) -> Row:
    norms = a.norm or 0.0, b.norm or 0.0
    relative = abs(norms[1] - norms[0]) / max(norms) if max(norms) else 0.0
    same = (a.norm, a.mean, a.absmax, a.zeros, a.nans) == (b.norm, b.mean, b.absmax, b.zeros, b.nans)
    return Row(
        a.site,
        a.kind,
        a.iteration,
        a.count,
        relative,
        math.nan,
        abs((a.absmax or 0.0) - (b.absmax or 0.0)),
        worst.statistic,
        worst.bound,
        same and worst.statistic == 0,
        None,
        worst.test,
        worst.evidence,
        floor,
        floor,
        not_finite,
    )


def _explain(rows: Sequence[Row]) -> Iterator[str]:
    first = next((r for r in rows if r.diverges), None)
    if first is not None and first.evidence:
        yield first.evidence
