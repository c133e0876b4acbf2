"""The table of tests: what each computes of a compared tensor, its bound, and what a greater value proves.

`docs/contributing/comparison.md` has this table. A tensor diverges if any of its tests exceeds its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.difference_profile import DifferenceProfile
from megatron_flex.compare.structural_tests import (
    BLOCK_CONTRAST,
    ENTRY_CONTRAST,
    FACTOR_DEVIATIONS,
    FACTOR_UNITS,
    GRADIENT_CONTRAST,
    GRADIENT_DEVIATIONS,
    GRID_SHARE,
    GRID_SHARE_OTHER,
    LATE_CONTRAST,
    OFFSET_SHARE,
    POSITION_CONTRAST,
    ROW_COUNT,
    ROW_SHARE,
    Block,
    Copies,
    Outcome,
    check_blocks,
    check_copy,
    check_factor,
    check_grid,
    check_offset,
    check_partial_sums,
    check_rows,
    list_entry_blocks,
)
from megatron_flex.compare.tensor_pairs import DifferenceSums
from megatron_flex.dump import PARAMETER, PARAMETER_GRADIENT, VALUE

VOCABULARY = ("embedding.", "output_layer.")
REFERENCE_MARGIN = 3.0  # of a pooled statistic over that of the reference run
OVERALL = ("norm", "peak", "tolerance")  # the tests of the tensor as a whole, one of which is always made
PartialSums = Iterable[tuple[str, Iterable[tuple[str, int, Tensor]]]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the difference of a tensor may be as a whole.

    Attributes:
        norm: its norm, over the norm of the tensor.
        peak: its greatest entry, over the greatest entry of the tensor.
        rerouted: its norm over all tokens, where ties of routers reach some of them.
        is_given: whether the caller gave the bound; then nothing else is tested.
    """

    norm: float
    peak: float
    rerouted: float = 0.0
    is_given: bool = False

    def are_exceeded(self, sums: DifferenceSums) -> bool:
        """Whether a difference is greater."""
        return _measure_norm(sums) > self.norm or _measure_peak(sums) > self.peak


@dataclass(frozen=True, slots=True)
class Conditions:
    """The sums of a tensor, and what correct runs differ by there.

    Attributes:
        item: the tensor.
        bounds: of the difference as a whole.
        sums: over the entries that no tie of a router reaches.
        full: over all of them.
        profile: the sums by dim; None where not all entries may differ alike, or one of the runs is zero.
        shards: the shards of both runs.
        unit: the unit roundoff of the less precise run, with that of the sums inside a kernel.
        weights: how far the parameters differ that the tensors so far have read; 1 if that is unknown.
        equal_weights: whether all parameters are known to be equal.
        uneven: whether some tokens or heads may differ by more than others, as near ties of routers and large
            attention scores make them.
        factor: what a constant factor may deviate from 1 by, as parameters that differ scale what reads them.
        copies: the tensors of the iteration so far; None for a tensor whose ranks have parts of a sum.
        rounded_bits: the low bits of the mantissa that the compute dtype leaves zero by itself.
        partial_sums: by run, the parts that the ranks have of a sum.
    """

    item: ComparedTensor
    bounds: Bounds
    sums: DifferenceSums
    full: DifferenceSums
    profile: DifferenceProfile | None = None
    shards: Sequence[Block] = ()
    unit: float = 0.0
    weights: float = 0.0
    equal_weights: bool = True
    uneven: bool = False
    factor: float = 0.0
    copies: Copies | None = None
    rounded_bits: int = 0
    partial_sums: PartialSums = ()

    @property
    def rerouted(self) -> int:
        """The entries of tokens that ties reach, which only a bound of the full tensor holds."""
        return self.full.finite - self.sums.finite

    @property
    def pooled(self) -> DifferenceProfile | None:
        """The sums by dim of a tensor that differs; None for parameters.

        Single entries that an optimizer turned have no standard error.
        """
        return None if self.full.equal or self.item.kind == PARAMETER else self.profile

    @property
    def deviations(self) -> float:
        """The standard errors that a factor may deviate by."""
        return GRADIENT_DEVIATIONS if self.item.kind == PARAMETER_GRADIENT else FACTOR_DEVIATIONS


Check = Callable[[Conditions], "Outcome | None"]


@dataclass(frozen=True, slots=True)
class TensorTest:
    """A test.

    Attributes:
        name: its name, which a row of a comparison has as `test`.
        statistic: what is computed.
        bound: the greatest value of correct runs.
        proves: what a greater value proves.
        check: the test; None where it does not apply.
        is_measured: whether a reference run raises the bound.
    """

    __test__ = False  # no test of pytest

    name: str
    statistic: str
    bound: str
    proves: str
    check: Check
    is_measured: bool = False


def _measure_norm(sums: DifferenceSums) -> float:
    """The relative difference; of integers the fraction that differs; infinite with a NaN in one run."""
    return sums.error if sums.discrete else sums.relative


def _measure_peak(sums: DifferenceSums) -> float:
    return 0.0 if sums.discrete or sums.broken else sums.peak_share


def _check_norm(c: Conditions) -> Outcome | None:
    if c.bounds.is_given:
        return None
    outcome = Outcome("norm", _measure_norm(c.sums), c.bounds.norm)
    if not c.rerouted:
        return outcome
    loose = Outcome("norm", _measure_norm(c.full), max(c.bounds.norm, c.bounds.rerouted))
    return max(outcome, loose, key=lambda o: o.excess) if c.sums.finite else loose


def _check_peak(c: Conditions) -> Outcome | None:
    return None if c.bounds.is_given else Outcome("peak", _measure_peak(c.sums), c.bounds.peak)


def _check_tolerance(c: Conditions) -> Outcome | None:
    return Outcome("tolerance", c.sums.error, c.bounds.norm) if c.bounds.is_given else None


def _check_copy(c: Conditions) -> Outcome | None:
    if c.profile is None or c.copies is None or c.item.kind != VALUE:
        return None
    return check_copy(c.profile, c.item.name, c.copies)


def _check_dtype(c: Conditions) -> Outcome | None:
    profile = c.profile
    if profile is None or c.full.equal:
        return None
    outcome = None if c.full.is_constant else check_grid(profile, c.shards, c.rounded_bits)
    if outcome is None and profile.grids and c.item.kind == VALUE:
        of_partial_sums = (check_partial_sums(profile, run, parts) for run, parts in c.partial_sums)
        outcome = next((o for o in of_partial_sums if o is not None), None)
    return outcome


def _check_factor(c: Conditions) -> Outcome | None:
    return None if c.pooled is None else check_factor(c.pooled, c.unit, c.deviations, c.factor)


def _check_offset(c: Conditions) -> Outcome | None:
    return None if c.pooled is None else check_offset(c.pooled, c.weights, c.unit)


def _check_rows(c: Conditions) -> Outcome | None:
    if c.pooled is None or c.item.kind != VALUE or c.uneven or not c.equal_weights:
        return None
    factor = _check_factor(c)
    varied = factor is None or factor.excess <= 1  # otherwise all tokens have the same factor
    return check_rows(c.pooled, c.unit) if varied else None


def _check_blocks(c: Conditions) -> Outcome | None:
    # Rows of a vocabulary have a gradient of as many tokens as there are, most of them of none.
    of_words = c.item.kind == PARAMETER_GRADIENT and c.item.site.startswith(VOCABULARY)
    if c.pooled is None or c.uneven or of_words:
        return None
    least = GRADIENT_CONTRAST if c.item.kind == PARAMETER_GRADIENT else 0.0
    blocks = [*c.shards, *list_entry_blocks(c.pooled)]
    least = least if c.equal_weights else LATE_CONTRAST
    return check_blocks(c.pooled, blocks, c.unit, c.equal_weights, least)


TESTS = (
    TensorTest(
        "norm",
        "norm of the difference, over the norm of the tensor; of integers the fraction that differs",
        "the noise of this pair, see below",
        "the tensor differs by more than round-off",
        _check_norm,
    ),
    TensorTest(
        "peak",
        "greatest difference, over the greatest entry",
        "likewise",
        "an entry differs by more than round-off",
        _check_peak,
    ),
    TensorTest(
        "tolerance",
        "the greater of the two",
        "the bound that was given for the site",
        "the tensor differs by more than was allowed",
        _check_tolerance,
    ),
    TensorTest(
        "copy",
        "whether a tensor that is a copy of an earlier tensor in A is a copy in B; values only",
        "bit for bit",
        "one of the two was computed again, or changed",
        _check_copy,
    ),
    TensorTest(
        "narrower dtype",
        "values of the tensor, of one shard, or of one rank's partial sums, that bf16, fp16 or fp8 "
        "represents exactly",
        f"{GRID_SHARE:.1%} in one run, at most {GRID_SHARE_OTHER:.0%} in the other",
        "one run rounds to another dtype there",
        _check_dtype,
    ),
    TensorTest(
        "factor",
        "regression of the difference on A, over all entries: B is A times 1 + f",
        f"{FACTOR_DEVIATIONS:.0f} standard errors ({GRADIENT_DEVIATIONS:.0f} for gradients of parameters), "
        f"at least {FACTOR_UNITS:.0f} unit round-offs",
        "a constant factor",
        _check_factor,
        is_measured=True,
    ),
    TensorTest(
        "offset",
        "part of the difference's energy that is one vector, the same for all tokens",
        f"{OFFSET_SHARE:.0%}",
        "a bias, or another offset",
        _check_offset,
        is_measured=True,
    ),
    TensorTest(
        "rows",
        "part of the difference's energy that a separate factor for each token explains; values only, while "
        "parameters are equal",
        f"{ROW_SHARE:.0%}, in at least {ROW_COUNT:.0f} tokens",
        "another epsilon, or a scale of each token",
        _check_rows,
        is_measured=True,
    ),
    TensorTest(
        "block",
        "amplitude of the difference in one block over that of the rest, by medians: the shard of a rank "
        "along an axis; a sample, microbatch, token or head",
        f"{BLOCK_CONTRAST:.0f} for shards, {POSITION_CONTRAST:.0f} along the sequence, {ENTRY_CONTRAST:.0f} "
        "for single entries",
        "the fault is in this block",
        _check_blocks,
        is_measured=True,
    ),
)


def run_tests(conditions: Conditions, reference: DifferenceProfile | None = None) -> Iterator[Outcome]:
    """The outcomes of the tests that apply, in the order of the table.

    Args:
        conditions: of the tensor.
        reference: the sums by dim of a reference run, which differs by noise; None if there is none.
    """
    noisy = None if reference is None else replace(conditions, profile=reference)
    for test in TESTS:
        outcome = test.check(conditions)
        if outcome is None:
            continue
        known = test.check(noisy) if noisy is not None and test.is_measured else None
        if known is not None:
            outcome = replace(outcome, bound=max(outcome.bound, REFERENCE_MARGIN * known.statistic))
        yield outcome
