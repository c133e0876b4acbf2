"""Why log-probabilities differ, from tokens and logits alone: a cause is named if others are excluded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.rollout.rollout_table import Request
from megatron_flex.rollout.token_differences import TokenDifferences
from megatron_flex.rollout.token_matching import Match
from megatron_flex.rollout.training_dump import LogProbabilities, TrainingDump
from megatron_flex.wording import count_words

MIN_TOKENS = 8  # fewer show no cause
MAX_SHIFT = 4  # positions
FIT_TOKENS = 48  # whose logits are read to find a temperature
MAX_TEMPERATURE = 16.0  # and its inverse
GRID = 32  # temperatures, among which the search begins
STEPS = 50  # of the search, each of which shortens the interval to 0.62
FIT = 0.2  # of the root mean square of the differences, which a cause that explains them leaves at most
ALL = 0.9  # of the tokens
GOLDEN = (math.sqrt(5) - 1) / 2


class Cause(NamedTuple):
    """A cause.

    Attributes:
        name: such as `temperature`.
        text: the evidence.
    """

    name: str
    text: str


class TokenExplainer:
    """Explains the differences of log-probabilities.

    Args:
        requests: of the table.
        matches: where they are in the dump, by their number.
        tokens: the compared tokens, with bounds.
        training: the dump.
        temperature: by which logits were divided.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        matches: Mapping[int, Match],
        tokens: TokenDifferences,
        training: TrainingDump,
        temperature: float,
    ) -> None:
        self.requests, self.matches, self.tokens = requests, matches, tokens
        self.training, self.temperature = training, temperature

    def explain(self) -> tuple[list[Cause], list[str]]:
        """The causes, and what was measured if there is none."""
        causes = [c for c in (self._find_other_tokens(), self._find_offset()) if c is not None]
        beyond = int(self.tokens.beyond.sum())
        if beyond and len(self.tokens.tokens) >= MIN_TOKENS:
            fitted = self._find_temperature() or self._find_shift()
            causes += [fitted] if fitted is not None else []
        measured = [] if causes or not beyond else [self._measure_positions()]
        return causes, [line for line in measured if line]

    def _find_other_tokens(self) -> Cause | None:
        """Whether requests have other tokens than the dump."""
        differing = {n: m for n, m in self.matches.items() if bool(m.differing.any())}
        missing = [r.name for n, r in enumerate(self.requests) if n not in self.matches]
        if not differing and not missing:
            return None
        if not differing:
            text = f"no sequence of the dump has the tokens of request {missing[0]}"
            rest = f", and of {len(missing) - 1} more" if len(missing) > 1 else ""
            return Cause("tokens differ", text + rest)
        number, match = next(iter(differing.items()))
        request, at = self.requests[number], int(match.differing.nonzero()[0])
        position, token = int(request.positions[at]), int(request.tokens[at])
        sequence = self.training.sequences[match.sequence]
        theirs = int(sequence.find_tokens(torch.tensor([position + match.offset]))[0])
        return Cause(
            "tokens differ",
            f"request {request.name} has token {token} at position {position}, sequence {match.sequence} of "
            f"the dump {theirs}; tokens differ in {count_words(len(differing) + len(missing), 'request')}",
        )

    def _find_offset(self) -> Cause | None:
        """Whether the tokens of all requests are some positions apart from the dump's."""
        offsets = Counter(match.offset for match in self.matches.values())
        (offset, count), *others = offsets.most_common() or [(0, 0)]
        if others or offset == 0 or abs(offset) > MAX_SHIFT:
            return None
        equal = not bool(self.tokens.beyond.any())
        return Cause(
            "positions shifted",
            f"position p of the rollout is position p{offset:+d} of the dump in "
            f"{count_words(count, 'request')}; there the log-probabilities "
            f"{'agree' if equal else 'differ'}",
        )

    def _find_temperature(self) -> Cause | None:
        """Whether one temperature explains all differences."""
        if not self.training.has_logits:
            return None
        fitted = self._fit_temperature()
        if fitted is None:
            return None
        parts = [
            self.training.read_logprobs(match.sequence, positions, tokens, fitted)[0]
            for match, positions, tokens in self._list_tokens()
        ]
        training = LogProbabilities(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        rest = training.values - self.tokens.rollout
        if not self._explains(rest):
            return None
        return Cause(
            "temperature",
            f"the rollout's log-probabilities are those of the training run's logits divided by "
            f"{fitted:.4g}, not {self.temperature:.4g}: the root mean square of the differences falls from "
            f"{_rms(self.tokens.differences):.2g} to {_rms(rest):.2g}",
        )

    def _explains(self, rest: Tensor, among: Tensor | None = None) -> bool:
        """Whether what a cause leaves of the differences is round-off."""
        chosen = torch.ones(len(rest), dtype=torch.bool) if among is None else among
        before, bounds = self.tokens.differences[chosen], self.tokens.bounds[chosen]
        within = float((rest.abs() <= bounds).double().mean())
        return within >= ALL and _rms(rest) <= FIT * _rms(before)

    def _list_tokens(self) -> list[tuple[Match, Tensor, Tensor]]:
        """The compared tokens of each request: where it is, positions in the dump, and tokens."""
        numbers = self.tokens.requests.unique_consecutive().tolist()
        out = []
        for number in numbers:
            of_request, match = self.tokens.requests == number, self.matches[number]
            positions = self.tokens.positions[of_request] + match.offset
            out.append((match, positions, self.tokens.tokens[of_request]))
        return out

    def _fit_temperature(self) -> float | None:
        """The temperature that fits the tokens with the greatest differences; None if none fits."""
        order = self.tokens.differences.abs().argsort(descending=True)[:FIT_TOKENS]
        logits = []
        for at in order.tolist():
            match = self.matches[int(self.tokens.requests[at])]
            position = int(self.tokens.positions[at]) + match.offset
            logits.append(self.training.read_logits(match.sequence, position))
        stacked, tokens = torch.stack(logits), self.tokens.tokens[order, None]
        target = self.tokens.rollout[order]

        def misfit(logarithm: float) -> float:
            scaled = stacked / math.exp(logarithm)
            values = scaled.gather(-1, tokens)[:, 0] - scaled.logsumexp(-1)
            return _rms(values - target)

        step = 2 * math.log(MAX_TEMPERATURE) / GRID
        nearest = min((step * (n - GRID // 2) for n in range(GRID + 1)), key=misfit)
        best = _find_minimum(misfit, nearest - step, nearest + step)
        fits = misfit(best) <= FIT * _rms(self.tokens.differences[order])
        return math.exp(best) if fits else None

    def _find_shift(self) -> Cause | None:
        """Whether log-probabilities are those of tokens a few positions away."""
        for shift in (s for by in range(1, MAX_SHIFT + 1) for s in (by, -by)):
            sources, targets = self._pair(shift)
            if len(sources) < MIN_TOKENS:
                continue
            rest = self.tokens.training.values[targets] - self.tokens.rollout[sources]
            within = float((rest.abs() <= self.tokens.bounds[targets]).double().mean())
            if within >= ALL and _rms(rest) <= FIT * _rms(self.tokens.differences[sources]):
                return Cause(
                    "log-probabilities shifted",
                    f"the rollout's log-probability at position p is the training run's at p{shift:+d}, in "
                    f"{len(sources):,} tokens: the root mean square of the differences falls to "
                    f"{_rms(rest):.2g}",
                )
        return None

    def _pair(self, shift: int) -> tuple[Tensor, Tensor]:
        """Tokens, and those `shift` positions later in the same request."""
        span = int(self.tokens.positions.max()) + 2 * MAX_SHIFT + 1
        keys = self.tokens.requests * span + self.tokens.positions + MAX_SHIFT
        wanted = keys + shift
        rows = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        sources = (keys[rows] == wanted).nonzero().flatten()
        return sources, rows[sources]

    def _measure_positions(self) -> str:
        """Where the tokens are that differ."""
        beyond = self.tokens.beyond
        count = f"{int(beyond.sum()):,} of {len(beyond):,} tokens"
        first = self.tokens.positions == 1
        if bool(first.any()) and not bool((beyond & first).any()) and bool(beyond.any()):
            return f"{count} differ, none of the {int(first.sum())} at position 1, which follow one token"
        requests = len(self.tokens.requests[beyond].unique())
        return f"{count} differ, in {count_words(requests, 'request')}"


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _find_minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one minimum has it, by golden sections."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2
