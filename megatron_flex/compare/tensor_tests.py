"""All tests of one compared tensor: bounds on norm and peak, exactness, tests pooled over entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_flex.compare.block_sums import COMPARE_BLOCK
from megatron_flex.compare.compared_dump import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    SAMPLE_AXIS,
    TOKEN_AXIS,
    VALUE,
    ComparedDump,
    ComparedTensor,
)
from megatron_flex.compare.difference_profile import DifferenceProfile
from megatron_flex.compare.error_patterns import find_dim_shares
from megatron_flex.compare.noise_scale import (
    NoiseScale,
    ParameterNoise,
    measure_parameter,
)
from megatron_flex.compare.overflow import OverflowState
from megatron_flex.compare.parameter_drift import DriftBound, ParameterDrift, estimate_unseen_drift
from megatron_flex.compare.routing_ties import ReroutedTokens, RoutingTies, count_ties
from megatron_flex.compare.structural_tests import (
    Block,
    Outcome,
    bound_factor,
    check_grid,
    check_partial_sums,
    estimate_factor,
    make_shard_blocks,
)
from megatron_flex.compare.table_of_tests import Conditions, run_pooled_tests
from megatron_flex.compare.tensor_pairs import DifferenceSums, PairSums, TensorPair
from megatron_flex.compare.tolerance import (
    MEASURED_MARGIN,
    MOST_PEAK_TOLERANCE,
    MOST_TOLERANCE,
    Tolerances,
    get_unit_roundoff,
)

REFERENCE_MARGIN = 3.0  # of a pooled statistic over that of the reference run
LOSS_ROUNDINGS = 4  # of a gradient of the loss that is one constant
REROUTED_GROWTH = 3.0  # from the root of the fraction of tokens with other experts to what these change
HALF_BITS = {torch.bfloat16: 16, torch.float16: 13}
CONSTANT = 1 - 1e-6  # of a tensor's energy over that of its greatest entry everywhere


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
    _copies: dict[tuple[float, ...], tuple[str, tuple[float, ...]]] = field(default_factory=dict)

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
        found: PairSums,
        reference: PairSums | None,
        ties: RoutingTies | None,
    ) -> TestedTensor:
        """Test one tensor.

        Args:
            pairs: the tensor in both runs.
            found: its sums.
            reference: the sums of a reference run against the nearer of the two; None if there is none.
            ties: the tokens that were routed otherwise, for what shows them first.
        """
        item, sums = pairs[0].item, found.sums
        tied = ties is not None and ties.tied_tokens > 0 and not ties.others
        if tied and ties is not None:
            self.rerouted.add(item, ties)
        given = self.tolerances.given(item)
        relative, peak = (given, given) if given is not None else self._bounds(item, found, reference)
        dtypes = found.worst.a.dtype, found.worst.b.dtype
        overflowed = self.overflow.is_overflow(item, sums, dtypes, peak)
        if overflowed:
            sums = sums.without_overflows()
        if given is not None:
            sums = self.rerouted.sum_others(pairs) if tied else sums
            outcome = Outcome("tolerance", sums.error, given)
            return TestedTensor(outcome, (outcome,), given if sums.finite else math.inf, given)
        if reference is None and self._exceeds(sums, relative, peak):
            error, softmax = max(sums.relative, sums.peak_share), self.noise.scores.bound(item)
            if error <= softmax and not sums.broken:
                self.noise.explain_softmax(error)
                self.explained.append(f"{item.name} (iteration {self.iteration})")
                relative, peak = max(relative, softmax), max(peak, softmax)
        full: DifferenceSums | None = None  # of all tokens, where ties reach some of them
        if tied or (self.rerouted.fraction and self._exceeds(sums, relative, peak)):
            full, sums = sums, self.rerouted.sum_others(pairs)
        plain = [
            Outcome("norm", _get_norm(sums), relative),
            Outcome("peak", 0.0 if sums.discrete or sums.broken else sums.peak_share, peak),
        ]
        if full is not None:
            loose = Outcome("norm", _get_norm(full), max(relative, self._bound_rerouted(item)))
            plain = [*plain, loose] if sums.finite else [loose]
        rerouted = (full or sums).finite - sums.finite
        even = not rerouted and not overflowed and not (ties is not None and ties.others)
        outcomes = [*plain, *(self._pooled(item, found, reference) if even else [])]
        worst = max(outcomes, key=lambda o: o.excess)
        if worst.excess <= 1:
            worst = max(plain, key=lambda o: o.excess)
        if sums.finite:
            self._observe(item, found, sums, worst, even)
        floor = plain[0].bound if (full or sums).finite else math.inf
        return TestedTensor(worst, tuple(outcomes), floor, self._factor_floor(item, found), rerouted)

    def _exceeds(self, sums: DifferenceSums, relative: float, peak: float) -> bool:
        if sums.discrete:
            return sums.error > relative
        return sums.relative > relative or sums.peak_share > peak

    # -- bounds ----------------------------------------------------------------------------------------

    def bound_ties(self, item: ComparedTensor, found: PairSums, tokens: int) -> tuple[list[float], int]:
        """What one token may differ by, and how many may differ by more, as they have other experts.

        Args:
            item: a result of experts, or of their layer.
            found: its sums.
            tokens: their number.

        Returns:
            Two bounds of one token's difference, the lesser first: with that one, as many tokens as may be
            tied and one more would exceed the bound of the norm. And the number of tokens that may be tied.
        """
        fresh = self.tolerances.unit * math.sqrt(self.tolerances.depths.of(item))
        noise = max(fresh, 2 * self.noise.read_by(item).relative)
        allowed = count_ties(tokens, noise, self.a.manifest.model)
        norm, peak = self._bounds(item, found, None)
        return [min(peak, norm * math.sqrt(tokens / (allowed + 1))), peak], allowed

    def _bounds(
        self, item: ComparedTensor, found: PairSums, reference: PairSums | None
    ) -> tuple[float, float]:
        """What the norm and the peak of the difference may be."""
        dtypes = found.worst.a.dtype, found.worst.b.dtype
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
        if found.sums.discrete:
            exact = self.noise.relative == 0 and self.noise.same_weights and not self.unseen_steps
            return (0.0, 0.0) if exact else (derived, derived)
        if _is_constant_loss_gradient(item, found.sums):
            few = LOSS_ROUNDINGS * max(map(get_unit_roundoff, dtypes))
            return few + cast, few + cast
        if self.unseen_steps and self.learning_rate is None:
            late = self._bound_late(derived, self.unseen_steps)
            return late, late
        own = self.noise.bounds(item, self.tolerances.depths.of(item))
        if not self.noise.same_weights or self.noise.softmax or self.unseen_steps:
            return own[0] + cast, own[1] + cast
        most = self.tolerances.derived(item, dtypes, most=MOST_PEAK_TOLERANCE)
        return min(own[0] + cast, derived), min(own[1] + cast, most)

    @staticmethod
    def _bound_late(derived: float, steps: int) -> float:
        """What a tensor may differ by after steps of which nothing else is known."""
        return min(derived * (1 + steps), max(derived, MOST_TOLERANCE))

    def _is_buffer(self, item: ComparedTensor) -> bool:
        """Whether it has no gradient in a dump that has the gradients of parameters."""
        return bool(self._with_gradients) and item.site not in self._with_gradients

    def _bound_rerouted(self, item: ComparedTensor) -> float:
        """What the norm of a tensor may differ by of which some tokens have other experts."""
        most = MOST_PEAK_TOLERANCE if item.kind == PARAMETER_GRADIENT else MOST_TOLERANCE
        return min(REROUTED_GROWTH * math.sqrt(self.rerouted.fraction), most)

    def _factor_floor(self, item: ComparedTensor, found: PairSums) -> float:
        if found.profile is None:
            return 0.0
        conditions = self._conditions(item, found.profile)
        factor, error = estimate_factor(found.profile)
        bound = bound_factor(found.profile, factor, error, conditions.unit, conditions.deviations)
        return max(bound, conditions.factor)

    # -- tests that pool -------------------------------------------------------------------------------

    def _pooled(self, item: ComparedTensor, found: PairSums, reference: PairSums | None) -> list[Outcome]:
        profile = found.profile
        if profile is None or found.sums.broken or not profile.total("squares_a"):
            return []
        out = [o for o in (self._check_copy(item, found),) if o is not None]
        if found.sums.equal:
            return out
        shards = self._list_shards(found)
        grid = (
            None if _is_constant(found.sums) else check_grid(profile, shards, self._get_rounded_bits(found))
        )
        if grid is None and item.kind == VALUE:
            grid = self._check_partial_sums(item, found, profile)
        out += [grid] if grid is not None else []
        if item.kind == PARAMETER:
            return out  # single entries that an optimizer turned have no standard error
        conditions = self._conditions(item, profile, shards)
        outcomes = list(run_pooled_tests(conditions))
        if reference is not None and reference.profile is not None:
            measured = run_pooled_tests(replace(conditions, profile=reference.profile))
            known = {o.test: REFERENCE_MARGIN * o.statistic for o in measured}
            outcomes = [replace(o, bound=max(o.bound, known.get(o.test, 0.0))) for o in outcomes]
        return out + outcomes

    def _conditions(
        self, item: ComparedTensor, profile: DifferenceProfile, shards: Sequence[Block] = ()
    ) -> Conditions:
        uneven = self.rerouted.fraction or self.noise.softmax  # some tokens or heads differ more than others
        return Conditions(
            item,
            profile,
            shards,
            self.tolerances.unit,
            1.0 if self.unseen_steps else self.noise.read_by_last.relative,
            self.noise.same_weights and not self.unseen_steps,
            bool(uneven),
            self.noise.late_factor,
        )

    def _list_shards(self, found: PairSums) -> list[Block]:
        """The shards of both runs, as blocks of the profile."""
        pair, profile = found.worst, found.profile
        assert profile is not None
        offset = len(profile.dims) - len(pair.dims)
        out: list[Block] = []
        for source in (self.a, self.b):
            shares = {
                place: [(s.run, s.axis, s.size, s.parts) for s in known]
                for place, known in find_dim_shares(source, pair).items()
            }
            out += make_shard_blocks(shares, profile.numbers[offset:], offset)
        return out

    def _check_copy(self, item: ComparedTensor, found: PairSums) -> Outcome | None:
        """Whether a tensor that is another's copy in one run is so in the other."""
        profile = found.profile
        if item.kind != VALUE or profile is None or self._is_partial(item):
            return None
        one, two = (
            (float(profile.count), *(float(x) for x in getattr(profile.by_dim[0], name)))
            for name in ("squares_a", "squares_b")
        )
        known = self._copies.setdefault(one, (item.name, two))
        if known[1] == two:
            return None
        return Outcome("copy", 1.0, 0.0, f"it is a copy of {known[0]} in A, and not in B")

    def _get_rounded_bits(self, found: PairSums) -> int:
        """The low bits of an fp32 gradient's mantissa that are zero where a run computes in half precision.

        A gradient in fp32 is one product in bf16, or the sum of several, as microbatches are divided. Values
        in fp32, such as a router's logits, are computed in it.
        """
        if found.worst.a.dtype != torch.float32 or found.worst.item.kind == VALUE:
            return 0
        return max(HALF_BITS.get(p.computed, 0) for p in self.tolerances.precisions if p.computed)

    def _check_partial_sums(
        self, item: ComparedTensor, found: PairSums, profile: DifferenceProfile
    ) -> Outcome | None:
        """Whether one rank's part of a sum is rounded to a narrower dtype."""
        for side in (self.b, self.a):
            parts = side.read_partial_sums(item, found.worst.iteration, COMPARE_BLOCK)
            outcome = check_partial_sums(profile, side.label, parts) if profile.grids else None
            if outcome is not None:
                return outcome
        return None

    def _is_partial(self, item: ComparedTensor) -> bool:
        layouts = [s.layout(item) for s in (self.a, self.b)]
        return any(layout is None or layout.partial for layout in layouts)

    # -- what later tensors may differ by ---------------------------------------------------------------

    def _observe(
        self, item: ComparedTensor, found: PairSums, sums: DifferenceSums, worst: Outcome, even: bool
    ) -> None:
        """Record a tensor that is within its bounds.

        Args:
            item: the tensor.
            found: the sums over all of it.
            sums: those that were tested.
            worst: the test that is nearest to its bound.
            even: whether all entries were tested alike.
        """
        if item.kind == PARAMETER:
            if found.profile is not None and worst.excess <= 1:
                self.noise.parameter(item.site, measure_parameter(found.profile, sums.peak_share))
            return
        if worst.excess > 1 or sums.discrete:
            return
        profile = found.profile if even else None
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


def _get_norm(sums: DifferenceSums) -> float:
    """The relative difference; of integers the fraction that differs; infinite with a NaN in one run."""
    return sums.error if sums.discrete or sums.broken else sums.relative


def _is_constant_loss_gradient(item: ComparedTensor, sums: DifferenceSums) -> bool:
    """Whether it is the gradient of a mean of losses: one constant, in which nothing was summed."""
    return item.kind == GRADIENT and item.site.partition(":")[0] == "loss" and _is_constant(sums)


def _is_constant(sums: DifferenceSums) -> bool:
    """Whether all entries of one of the two have the same magnitude."""
    return bool(sums.peak) and max(sums.squares_a, sums.squares_b) >= CONSTANT * sums.count * (
        sums.peak * sums.peak
    )
