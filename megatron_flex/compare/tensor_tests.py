"""Tests one compared tensor after the other: what correct runs differ by there, and the table of tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_flex.compare.block_sums import COMPARE_BLOCK
from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS, ComparedDump, ComparedTensor
from megatron_flex.compare.difference_profile import DifferenceProfile
from megatron_flex.compare.noise_scale import (
    NoiseScale,
    ParameterNoise,
    measure_parameter,
)
from megatron_flex.compare.overflow import OverflowState
from megatron_flex.compare.parameter_drift import DriftBound, ParameterDrift, estimate_unseen_drift
from megatron_flex.compare.routing_ties import ReroutedTokens, RoutingTies, count_ties, get_expert_share
from megatron_flex.compare.shards import list_shard_blocks
from megatron_flex.compare.structural_tests import (
    Copies,
    Outcome,
    bound_factor,
    estimate_factor,
)
from megatron_flex.compare.table_of_tests import OVERALL, Bounds, Conditions, run_tests
from megatron_flex.compare.tensor_pairs import DifferenceSums, PairSums, TensorPair
from megatron_flex.compare.tolerance import (
    MAX_PEAK_TOLERANCE,
    MAX_TOLERANCE,
    MEASURED_MARGIN,
    Tolerances,
    get_unit_roundoff,
)
from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE

LOSS_ROUNDINGS = 4  # of a gradient of the loss that is one constant
REROUTED_GROWTH = 3.0  # from the root of the fraction of tokens with other experts to what these change
EXPERTS = ".experts."
HALF_BITS = {torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True, slots=True)
class TestedTensor:
    """The tests of one tensor.

    Attributes:
        worst: the test that exceeds its bound by most; the one of the norm or the peak where none does.
        outcomes: all of them.
        floor: the smallest relative error that would be a divergence; infinite for a tensor without evidence.
        factor_floor: the smallest deviation of a constant factor from 1 that would be one.
        rerouted: entries of tokens that ties reach, which only the bound of the full tensor holds.
    """

    __test__ = False  # no test of pytest

    worst: Outcome
    outcomes: tuple[Outcome, ...]
    floor: float
    factor_floor: float
    rerouted: int = 0


@dataclass
class TensorTester:
    """Tests tensors in the order in which they were computed.

    Args:
        a: the first dump.
        b: the second dump.
        tolerances: by site.
        drift: of the parameters.
        learning_rate: of the optimizer steps; None if unknown.

    Attributes:
        explained: the tensors whose differences large attention scores explain.
        rerouted: the tokens of the iteration that have other experts in a tie.
    """

    a: ComparedDump
    b: ComparedDump
    tolerances: Tolerances
    drift: ParameterDrift
    learning_rate: float | None = None
    iteration: int = 0
    parameters: bool = False
    explained: list[str] = field(default_factory=list)
    rerouted: ReroutedTokens = field(default_factory=ReroutedTokens)
    noise: NoiseScale = field(init=False)
    overflow: OverflowState = field(init=False)
    _tied_before: bool = False
    _copies: Copies = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._with_gradients = {i.site for i in self.a.items() if i.kind == PARAMETER_GRADIENT}
        self.overflow = OverflowState([p.computed for p in self.tolerances.precisions])

    def begin(self, iteration: int, parameters: bool) -> None:
        """An iteration begins.

        Args:
            iteration: its number.
            parameters: whether its parameters are compared, before what reads them.
        """
        # Ties move a router's bias otherwise, and those of an iteration between are not known.
        self._tied_before |= bool(self.rerouted.fraction) or iteration > self.iteration + 1
        self.iteration, self.parameters = iteration, parameters
        self.noise = NoiseScale(self.tolerances.unit, self.tolerances.fp8)
        self.rerouted = ReroutedTokens()
        self.overflow.begin()
        self._copies.clear()
        self.drift.begin()
        self._assume_drift()

    @property
    def unseen_steps(self) -> int:
        """The optimizer steps that may have moved parameters apart which are not compared."""
        return 0 if self.parameters else self.iteration

    def test(
        self,
        pairs: Sequence[TensorPair],
        sums_of_all: PairSums,
        reference: PairSums | None,
        ties: RoutingTies | None,
    ) -> TestedTensor:
        """Test one tensor.

        Args:
            pairs: the tensor in both runs.
            sums_of_all: its sums.
            reference: the sums of a reference run against the nearer of the two; None if there is none.
            ties: the tokens that were routed otherwise, for what shows them first.
        """
        item, full = pairs[0].item, sums_of_all.sums
        tied = ties is not None and ties.tied_tokens > 0 and not ties.others
        if tied and ties is not None:
            self.rerouted.add(item, ties)
        given = self.tolerances.given(item)
        norm, peak = (given, given) if given is not None else self._bounds(item, sums_of_all, reference)
        bounds = Bounds(norm, peak, self._bound_rerouted(item), given is not None)
        overflowed = self.overflow.is_overflow(
            item, full, (sums_of_all.worst.a.dtype, sums_of_all.worst.b.dtype), peak
        )
        if overflowed:
            full = full.without_overflows()
        exceeded = given is None and bounds.are_exceeded(full)
        if exceeded and reference is None:
            bounds = self._explain_by_scores(item, full, bounds)
            exceeded = bounds.are_exceeded(full)
        sums = self.rerouted.sum_others(pairs) if tied or (exceeded and self.rerouted.fraction) else full
        even = sums.finite == full.finite and not overflowed and not (ties is not None and ties.others)
        conditions = self._conditions(item, sums_of_all, bounds, sums, full, even)
        outcomes = tuple(run_tests(conditions, None if reference is None else reference.profile))
        worst = max(outcomes, key=lambda o: o.excess)
        if worst.excess <= 1:
            worst = max((o for o in outcomes if o.test in OVERALL), key=lambda o: o.excess)
        if sums.finite and given is None:
            self._observe(item, sums_of_all, sums, worst, even)
        floor = bounds.norm if sums.finite else math.inf
        if full.finite and not sums.finite and given is None:
            floor = max(bounds.norm, bounds.rerouted)
        factor_floor = self._factor_floor(conditions, sums_of_all.profile) if given is None else given
        return TestedTensor(worst, outcomes, floor, factor_floor, conditions.rerouted)

    def _explain_by_scores(self, item: ComparedTensor, sums: DifferenceSums, bounds: Bounds) -> Bounds:
        """The bounds, raised to what large attention scores explain if that is the difference."""
        error, softmax = max(sums.relative, sums.peak_share), self.noise.scores.bound(item)
        if not error <= softmax or sums.broken:
            return bounds
        self.noise.explain_softmax(error)
        self.explained.append(f"{item.name} (iteration {self.iteration})")
        return replace(bounds, norm=max(bounds.norm, softmax), peak=max(bounds.peak, softmax))

    # -- bounds ----------------------------------------------------------------------------------------

    def bound_ties(self, item: ComparedTensor, sums: PairSums, tokens: int) -> tuple[list[float], int]:
        """What one token may differ by, and how many may differ by more, as they have other experts.

        Args:
            item: a result of experts, or of their layer.
            sums: its sums.
            tokens: their number.

        Returns:
            Two bounds of one token's difference, the lesser first: with that one, as many tokens as may be
            tied and one more would exceed the bound of the norm. And the number of tokens that may be tied.
        """
        fresh = self.tolerances.unit * math.sqrt(self.tolerances.depths.depth_of(item))
        noise = max(fresh, 2 * self.noise.read_by(item).relative)
        allowed = count_ties(tokens, noise, self.a.manifest.model)
        norm, peak = self._bounds(item, sums, None)
        return [min(peak, norm * math.sqrt(tokens / (allowed + 1))), peak], allowed

    def _bounds(
        self, item: ComparedTensor, sums: PairSums, reference: PairSums | None
    ) -> tuple[float, float]:
        """What the norm and the peak of the difference may be."""
        dtypes = sums.worst.a.dtype, sums.worst.b.dtype
        cast = self.tolerances.cast(dtypes)
        derived = self.tolerances.derived(item, dtypes)
        if reference is not None:
            noise = reference.sums
            least = self.tolerances.derived(item, dtypes, depth=1)
            return max(MEASURED_MARGIN * noise.relative, least), max(MEASURED_MARGIN * noise.error, least)
        if item.kind == PARAMETER:
            unit = max(map(get_unit_roundoff, dtypes))
            if self.iteration and self._is_buffer(item) and not self._tied_before:
                late = self._bound_late(derived, self.iteration)  # no optimizer turns its entries
                return late, late
            bound = self.drift.bound(item, self.iteration, unit, self.tolerances.gradient_noise)
            return bound.relative + cast, bound.peak + cast
        if sums.sums.discrete:
            exact = self.noise.relative == 0 and self.noise.same_weights and not self.unseen_steps
            return (0.0, 0.0) if exact else (derived, derived)
        if _is_constant_loss_gradient(item, sums.sums):
            few = LOSS_ROUNDINGS * max(map(get_unit_roundoff, dtypes))
            return few + cast, few + cast
        if self.unseen_steps and self.learning_rate is None:
            late = self._bound_late(derived, self.unseen_steps)
            return late, late
        noise_bounds = self.noise.bounds(item, self.tolerances.depths.depth_of(item))
        if not self.noise.same_weights or self.noise.softmax or self.unseen_steps:
            return noise_bounds[0] + cast, noise_bounds[1] + cast
        most = self.tolerances.derived(item, dtypes, most=MAX_PEAK_TOLERANCE)
        return min(noise_bounds[0] + cast, derived), min(noise_bounds[1] + cast, most)

    @staticmethod
    def _bound_late(derived: float, steps: int) -> float:
        """What a tensor may differ by after steps of which nothing else is known."""
        return min(derived * (1 + steps), max(derived, MAX_TOLERANCE))

    def _is_buffer(self, item: ComparedTensor) -> bool:
        """Whether it has no gradient in a dump that has the gradients of parameters."""
        return bool(self._with_gradients) and item.site not in self._with_gradients

    def _bound_rerouted(self, item: ComparedTensor) -> float:
        """What the norm of a tensor may differ by of which some tokens have other experts."""
        most = MAX_PEAK_TOLERANCE if item.kind == PARAMETER_GRADIENT else MAX_TOLERANCE
        fraction = self.rerouted.fraction
        if EXPERTS in item.site:  # a token more or less is a greater part of the tokens of one expert
            fraction /= get_expert_share(self.a.manifest.model)
        return min(REROUTED_GROWTH * math.sqrt(fraction), most)

    def _factor_floor(self, conditions: Conditions, profile: DifferenceProfile | None) -> float:
        if profile is None:
            return 0.0
        factor, error = estimate_factor(profile)
        bound = bound_factor(profile, factor, error, conditions.unit, conditions.deviations)
        return max(bound, self.noise.late_factor)

    # -- what the tests are computed from --------------------------------------------------------------

    def _conditions(
        self,
        item: ComparedTensor,
        sums_of_all: PairSums,
        bounds: Bounds,
        sums: DifferenceSums,
        full: DifferenceSums,
        even: bool,
    ) -> Conditions:
        profile = sums_of_all.profile
        if not even or bounds.is_given or profile is None or full.broken or not profile.total("squares_a"):
            profile = None
        iteration, runs = sums_of_all.worst.iteration, (self.a, self.b)
        return Conditions(
            item,
            bounds,
            sums,
            full,
            profile,
            () if profile is None or full.equal else list_shard_blocks(runs, sums_of_all.worst, profile),
            self.tolerances.unit,
            1.0 if self.unseen_steps else self.noise.read_by_last.relative,
            self.noise.same_weights and not self.unseen_steps,
            bool(self.rerouted.fraction or self.noise.softmax),
            self.noise.late_factor,
            None if profile is None or self._is_partial(item) else self._copies,
            self._get_rounded_bits(sums_of_all),
            ((s.label, s.read_partial_sums(item, iteration, COMPARE_BLOCK)) for s in runs[::-1]),
        )

    def _get_rounded_bits(self, sums: PairSums) -> int:
        """The low bits of an fp32 gradient's mantissa that are zero where a run computes in half precision.

        A gradient in fp32 is one product in bf16, or the sum of several, as microbatches are divided. Values
        in fp32, such as a router's logits, are computed in it.
        """
        if sums.worst.a.dtype != torch.float32 or sums.worst.item.kind == VALUE:
            return 0
        return max(HALF_BITS.get(p.computed, 0) for p in self.tolerances.precisions if p.computed)

    def _is_partial(self, item: ComparedTensor) -> bool:
        layouts = [s.layout(item) for s in (self.a, self.b)]
        return any(layout is None or layout.partial for layout in layouts)

    # -- what later tensors may differ by ---------------------------------------------------------------

    def _observe(
        self, item: ComparedTensor, sums_of_all: PairSums, sums: DifferenceSums, worst: Outcome, even: bool
    ) -> None:
        """Record a tensor that is within its bounds.

        Args:
            item: the tensor.
            sums_of_all: the sums over all of it.
            sums: those that were tested.
            worst: the test that is nearest to its bound.
            even: whether all entries were tested alike.
        """
        if item.kind == PARAMETER:
            if sums_of_all.profile is not None and worst.excess <= 1:
                self.noise.parameter(item.site, measure_parameter(sums_of_all.profile, sums.peak_share))
            return
        if worst.excess > 1 or sums.discrete:
            return
        profile = sums_of_all.profile if even else None
        factor, error = (0.0, math.inf) if profile is None else estimate_factor(profile)
        self.noise.scores.observe(item, sums.error, sums.greatest)
        self.noise.observe(sums.relative, sums.peak_share, abs(factor) if math.isfinite(error) else 0.0)
        if item.kind in (VALUE, GRADIENT) and profile is not None and _has_features(profile):
            self.noise.observe_row(profile.row)
        if item.kind == PARAMETER_GRADIENT:
            self.drift.observe_gradient(sums.relative)

    def _assume_drift(self) -> None:
        """Take the optimizer's greatest step for what parameters differ by that are not compared."""
        if self.unseen_steps and self.learning_rate is not None:
            bound: DriftBound = estimate_unseen_drift(
                self.a.manifest.model, self.learning_rate, self.unseen_steps
            )
            self.noise.everywhere(ParameterNoise(bound.relative, bound.relative, bound.peak))


def _has_features(profile: DifferenceProfile) -> bool:
    """Whether its rows are tokens: the last dim is neither of the samples nor of the positions."""
    return len(profile.dims) > 1 and profile.dims[-1] not in (SAMPLE_AXIS, TOKEN_AXIS)


def _is_constant_loss_gradient(item: ComparedTensor, sums: DifferenceSums) -> bool:
    """Whether it is the gradient of a mean of losses: one constant, in which nothing was summed."""
    return item.kind == GRADIENT and item.site.partition(":")[0] == "loss" and sums.is_constant
