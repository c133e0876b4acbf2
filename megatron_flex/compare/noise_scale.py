"""The noise of one pair of runs, measured on its own tensors in the order in which they were computed.

Round-off grows smoothly from tensor to tensor: what the tensors so far differ by, and the parameters that a
module reads, is what the next one may differ by, times a small factor. A fault makes its first tensor jump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.difference_profile import DifferenceProfile
from megatron_flex.compare.tolerance import parse_layer_number
from megatron_flex.dump import GRADIENT, PARAMETER, PARAMETER_GRADIENT, VALUE

STEP_GROWTH = 2.2  # from the noise so far to the next tensor; measured: docs/contributing/comparison.md
PEAK_GROWTH = 3.5  # likewise of the greatest difference over the peak
FP8_PEAK_GROWTH = 5.0  # in fp8, in which a few entries round to another value, and most to the same
LATE_GROWTH = 3.0  # besides, once parameters differ
# From the greatest difference of scores to the relative one of their softmax, and of their own gradient.
SOFTMAX_GROWTH, SOFTMAX_GRADIENT_GROWTH = 1.0, 2.0
AFTER_SOFTMAX = 2.0  # from the relative difference of probabilities to that of later tensors
SUM_GROWTH = 1.7  # of gradients of parameters besides, which are sums that may cancel
DEPTH_SHARE = 0.5  # of unit * sqrt(depth): the noise that a tensor has besides its inputs'
SCORES, PROBABILITIES = ".core_attention:scores", ".core_attention:probs"  # between them is a softmax
EMBEDDING = "embedding"  # of which a site reads some rows only


@dataclass(frozen=True, slots=True)
class ParameterNoise:
    """How far one parameter of both runs differs.

    Attributes:
        relative: the norm of the difference over the norm.
        row: the greatest of any one row, over the norm of an average row: an embedding reads some rows only.
        peak: the greatest difference over the greatest entry.
    """

    relative: float = 0.0
    row: float = 0.0
    peak: float = 0.0

    def join(self, other: ParameterNoise) -> ParameterNoise:
        """The greater of both."""
        return ParameterNoise(
            max(self.relative, other.relative), max(self.row, other.row), max(self.peak, other.peak)
        )


@dataclass
class SoftmaxNoise:
    """What the round-off of attention scores makes of their softmax and of what follows.

    If scores differ by `d`, their softmax `p` differs by at most `2 * d * p * (1 - p)`, that is, by `d` or
    less relative to its greatest entry, and its derivative `p * (1 - p)` by at most `2 * d` relative to
    itself. The round-off of scores is relative to the scores, but `d` is absolute: where scores reach 100,
    probabilities and the gradients of scores differ a hundred times more than other tensors. Only scores and
    probabilities within their own bounds explain differences.

    Attributes:
        carried: what tensors after the probabilities so far may differ by.
    """

    carried: float = 0.0
    _gaps: dict[tuple[str, int], float] = field(default_factory=dict)
    _followed: set[tuple[str, int]] = field(default_factory=set)  # scores whose probabilities were compared

    def observe(self, item: ComparedTensor, error: float, greatest: float) -> None:
        """Record scores or probabilities that are within their bounds; nothing for other tensors.

        Args:
            item: the tensor.
            error: its relative difference.
            greatest: the greatest absolute difference.
        """
        if item.kind == VALUE and item.site.endswith(SCORES):
            self._gaps[item.site.removesuffix(SCORES), item.call] = greatest
        elif item.kind == VALUE and item.site.endswith(PROBABILITIES):
            self._followed.add((item.site.removesuffix(PROBABILITIES), item.call))
            self.carried += AFTER_SOFTMAX * error

    def bound(self, item: ComparedTensor) -> float:
        """What large scores explain of a tensor's relative difference.

        Args:
            item: the probabilities, or the scores, whose gradient it is; 0 for other tensors.
        """
        explained = {VALUE: (PROBABILITIES, SOFTMAX_GROWTH), GRADIENT: (SCORES, SOFTMAX_GRADIENT_GROWTH)}
        point, growth = explained.get(item.kind, (SCORES, 0.0))
        if not item.site.endswith(point):
            return 0.0
        return growth * self._gaps.get((item.site.removesuffix(point), item.call), 0.0)

    @property
    def later(self) -> float:
        """What they explain of a later tensor, where no noise was measured that it could be compared with."""
        unread = (gap for scores, gap in self._gaps.items() if scores not in self._followed)
        return self.carried + SOFTMAX_GROWTH * sum(unread)


@dataclass
class NoiseScale:
    """The noise so far, within one iteration.

    Args:
        unit: the unit roundoff of the less precise run, with that of the sums inside a kernel.
        fp8: whether a run multiplies in fp8.

    Attributes:
        relative: the greatest relative difference so far.
        peak: the greatest difference so far, over the peak.
        row: the greatest relative difference so far of one token's features.
        factor: the greatest deviation so far of a constant factor between both from 1.
        softmax: the greatest relative difference so far that large attention scores explain.
        scores: what they explain.
    """

    unit: float
    fp8: bool = False
    relative: float = 0.0
    peak: float = 0.0
    row: float = 0.0
    factor: float = 0.0
    softmax: float = 0.0
    _parameters: dict[str, ParameterNoise] = field(default_factory=dict)
    _read: ParameterNoise = field(default_factory=ParameterNoise)
    scores: SoftmaxNoise = field(default_factory=SoftmaxNoise)

    @property
    def same_weights(self) -> bool:
        """Whether all compared parameters are equal."""
        return not any(p.relative for p in self._parameters.values())

    def parameter(self, name: str, noise: ParameterNoise) -> None:
        """Record a parameter of this iteration."""
        unit = _get_unit_name(name)
        self._parameters[unit] = self._parameters.get(unit, ParameterNoise()).join(noise)

    @property
    def read_by_last(self) -> ParameterNoise:
        """How far the parameters differ that the tensors so far have read."""
        return self._read

    def everywhere(self, noise: ParameterNoise) -> None:
        """Take a noise for that of all parameters."""
        self._read = self._read.join(noise)

    def read_by(self, item: ComparedTensor) -> ParameterNoise:
        """How far the parameters differ that were read so far, this module's included."""
        if item.kind == PARAMETER:
            return ParameterNoise()
        of_module = self._parameters.get(_get_unit_name(item.site), ParameterNoise())
        if _get_unit_name(item.site) == EMBEDDING:
            of_module = ParameterNoise(of_module.row, of_module.row, max(of_module.peak, of_module.row))
        self._read = self._read.join(of_module)
        return self._read

    def bounds(self, item: ComparedTensor, depth: int) -> tuple[float, float]:
        """What a tensor may differ by: relative to its norm, and at its peak."""
        read = self.read_by(item)
        fresh = DEPTH_SHARE * self.unit * math.sqrt(depth)
        growth = SUM_GROWTH if item.kind == PARAMETER_GRADIENT else 1.0
        late = bool(read.relative)
        growth *= LATE_GROWTH if late else 1.0
        relative = STEP_GROWTH * growth * (max(self.relative, 2 * read.relative) + fresh)
        # Training makes single tokens differ by far more than others; any of them may have the peak later.
        row = self.row if late else 0.0
        growth *= FP8_PEAK_GROWTH if self.fp8 else PEAK_GROWTH
        peak = growth * (max(self.peak, row, 2 * read.peak) + fresh)
        return relative, max(peak, relative)

    @property
    def late_factor(self) -> float:
        """What a constant factor may deviate from 1 by: 0 with equal weights and small attention scores.

        Parameters that differ scale what reads them, and what was scaled scales what it is an input of.
        """
        return 0.0 if self.same_weights and not self.softmax else STEP_GROWTH * LATE_GROWTH * self.factor

    def observe(self, relative: float, peak: float, factor: float = 0.0) -> None:
        """Record a tensor that is within its bounds."""
        self.relative, self.peak = max(self.relative, relative), max(self.peak, peak)
        self.factor = max(self.factor, factor)

    def observe_row(self, row: float) -> None:
        """Record the greatest relative difference of one token's features, of a tensor within its bounds."""
        self.row = max(self.row, row)

    def explain_softmax(self, error: float) -> None:
        """Record a difference that large attention scores explain, of some tokens and heads above all."""
        self.softmax, self.factor = max(self.softmax, error), max(self.factor, error)


def _get_unit_name(name: str) -> str:
    """The part of the model that a parameter or site belongs to: a layer, the embedding, the output layer."""
    module = name.partition(":")[0]
    layer = parse_layer_number(module)
    if layer is None:
        first = module.partition(".")[0]
        return first if first in (EMBEDDING, "output_layer") else module.removesuffix(".weight")
    return module[: module.index(f".{layer}") + len(str(layer)) + 1]


def measure_parameter(profile: DifferenceProfile, peak: float) -> ParameterNoise:
    """How far a parameter differs, from its sums."""
    if not profile.by_dim or not profile.total("squares_a"):
        return ParameterNoise()
    rows = profile.by_dim[0]
    average = float(rows.squares_a.sum()) / len(rows.numbers)
    row = math.sqrt(float(rows.squares.max()) / average) if average else 0.0
    return ParameterNoise(profile.relative, row, peak)
