"""How far an optimizer may turn parameters apart: from the way that they went, and from its greatest step.

Adam divides a gradient by its own size. An entry whose gradient is as small as its round-off moves by a full
step of either sign, so that two correct runs differ there by up to twice the learning rate in each step.
The share of such entries grows with the relative round-off of the gradient: the norm of the difference is
about the length of the step times the root of that round-off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_flex.compare.block_sums import COMPARE_BLOCK
from megatron_flex.compare.compared_dump import ComparedDump, ComparedTensor
from megatron_flex.compare.tensor_pairs import PairSums, align_arrays, sum_differences

PATH_MARGIN = 4.0  # of the norm over step * sqrt(gradient's relative noise); correct pairs reach 1.2
STEP_MARGIN = 2.2  # of one entry over its step: both runs move it, in opposite directions
CAST_MARGIN = 2.0  # unit roundoffs of one entry: masters on two sides of a rounding boundary
INITIAL_SCALE_KEYS = ("init_method_std",)
DEFAULT_WEIGHT_SCALE = 0.02


@dataclass(slots=True)
class DriftBound:
    """What a parameter may differ by so far: relative to its norm, and one entry relative to the peak."""

    relative: float = 0.0
    peak: float = 0.0


@dataclass
class ParameterDrift:
    """Bounds on the difference of parameters, carried from each compared iteration to the next.

    Args:
        source: the reference run.
        most: bytes of one block.
    """

    source: ComparedDump
    most: int = COMPARE_BLOCK
    _bounds: dict[str, DriftBound] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)
    _gradient_noise: float = 0.0
    _next_noise: float = 0.0

    def begin(self) -> None:
        """A compared iteration begins."""
        self._gradient_noise, self._next_noise = max(self._next_noise, 1e-12), 0.0

    def observe_gradient(self, relative: float) -> None:
        """Record how far a parameter's gradient differs, within its bound."""
        self._next_noise = max(self._next_noise, relative)

    def bound(self, item: ComparedTensor, iteration: int, unit: float, fallback: float) -> DriftBound:
        """What the parameter may differ by in an iteration.

        Args:
            item: the parameter.
            iteration: the compared iteration; they are asked for in ascending order.
            unit: the unit roundoff of its dtype.
            fallback: the relative bound where no earlier iteration was compared, and of the round-off of
                gradients where none was.
        """
        before = self._last.get(item.site)
        self._last[item.site] = iteration
        if before is None:
            initial = DriftBound() if iteration == 0 else DriftBound(math.sqrt(fallback), math.sqrt(fallback))
            self._bounds[item.site] = initial
            return initial
        bound = self._bounds[item.site]
        moved = self._measure_step(item, before, iteration)
        if moved is not None and not moved.sums.equal:
            step, profile = moved.sums, moved.profile
            noise = self._gradient_noise if self._gradient_noise > 1e-12 else fallback
            one_dim = profile is None or len(profile.by_dim) < 2
            # Of a bias or a norm's weight the gradient may be nothing but round-off: all of it may flip.
            share = STEP_MARGIN if one_dim else min(STEP_MARGIN, PATH_MARGIN * math.sqrt(noise))
            bound.relative += share * step.relative
            bound.peak += STEP_MARGIN * step.peak_share
        return DriftBound(bound.relative + unit / 2, bound.peak + CAST_MARGIN * unit)

    def _measure_step(self, item: ComparedTensor, before: int, iteration: int) -> PairSums | None:
        """How far the reference run's parameter moved between two iterations."""
        array = self.source.array(item)
        pairs = align_arrays(item, iteration, array, array, before)
        return None if isinstance(pairs, str) else sum_differences(pairs, self.most)


def estimate_unseen_drift(model: Mapping[str, object], learning_rate: float, steps: int) -> DriftBound:
    """What parameters that were not dumped may differ by, from the optimizer's greatest step.

    Args:
        model: the model's config, for the scale of its weights.
        learning_rate: of the steps.
        steps: their number.
    """
    scales = [value for k in INITIAL_SCALE_KEYS if isinstance(value := model.get(k), (int, float))]
    scale = float(scales[0]) if scales else DEFAULT_WEIGHT_SCALE
    step_share = 2 * learning_rate / scale
    return DriftBound(step_share * math.sqrt(steps), step_share * steps)
