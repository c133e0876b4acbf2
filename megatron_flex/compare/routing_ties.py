"""Tokens that correct runs route to other experts, as the router's logits are tied within round-off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.compare.compared_dump import GRADIENT, ComparedTensor
from megatron_flex.compare.tensor_pairs import COMPARE_BLOCK, DifferenceSums, TensorPair, split_into_blocks

PROBS, LOGITS = "router:probs", "router:logits"
TIE_MARGIN = 4.0  # of the gap between two logits over what that token's logits differ by


@dataclass(frozen=True, slots=True)
class RoutingTies:
    """The tokens whose experts differ.

    Attributes:
        tokens: the number of tokens.
        tied: those routed otherwise with logits that are tied within round-off.
        others: those routed otherwise although they are not.
        rest: sums over the tokens with the same experts.
    """

    tokens: int
    tied: int
    others: int
    rest: DifferenceSums


def get_logits_item(item: ComparedTensor) -> ComparedTensor | None:
    """The logits that a router's probabilities were computed from; None for another tensor."""
    if item.kind == GRADIENT or not item.site.endswith(PROBS):
        return None
    return ComparedTensor(item.site.removesuffix(PROBS) + LOGITS, item.kind, item.call)


def find_routing_ties(
    probs: Sequence[TensorPair], logits: Sequence[TensorPair], unit: float, most: int = COMPARE_BLOCK
) -> RoutingTies | None:
    """Compare which experts were chosen; None if the two tensors do not have the same tokens.

    Args:
        probs: zero for experts that were not chosen, experts in the last dim.
        logits: of the same tokens.
        unit: the unit roundoff of the run.
        most: bytes of one block.
    """
    rest, tokens, tied, others = DifferenceSums(), 0, 0, 0
    if [p.shape for p in probs] != [p.shape for p in logits]:
        return None
    for chosen, scored in zip(probs, logits, strict=True):
        for block in split_into_blocks(chosen.shape, most):
            a, b = chosen.read(block)
            if block[-1].stop - block[-1].start != chosen.shape[-1]:
                return None
            unlike = ((a != 0) != (b != 0)).any(-1)
            tokens += unlike.numel()
            if unlike.any():
                near = _are_tied(a, b, *scored.read(block), unlike, unit)
                tied += int((unlike & near).sum())
                others += int((unlike & ~near).sum())
            rest.add(a[~unlike], b[~unlike])
    return RoutingTies(tokens, tied, others, rest)


def _are_tied(a: Tensor, b: Tensor, one: Tensor, two: Tensor, unlike: Tensor, unit: float) -> Tensor:
    """For each token whether the experts that one run has and the other has not are tied in A's logits."""
    left, right = one.double(), two.double()
    noise = (left - right).abs().amax(-1) + unit * left.abs().amax(-1)
    swapped = (a != 0) != (b != 0)
    high = left.masked_fill(~swapped, -torch.inf).amax(-1)
    low = left.masked_fill(~swapped, torch.inf).amin(-1)
    return unlike & (high - low <= TIE_MARGIN * noise)
