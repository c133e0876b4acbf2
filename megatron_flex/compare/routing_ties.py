"""Tokens that correct runs route to other experts, as the router's scores are tied within round-off.

Where the router was dumped, its logits show which tokens were tied. Where it was not, the tokens whose result
differs by far more than the others' are counted, and compared with the number of ties that noise makes.
Tokens that a tie reaches, by attention too, are not evidence: the others are held to the bounds of round-off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_flex.compare.block_sums import COMPARE_BLOCK, split_into_blocks
from megatron_flex.compare.compared_dump import SAMPLE_AXIS, TOKEN_AXIS, ComparedTensor
from megatron_flex.compare.tensor_pairs import DifferenceSums, TensorPair
from megatron_flex.compare.tolerance import get_unit_roundoff, parse_layer_number
from megatron_flex.dump import GRADIENT, VALUE

ROUTER = re.compile(r"(.*\brouter):(probs|map)")
# Scores s in A and t in B, of experts i and j of which A chose i and B chose j: s_i >= s_j and t_j >= t_i, so
# s_i - s_j <= (s_i - t_i) + (t_j - s_j). More than twice the greatest difference of scores is not a tie.
TIE_MARGIN = 2.0
TIE_ROUNDINGS = 4.0  # of a score: of its logit as it was dumped, and of the function of it
TIE_DEVIATIONS = 4.0  # standard deviations of the number of ties, which is Poisson's
AFTER_ROUTING = re.compile(r"(.*\blayers\.\d+)(?:\.mlp)?:output")
SCORE_FUNCTIONS = {"sigmoid": torch.sigmoid, "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt()}
Positions = Mapping[int, Sequence[int]]  # by sample, the positions of tokens


@dataclass(frozen=True, slots=True)
class RoutingTies:
    """The tokens whose experts differ.

    Attributes:
        tokens: the number of tokens.
        tied: positions of those routed otherwise with scores that are tied within round-off, or as many as
            ties explain.
        others: the number of those routed otherwise although they are not tied.
        fewer: of these, those that have fewer experts in A, and in B.
        first: the first of these: sample, token, and its experts in A and in B.
    """

    tokens: int
    tied: Positions
    others: int
    fewer: tuple[int, int] = (0, 0)
    first: tuple[int, int, tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def tied_tokens(self) -> int:
        return sum(map(len, self.tied.values()))


def find_ties(
    chosen_a: Tensor,
    chosen_b: Tensor,
    scores: Tensor,
    noise: Tensor | float,
    contradictions: Mapping[tuple[int, int], float] | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens `[...]` whose experts differ, and those of them whose choice was a tie.

    A tie needs the same number of experts, one of which was exchanged for another with nearly the same score.

    Args:
        chosen_a: `[..., experts]`, whether each is chosen.
        chosen_b: likewise.
        scores: of one of the runs.
        noise: by how much the scores of two experts may differ that round-off exchanges, for each token.
        contradictions: of `RouterPairs.measure_contradictions`, in place of the difference of scores.
    """
    lost, gained = chosen_a & ~chosen_b, chosen_b & ~chosen_a
    exchanged = (lost.sum(-1) == 1) & (gained.sum(-1) == 1)
    if contradictions is None:
        gap = (scores.where(lost, 0.0).sum(-1) - scores.where(gained, 0.0).sum(-1)).abs()
    else:
        gap = torch.full(exchanged.shape, math.inf, dtype=torch.float64)
        gap[exchanged] = torch.tensor(
            [contradictions[pair] for pair in _list_exchanges(lost, gained, exchanged)], dtype=torch.float64
        )
    return (lost | gained).any(-1), exchanged & (gap <= noise)


def _list_exchanges(lost: Tensor, gained: Tensor, exchanged: Tensor) -> list[tuple[int, int]]:
    """The two experts of each exchange."""
    both = (t[exchanged].int().argmax(-1).tolist() for t in (lost, gained))
    return list(zip(*both, strict=True))


def measure_score_noise(left: Tensor, right: Tensor, unit: float) -> Tensor:
    """By how much scores may differ that the difference of two runs exchanges, for each token.

    Args:
        left: scores of A, `[..., experts]`.
        right: scores of B.
        unit: the unit roundoff of a score.
    """
    return TIE_MARGIN * (left - right).abs().amax(-1) + TIE_ROUNDINGS * unit * left.abs().amax(-1)


def get_logits_item(item: ComparedTensor) -> ComparedTensor | None:
    """The logits that a router's probabilities or map were computed from; None for another tensor."""
    router = ROUTER.fullmatch(item.site)
    if item.kind == GRADIENT or router is None:
        return None
    return ComparedTensor(f"{router[1]}:logits", item.kind, item.call)


@dataclass
class ReroutedTokens:
    """The tokens of one iteration that the two runs sent to other experts, and what they reach.

    Attributes:
        fraction: the greatest fraction of a router's tokens.
    """

    fraction: float = 0.0
    _by_layer: list[tuple[int | None, Positions]] = field(default_factory=list)

    def add(self, item: ComparedTensor, ties: RoutingTies) -> None:
        """Record the ties of a layer."""
        self._by_layer.append((parse_layer_number(item.site), ties.tied))
        self.fraction = max(self.fraction, ties.tied_tokens / max(ties.tokens, 1))

    def reach(self, pair: TensorPair) -> Tensor:
        """Whether each token of a pair differs by a tie, `[samples, tokens]`.

        A tied token reaches itself in its layer, and those that attend to it in later layers. The gradients
        of its sample all depend on it.
        """
        samples, tokens = _list_samples(pair), _list_tokens(pair)
        out = torch.zeros(len(samples), max(len(tokens), 1), dtype=torch.bool)
        site, places = pair.item.site, torch.tensor(tokens or [0])
        if not self._by_layer:
            return out
        if pair.along(SAMPLE_AXIS) is None and pair.along(TOKEN_AXIS) is None:
            return ~out  # a sum over tokens, or rows of an expert
        layer = None if site.startswith("mtp.") else parse_layer_number(site)
        whole = pair.item.kind != VALUE or not tokens or site.startswith("encoder.")
        for tied_layer, tied in self._by_layer:
            for row, sample in enumerate(samples):
                if sample not in tied:
                    continue
                if whole:
                    out[row] = True
                elif layer is not None and layer == tied_layer:
                    out[row] |= torch.isin(places, torch.tensor(list(tied[sample])))
                else:
                    out[row] |= places >= min(tied[sample])
        return out

    def sum_others(self, pairs: Sequence[TensorPair], most: int = COMPARE_BLOCK) -> DifferenceSums:
        """Sums over the tokens that no tie reaches."""
        out = DifferenceSums()
        for pair in pairs:
            reached = self.reach(pair)
            if reached.all():
                continue
            for block, a, b in pair.blocks(most):
                keep, dims = _cut_mask(pair, block, ~reached)
                left, right = (t.movedim(dims, list(range(len(dims))))[keep] for t in (a, b))
                out.add(left, right)
        return out


def _list_samples(pair: TensorPair) -> Sequence[int]:
    place = pair.along(SAMPLE_AXIS)
    return (pair.microbatch or 0,) if place is None else pair.numbers[place]


def _list_tokens(pair: TensorPair) -> Sequence[int]:
    place = pair.along(TOKEN_AXIS)
    return () if place is None else pair.numbers[place]


def _cut_mask(pair: TensorPair, block: Sequence[slice], mask: Tensor) -> tuple[Tensor, list[int]]:
    """A block's part of a mask over tokens.

    Args:
        pair: the pair.
        block: the block's part of each dim.
        mask: `[samples, tokens]` of the pair, with one entry along a dim that the pair lacks.

    Returns:
        The mask over those of the two dims that the pair has, in its order, and their indices.
    """
    places = [pair.along(dim) for dim in (SAMPLE_AXIS, TOKEN_AXIS)]
    for dim, place in enumerate(places):
        mask = mask if place is None else mask.narrow(dim, block[place].start, _length(block[place]))
    known = [place for place in places if place is not None]
    mask = mask.reshape([_length(block[place]) for place in known])
    return (mask, known) if known == sorted(known) else (mask.T, sorted(known))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


@dataclass
class RouterPairs:
    """The choices of experts of both runs, and the scores that they were made by.

    Args:
        chosen: not zero for the experts that a token chose, which are the last dim.
        logits: of the same tokens.
        model: the model's config.
        most: bytes of one block.
    """

    chosen: Sequence[TensorPair]
    logits: Sequence[TensorPair]
    model: Mapping[str, object]
    most: int = COMPARE_BLOCK

    def blocks(self) -> Iterator[tuple[TensorPair, tuple[slice, ...], list[Tensor], list[Tensor]]]:
        """Each block: its pair and its part of each dim, the two choices and the two scores."""
        for pair, scored in zip(self.chosen, self.logits, strict=True):
            for block in split_into_blocks(pair.shape, self.most):
                choices = [t != 0 for t in pair.read(block)]
                yield pair, block, choices, [self.score(t) for t in scored.read(block)]

    def score(self, logits: Tensor) -> Tensor:
        """What experts are chosen by, without a bias that is the same for all tokens."""
        function = SCORE_FUNCTIONS.get(str(self.model.get("moe_router_score_function")))
        scores = logits.double()
        return scores if function is None or not self.is_biased else function(scores)

    @property
    def is_biased(self) -> bool:
        """Whether a number that is not dumped is added to the scores of each expert."""
        return bool(self.model.get("moe_router_enable_expert_bias")) or "sinkhorn" in str(
            self.model.get("moe_router_load_balancing_type")
        )

    @property
    def unit(self) -> float:
        """The unit roundoff of a logit as it was dumped."""
        return max(get_unit_roundoff(p.dtype) for pair in self.logits for p in (pair.a, pair.b))

    @property
    def is_comparable(self) -> bool:
        """Whether both are of the same tokens, and each block has all experts."""
        same = [p.shape for p in self.chosen] == [p.shape for p in self.logits]
        return same and 8 * max((p.shape[-1] for p in self.chosen), default=0) <= self.most

    def measure_contradictions(self) -> dict[tuple[int, int], float]:
        """For each exchange of two experts by how much the choices contradict one bias for both runs.

        A run that chose i and not j says that the bias of i less that of j is at least the score of j less
        that of i; one that chose j and not i, that it is at most that.
        """
        exchanges: set[tuple[int, int]] = set()
        for _, _, (a, b), _ in self.blocks():
            lost, gained = a & ~b, b & ~a
            is_exchange = (lost.sum(-1) == 1) & (gained.sum(-1) == 1)
            exchanges.update(_list_exchanges(lost, gained, is_exchange))
        least, most = dict.fromkeys(exchanges, -math.inf), dict.fromkeys(exchanges, math.inf)
        for _, _, choices, scores in self.blocks():
            for chosen, score in zip(choices, scores, strict=True):
                for pair in exchanges:
                    (i, j), gap = pair, score[..., pair[1]] - score[..., pair[0]]
                    above, below = (gap[chosen[..., x] & ~chosen[..., y]] for x, y in ((i, j), (j, i)))
                    least[pair] = max([least[pair], *above.tolist()])
                    most[pair] = min([most[pair], *below.tolist()])
        return {pair: least[pair] - most[pair] for pair in exchanges}


def find_routing_ties(routers: RouterPairs, rerouted: ReroutedTokens) -> RoutingTies | None:
    """Compare which experts were chosen; None if the tensors do not have the same tokens, or all are equal.

    Args:
        routers: both runs' choices and scores.
        rerouted: the ties of earlier layers: the tokens that these reach have other scores.
    """
    if not routers.is_comparable:
        return None
    tokens = others = fewer_a = fewer_b = 0
    first = None
    tied: dict[int, list[int]] = {}
    contradictions = routers.measure_contradictions() if routers.is_biased else None
    for pair, block, (a, b), (left, right) in routers.blocks():
        noise = measure_score_noise(left, right, routers.unit)
        differs, ties = find_ties(a, b, left, noise, contradictions)
        reached, _ = _cut_mask(pair, block, rerouted.reach(pair))
        ties |= differs & reached & (a.sum(-1) == b.sum(-1))
        tokens += differs.numel()
        for at in ties.nonzero().tolist():
            sample, token = _locate_token(pair, block, at)
            tied.setdefault(sample, []).append(token)
        wrong = differs & ~ties
        others += int(wrong.sum())
        chosen_a, chosen_b = (t.sum(-1)[wrong] for t in (a, b))
        fewer_a += int((chosen_a < chosen_b).sum())
        fewer_b += int((chosen_b < chosen_a).sum())
        if first is None and wrong.any():
            at = wrong.nonzero().tolist()[0]
            experts_a, experts_b = (tuple(t[tuple(at)].nonzero().flatten().tolist()) for t in (a, b))
            first = (*_locate_token(pair, block, at), experts_a, experts_b)
    return RoutingTies(tokens, tied, others, (fewer_a, fewer_b), first)


def _locate_token(pair: TensorPair, block: Sequence[slice], at: Sequence[int]) -> tuple[int, int]:
    """The sample and the position of a token of a block."""
    sample, token = pair.along(SAMPLE_AXIS), pair.along(TOKEN_AXIS)
    numbers = [known[i + part.start] for known, i, part in zip(pair.numbers, at, block, strict=False)]
    return (
        (pair.microbatch or 0) if sample is None else numbers[sample],
        0 if token is None else numbers[token],
    )


def get_router_item(item: ComparedTensor) -> ComparedTensor | None:
    """The router whose choice a tensor is the first to show in a dump without experts; None for another."""
    matched = AFTER_ROUTING.fullmatch(item.site)
    if matched is None or item.kind != VALUE:
        return None
    return ComparedTensor(f"{matched[1]}.mlp.router:probs", item.kind, item.call)


def get_expert_share(model: Mapping[str, Any]) -> float:
    """The part of all tokens that an expert has on average; 1 for a model that does not choose experts."""
    experts, chosen = model.get("num_moe_experts"), model.get("moe_router_topk")
    if isinstance(experts, int) and isinstance(chosen, int) and 0 < chosen < experts:
        return chosen / experts
    return 1.0


def count_ties(tokens: int, noise: float, model: Mapping[str, Any]) -> int:
    """The greatest number of tokens that noise routes otherwise; 0 for a model without experts.

    Of normal logits the last of `k` chosen ones among `n` and the next are apart by about `1 / (k h)`
    standard deviations, for the hazard `h = sqrt(2 log(n / k))` of the normal's tail. Noise of both that is
    greater than the gap turns the choice: of `k h / sqrt(pi)` times the relative noise of all tokens.

    Args:
        tokens: their number.
        noise: of the logits, relative to their size.
        model: the model's config.
    """
    share = get_expert_share(model)
    if share == 1:
        return 0
    density = model["moe_router_topk"] * math.sqrt(2 * math.log(1 / share) / math.pi)
    expected = tokens * min(density * noise, 1.0)
    return int(expected + TIE_DEVIATIONS * math.sqrt(expected))


def find_likely_ties(
    pairs: Sequence[TensorPair],
    bounds: Sequence[float],
    allowed: int,
    rerouted: ReroutedTokens,
    most: int = COMPARE_BLOCK,
) -> RoutingTies | None:
    """Find tokens whose result differs as if it were of other experts; None if there are none, or too many.

    Args:
        pairs: the result of experts, or of their layer.
        bounds: what a token may differ by, relative to the norm of an average token; the next one counts
            where too many tokens exceed one.
        allowed: the greatest number of such tokens in a correct pair.
        rerouted: the ties of earlier layers; the tokens that these reach do not count.
        most: bytes of one block.
    """
    if pairs[0].dims[:-1] not in ((SAMPLE_AXIS, TOKEN_AXIS), (TOKEN_AXIS,), (TOKEN_AXIS, SAMPLE_AXIS)):
        return None
    total, count, far = 0.0, 0, []
    for number, pair in enumerate(pairs):
        reached = rerouted.reach(pair)
        for block, a, b in pair.blocks(most):
            if block[-1].stop - block[-1].start != pair.shape[-1] or not (a.isfinite() & b.isfinite()).all():
                return None
            total += float(a.double().square().sum())
            squares = (b.double() - a.double()).square().sum(-1)
            count += squares.numel()
            masked, _ = _cut_mask(pair, block, reached)
            far.append((number, block, squares.masked_fill(masked, 0.0)))
    mean = total / max(count, 1)
    exceeding = ([squares > bound * bound * mean for _, _, squares in far] for bound in bounds)
    apart = next((masks for masks in exceeding if sum(int(m.sum()) for m in masks) <= allowed), [])
    if not any(bool(mask.any()) for mask in apart):
        return None
    tied: dict[int, list[int]] = {}
    for (number, block, _), mask in zip(far, apart, strict=True):
        for at in mask.nonzero().tolist():
            sample, token = _locate_token(pairs[number], block, at)
            tied.setdefault(sample, []).append(token)
    return RoutingTies(count, tied, 0)
