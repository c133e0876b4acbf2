"""The table of tests: what each computes of a compared tensor, its bound, and what a greater value proves.

`docs/compare.md` has this table. A tensor diverges if any of its tests exceeds its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_flex.compare.compared_dump import PARAMETER_GRADIENT, VALUE, ComparedTensor
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
    Outcome,
    check_blocks,
    check_factor,
    check_offset,
    check_rows,
    list_entry_blocks,
)

VOCABULARY = ("embedding.", "output_layer.")


@dataclass(frozen=True, slots=True)
class Conditions:
    """The sums of a tensor that differs, and what correct runs differ by there.

    Attributes:
        item: the tensor.
        profile: its sums.
        shards: the shards of both runs.
        unit: the unit roundoff of the less precise run, with that of the sums inside a kernel.
        weights: how far the parameters differ that the tensors so far have read; 1 if that is unknown.
        equal_weights: whether all parameters are known to be equal.
        uneven: whether some tokens or heads may differ by more than others, as near ties of routers and large
            attention scores make them.
        factor: what a constant factor may deviate from 1 by, as parameters that differ scale what reads them.
    """

    item: ComparedTensor
    profile: DifferenceProfile
    shards: Sequence[Block]
    unit: float
    weights: float
    equal_weights: bool
    uneven: bool
    factor: float

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
        check: computes it from sums over many entries; None for tests of the full tensor, whose bounds follow
            from the tensors before.
    """

    __test__ = False  # no test of pytest

    name: str
    statistic: str
    bound: str
    proves: str
    check: Check | None = None


def _check_factor(c: Conditions) -> Outcome | None:
    return check_factor(c.profile, c.unit, c.deviations, c.factor)


def _check_offset(c: Conditions) -> Outcome | None:
    return check_offset(c.profile, c.weights, c.unit)


def _check_rows(c: Conditions) -> Outcome | None:
    if c.item.kind != VALUE or c.uneven or not c.equal_weights:
        return None
    factor = _check_factor(c)
    varied = factor is None or factor.excess <= 1  # otherwise all tokens have the same factor
    return check_rows(c.profile, c.unit) if varied else None


def _check_blocks(c: Conditions) -> Outcome | None:
    # Rows of a vocabulary have a gradient of as many tokens as there are, most of them of none.
    if c.uneven or (c.item.kind == PARAMETER_GRADIENT and c.item.site.startswith(VOCABULARY)):
        return None
    least = GRADIENT_CONTRAST if c.item.kind == PARAMETER_GRADIENT else 0.0
    blocks = [*c.shards, *list_entry_blocks(c.profile)]
    least = least if c.equal_weights else LATE_CONTRAST
    return check_blocks(c.profile, blocks, c.unit, c.equal_weights, least)


TESTS = (
    TensorTest(
        "norm",
        "norm of the difference, over the norm of the tensor; of integers the fraction that differs",
        "the noise of this pair, see below",
        "the tensor differs by more than round-off",
    ),
    TensorTest(
        "peak",
        "greatest difference, over the greatest entry",
        "likewise",
        "an entry differs by more than round-off",
    ),
    TensorTest(
        "tolerance",
        "the greater of the two",
        "the bound that was given for the site",
        "the tensor differs by more than was allowed",
    ),
    TensorTest(
        "copy",
        "whether a tensor that is a copy of an earlier tensor in A is a copy in B; values only",
        "bit for bit",
        "one of the two was computed again, or changed",
    ),
    TensorTest(
        "narrower dtype",
        "values of the tensor, of one shard, or of one rank's partial sums, that bf16, fp16 or fp8 "
        "represents exactly",
        f"{GRID_SHARE:.1%} in one run, at most {GRID_SHARE_OTHER:.0%} in the other",
        "one run rounds to another dtype there",
    ),
    TensorTest(
        "factor",
        "regression of the difference on A, over all entries: B is A times 1 + f",
        f"{FACTOR_DEVIATIONS:.0f} standard errors ({GRADIENT_DEVIATIONS:.0f} for gradients of parameters), "
        f"at least {FACTOR_UNITS:.0f} unit round-offs",
        "a constant factor",
        _check_factor,
    ),
    TensorTest(
        "offset",
        "part of the difference's energy that is one vector, the same for all tokens",
        f"{OFFSET_SHARE:.0%}",
        "a bias, or another offset",
        _check_offset,
    ),
    TensorTest(
        "rows",
        "part of the difference's energy that a separate factor for each token explains; values only, while "
        "parameters are equal",
        f"{ROW_SHARE:.0%}, in at least {ROW_COUNT:.0f} tokens",
        "another epsilon, or a scale of each token",
        _check_rows,
    ),
    TensorTest(
        "block",
        "amplitude of the difference in one block over that of the rest, by medians: the shard of a rank "
        "along an axis; a sample, microbatch, token or head",
        f"{BLOCK_CONTRAST:.0f} for shards, {POSITION_CONTRAST:.0f} along the sequence, {ENTRY_CONTRAST:.0f} "
        "for single entries",
        "the fault is in this block",
        _check_blocks,
    ),
)


def run_pooled_tests(conditions: Conditions) -> Iterator[Outcome]:
    """The outcomes of the tests that pool over entries, in the order of the table."""
    for test in TESTS:
        outcome = None if test.check is None else test.check(conditions)
        if outcome is not None:
            yield outcome
