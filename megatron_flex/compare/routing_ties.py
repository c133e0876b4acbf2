"""Tokens that correct runs route to other experts, as the router's logits are tied within round-off.

Where the router was dumped, its logits show which tokens were tied. Where it was not, the tokens whose result
differs by far more than the others' are counted, and compared with the number of ties that noise makes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_flex.compare.block_sums import COMPARE_BLOCK, split_into_blocks
from megatron_flex.compare.compared_dump import (
    GRADIENT,
    SAMPLE_AXIS,
    TOKEN_AXIS,
    VALUE,
    ComparedTensor,
)
from megatron_flex.compare.tensor_pairs import DifferenceSums, TensorPair

PROBS, LOGITS = "router:probs", "router:logits"
TIE_MARGIN = 4.0  # of the gap between two logits over what that token's logits differ by
TIE_DEVIATIONS = 4.0  # standard deviations of the number of ties, which is Poisson's
AFTER_ROUTING = re.compile(r"(.*\blayers\.\d+)(?:\.mlp)?:output")


@dataclass(frozen=True, slots=True)
class RoutingTies:
    """The tokens whose experts differ.

    Attributes:
        tokens: the number of tokens.
        tied: those routed otherwise with logits that are tied within round-off, or as many as ties explain.
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


def get_router_item(item: ComparedTensor) -> ComparedTensor | None:
    """The router whose choice a tensor is the first to show in a dump without experts; None for another."""
    found = AFTER_ROUTING.fullmatch(item.site)
    if found is None or item.kind != VALUE:
        return None
    return ComparedTensor(f"{found[1]}.mlp.{PROBS}", item.kind, item.call)


def count_ties(tokens: int, noise: float, model: Mapping[str, object]) -> int:
    """The greatest number of tokens that noise routes otherwise; 0 for a model without experts.

    Of normal logits the last of `k` chosen ones among `n` and the next are apart by about `1 / (k h)`
    standard deviations, for the hazard `h = sqrt(2 log(n / k))` of the normal's tail. Noise of both that is
    greater than the gap turns the choice: of `k h / sqrt(pi)` times the relative noise of all tokens.

    Args:
        tokens: their number.
        noise: of the logits, relative to their size.
        model: the model's config.
    """
    experts, chosen = model.get("num_moe_experts"), model.get("moe_router_topk")
    if not (isinstance(experts, int) and isinstance(chosen, int) and 0 < chosen < experts):
        return 0
    density = chosen * math.sqrt(2 * math.log(experts / chosen) / math.pi)
    expected = tokens * min(density * noise, 1.0)
    return int(expected + TIE_DEVIATIONS * math.sqrt(expected))


def find_likely_ties(
    pairs: Sequence[TensorPair], bounds: Sequence[float], allowed: int, most: int = COMPARE_BLOCK
) -> RoutingTies | None:
    """Find tokens whose result differs as if it were of other experts; None if there are none, or too many.

    Args:
        pairs: the result of experts, or of their layer.
        bounds: what a token may differ by, relative to the norm of an average token; the next one counts
            where too many tokens exceed one.
        allowed: the greatest number of such tokens in a correct pair.
        most: bytes of one block.
    """
    if pairs[0].dims[:-1] not in ((SAMPLE_AXIS, TOKEN_AXIS), (TOKEN_AXIS,), (TOKEN_AXIS, SAMPLE_AXIS)):
        return None
    total, squares = 0.0, []
    for pair in pairs:
        for block, a, b in pair.blocks(most):
            if block[-1].stop - block[-1].start != pair.shape[-1] or not (a.isfinite() & b.isfinite()).all():
                return None
            total += float(a.double().square().sum())
            squares.append((b.double() - a.double()).square().sum(-1).reshape(-1))
    found = torch.cat(squares) if squares else torch.zeros(0, dtype=torch.float64)
    mean = total / max(found.numel(), 1)
    limits = [(bound * bound * mean, int((found > bound * bound * mean).sum())) for bound in bounds]
    least, apart = next((one for one in limits if one[1] <= allowed), (0.0, 0))
    if not apart:
        return None
    rest = DifferenceSums()
    for pair in pairs:
        for _, a, b in pair.blocks(most):
            other = (b.double() - a.double()).square().sum(-1) > least
            rest.add(a[~other], b[~other])
    return RoutingTies(found.numel(), apart, 0, rest)


def _are_tied(a: Tensor, b: Tensor, one: Tensor, two: Tensor, unlike: Tensor, unit: float) -> Tensor:
    """For each token whether the experts that one run has and the other has not are tied in A's logits."""
    left, right = one.double(), two.double()
    noise = (left - right).abs().amax(-1) + unit * left.abs().amax(-1)
    swapped = (a != 0) != (b != 0)
    high = left.masked_fill(~swapped, -torch.inf).amax(-1)
    low = left.masked_fill(~swapped, torch.inf).amin(-1)
    return unlike & (high - low <= TIE_MARGIN * noise)
