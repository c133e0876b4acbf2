"""Why hidden states differ from a layer on: a cause is named if the tokens that differ exclude others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_flex.rollout.hidden_differences import HiddenComparer, LayerDifferences
from megatron_flex.rollout.rollout_table import Request
from megatron_flex.rollout.token_causes import Cause
from megatron_flex.rollout.token_matching import Match
from megatron_flex.wording import count_words

MIN_TOKENS = 16  # fewer show no cause
FEW, MOST = 0.1, 0.9  # of the tokens
CHANCE = 0.01  # that tokens which were chosen at random have gaps as small
SPANNED = 0.2  # of a difference's norm, which may be outside of what the experts' outputs span
BF16_MANTISSA = 7
ON_GRID = 0.05  # the mean distance from the grid of bf16, in its steps; 0.25 for values that are not rounded
LEAST_STEP = 2.0**-12  # of the grid, which the noise of fp32 does not hide
# A difference of angles grows with the distance of query and key. Measured: at least 28 and 0.55 for another
# rotary base or other low frequencies; at most 6 and 0.3 without a norm, or with another scale of the scores.
GROWTH = 10.0  # of the error from position 1 to the later half of the positions, by medians
RANK_CORRELATION = 0.45  # of the error with the position


def explain_layers(
    layers: Sequence[LayerDifferences],
    comparer: HiddenComparer,
    requests: Sequence[Request],
    matches: Mapping[int, Match],
    explained: bool,
) -> tuple[list[Cause], list[str]]:
    """The causes that hidden states show, and what was measured if there is none.

    Args:
        layers: the differences, in the order of the model.
        comparer: that computed them.
        requests: of the table.
        matches: where they are in the dump, by their number.
        explained: whether tokens and logits have shown a cause.
    """
    at = next((n for n, layer in enumerate(layers) if bool(layer.beyond.any())), None)
    if at is None:
        if explained or not layers or not len(layers[-1].errors):
            return [], []
        last = layers[-1]
        return [], [f"hidden states agree up to {last.site}: greatest error {last.greatest:.2g}"]
    return _LayerExplainer(layers, at, comparer, requests, matches).explain()


class _LayerExplainer:
    """Explains the first layer that differs."""

    def __init__(
        self,
        layers: Sequence[LayerDifferences],
        at: int,
        comparer: HiddenComparer,
        requests: Sequence[Request],
        matches: Mapping[int, Match],
    ) -> None:
        self.layer, self.before = layers[at], list(layers[:at])
        self.comparer, self.requests, self.matches = comparer, requests, matches
        self.number = self.layer.layer - 1  # of the decoder's layer whose output differs; -1 of the embedding
        previous = self.before[-1].layer if self.before else 0
        self.first = min(previous, max(self.number, 0))  # the first layer in which the fault may be
        self.alone = self.first == self.number

    @property
    def where(self) -> str:
        """The layers in which the fault is."""
        if self.number < 0:
            return "the embedding"
        return f"layer {self.number}" if self.alone else f"layers {self.first} to {self.number}"

    def explain(self) -> tuple[list[Cause], list[str]]:
        counted = self.layer.counted
        errors, beyond, positions = (
            t[counted] for t in (self.layer.errors, self.layer.beyond, self.layer.positions)
        )
        share = float(beyond.double().mean())
        measured = f"{int(beyond.sum()):,} of {count_words(len(errors), 'token')} differ after {self.where}"
        if self.before:
            greatest = max(layer.greatest for layer in self.before)
            measured += f"; before it the greatest error is {greatest:.2g}"
        if len(errors) < MIN_TOKENS:
            return [], [measured]
        zero = positions == 0
        only_later = self.number >= 0 and bool(zero.any()) and not bool(beyond[zero].any())
        if only_later and float(beyond[~zero].double().mean()) >= MOST:
            return [self._explain_attention(measured)], []
        cause = None
        if share >= MOST and (not bool(zero.any()) or bool(beyond[zero].all())):
            cause = self._find_routing() or self._find_weights(measured)
        elif share <= FEW:
            cause = self._find_flip(measured)
        return ([cause], []) if cause is not None else ([], [measured])

    def _explain_attention(self, measured: str) -> Cause:
        """Position 0 attends to itself alone: its output does not depend on scores."""
        errors, positions = (t[self.layer.counted] for t in (self.layer.errors, self.layer.positions))
        text = f"{measured}; position 0, which attends to itself alone, is equal"
        later = positions > 0
        first, late = errors[positions == 1], errors[positions > int(positions.max()) // 2]
        if len(first) and len(late):
            growth = float(late.median() / first.median())
            correlation = _correlate_ranks(positions[later].double(), errors[later])
            text += f"; the error grows {growth:.2g} times from position 1 to the later half of the positions"
            if growth >= GROWTH and correlation >= RANK_CORRELATION:
                return Cause("rotary embedding", f"{text}, as a difference of its angles does")
        return Cause("attention scores", f"{text}: queries, keys, their norms, rotary embedding or mask")

    def _find_weights(self, measured: str) -> Cause | None:
        """Weights of one layer: what all layers have in common would differ in those before too."""
        experts = self._has_experts(self.number)
        earlier = [n for layer in self.before for n in range(layer.layer)]
        if self.number < 0 or not any(self._has_experts(n) == experts for n in earlier):
            return None
        return Cause(
            "weights",
            f"{measured}; position 0 differs too, and layers before with the same configuration agree: "
            f"{self.where} has other weights (`megatron-flex weights compare` names them)",
        )

    def _has_experts(self, layer: int) -> bool:
        """Whether a layer of the dump's model has experts."""
        return self.comparer.dump.has_experts(layer)

    # -- experts ---------------------------------------------------------------------------------------

    def _find_flip(self, measured: str) -> Cause | None:
        """Few tokens, whose routers' choices are the closest of all: they went to other experts."""
        gaps = self._read_gaps() if self.alone else None
        if gaps is None:
            return None
        wrong = self.layer.beyond
        count, total = int(wrong.sum()), len(gaps)
        rank = int((gaps <= gaps[wrong].max()).sum())
        if math.comb(rank, count) / math.comb(total, count) > CHANCE:
            return None
        return Cause(
            "expert choice",
            f"{measured}; of {total:,} tokens their routers' choices are the closest: the score of the last "
            f"expert chosen exceeds the next by at most {float(gaps[wrong].max()):.2g}",
        )

    def _read_rows(self, point: str) -> Tensor | None:
        """A tensor of the layer's MLP at all compared tokens; None if the dump has none."""
        dump = self.comparer.dump
        site = dump.find_site(f"decoder.layers.{self.number}.mlp.{point}")
        if site is None:
            return None
        rows = self.comparer.list_rows(site)
        parts = []
        for number, match in self.matches.items():
            positions = self.layer.positions[self.layer.requests == number] + match.offset
            if len(positions):
                stored = rows[match.sequence]
                parts.append(stored.read(stored.find_rows(positions)[0]))
        return torch.cat(parts)

    def _read_gaps(self) -> Tensor | None:
        """By how much the last chosen expert's logit exceeds the next one's: `[token]`."""
        logits, chosen = self._read_rows("router:logits"), self.comparer.dump.experts_per_token
        if logits is None or not 0 < chosen < logits.shape[-1]:
            return None
        ordered = logits.sort(-1, descending=True).values
        return ordered[:, chosen - 1] - ordered[:, chosen]

    def _find_routing(self) -> Cause | None:
        """Whether the difference is a combination of the chosen experts' outputs: only the router differs."""
        outputs = self._read_rows("experts:output") if self.alone else None
        if outputs is None:
            return None
        difference = self._read_difference()
        factors, inside = _fit_outputs(outputs, difference)
        factors, inside = factors[self.layer.counted], inside[self.layer.counted]
        share = float(inside.double().mean())
        if share < MOST:
            return None
        text = (
            f"in {share:.0%} of {len(inside):,} tokens the difference after {self.where} is a combination of "
            "the outputs of the token's experts: their routing weights differ, the experts do not"
        )
        distance = self._measure_grid(factors, inside)
        if distance is not None and distance <= ON_GRID:
            text += f"; the rollout's logits of the router are {distance:.2g} steps from the grid of bf16"
            return Cause("bf16 router", text)
        return Cause("routing weights", text)

    def _read_difference(self) -> Tensor:
        """Rollout minus training run after the layer, in the order of the compared tokens."""
        parts = []
        for number, match in self.matches.items():
            positions = self.layer.positions[self.layer.requests == number]
            if len(positions):
                request = self.requests[number]
                pairs = self.comparer.read_states(request, match, self.layer.layer, positions)
                parts += [theirs - ours for ours, theirs in pairs]
        return torch.cat(parts)

    def _measure_grid(self, factors: Tensor, inside: Tensor) -> float | None:
        """How far differences of two logits of the rollout's router are from bf16's grid, in its steps."""
        logits, indices = self._read_rows("router:logits"), self._read_rows("experts:indices")
        if logits is None or indices is None or indices.shape[-1] < 2:
            return None
        chosen = logits.gather(-1, indices.long().clamp(min=0))[self.layer.counted, :2]
        ratios = (1 + factors[:, :2]).clamp(min=torch.finfo(torch.float64).tiny).log()
        pair = chosen + ratios
        exponents = chosen.abs().clamp(min=2.0**-60).log2().floor() - BF16_MANTISSA
        steps = 2.0 ** exponents.amin(-1)
        usable = inside & (steps >= LEAST_STEP)
        if int(usable.sum()) < MIN_TOKENS:
            return None
        places = (pair[:, 0] - pair[:, 1])[usable] / steps[usable]
        return float((places - places.round()).abs().mean())


def _fit_outputs(outputs: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of each expert's output in the difference, and for which tokens they explain it."""
    solution: Any = torch.linalg.lstsq(outputs.mT, difference[..., None])
    factors: Tensor = solution.solution
    rest = (difference - (outputs.mT @ factors)[..., 0]).norm(dim=-1)
    return factors[..., 0], rest <= SPANNED * difference.norm(dim=-1)


def _correlate_ranks(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation."""
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])
