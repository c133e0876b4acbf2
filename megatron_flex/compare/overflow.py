"""Numbers that are not evidence: not finite in both runs, or at the end of fp16's range.

A loss scale that is too large overflows gradients in fp16, and Megatron skips such a step. Which entries
overflow depends on the order of summation: one run has an infinity where the other has 65504.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_flex.compare.compared_dump import ComparedTensor
from megatron_flex.compare.comparison import Row
from megatron_flex.compare.tensor_pairs import DifferenceSums
from megatron_flex.dump import GRADIENT, PARAMETER_GRADIENT

GRADIENT_KINDS = (GRADIENT, PARAMETER_GRADIENT)
MAX_EDGE = 0.5  # of the range, in which a finite entry is one that round-off may make infinite
LOSS_SCALE = (
    "the loss scale is too large for fp16: run both with a smaller one, such as --initial-loss-scale 65536"
)
FIRST_VALUE = "dump more hook points before it to see where the first number overflows"


@dataclass
class OverflowState:
    """What overflowed so far in one iteration.

    Args:
        computed: the compute dtypes of both runs.
        half: whether a run computes in fp16, whose gradients have a loss scale.
        overflowing: whether gradients of both runs overflowed.
    """

    computed: Sequence[torch.dtype | None]
    half: bool = field(init=False)
    overflowing: bool = False

    def __post_init__(self) -> None:
        self.half = torch.float16 in self.computed

    def begin(self) -> None:
        self.overflowing = False

    def is_overflow(
        self, item: ComparedTensor, sums: DifferenceSums, dtypes: Sequence[torch.dtype], share: float
    ) -> bool:
        """Whether all entries that are finite in one run only are an overflow of both, and record it.

        Args:
            item: the tensor.
            sums: its sums.
            dtypes: of both tensors.
            share: by what entries near the end of the range may differ, relative to them.
        """
        gradient = self.half and item.kind in GRADIENT_KINDS
        known = [d for d in (*dtypes, *self.computed) if d is not None and d.is_floating_point]
        limit = min((torch.finfo(d).max for d in known), default=0.0)
        nearest = (1 - min(share, MAX_EDGE)) * limit
        at_edge = 0 < sums.broken == sums.overflowed and sums.nearest_overflow >= nearest
        both = gradient and (self.overflowing or sums.not_finite > 0)
        self.overflowing |= gradient and (at_edge or sums.not_finite > 0)
        return sums.broken > 0 and (at_edge or both)


def suggest_remedy(rows: Sequence[Row], half: bool) -> str:
    """What makes numbers finite that are not finite in either run; empty where all are.

    Args:
        rows: what was compared, in the order of execution.
        half: whether a run computes in fp16.
    """
    first = next((r for r in rows if r.not_finite), None)
    if first is None:
        return ""
    return LOSS_SCALE if half and first.kind in GRADIENT_KINDS else FIRST_VALUE
