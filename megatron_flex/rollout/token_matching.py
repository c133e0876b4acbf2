"""Which sequence of the training dump has the tokens of a request, and from which position on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.rollout.rollout_table import Request
from megatron_flex.rollout.training_dump import TrainingSequence

WINDOW = 4  # successive tokens that are looked up together
MAX_WINDOWS = 64  # of a request that are looked up
MAX_PLACES = 64  # of a window that are counted
MAX_CANDIDATES = 8  # that are compared token by token
LEAST_AGREEMENT = 0.5  # of a request's tokens
FACTORS = (1_000_003, 998_244_353, 1_000_000_007, 754_974_721)  # of the hash of a window


class Match(NamedTuple):
    """Where a request is in the dump.

    Attributes:
        sequence: the number of the sequence.
        offset: position `p` of the request is `p + offset` of the sequence.
        agreeing: for each of the request's tokens whether the sequence has it there: `[token]`.
        differing: whether the sequence has another token there: `[token]`.
    """

    sequence: int
    offset: int
    agreeing: Tensor
    differing: Tensor

    @property
    def comparable(self) -> Tensor:
        """Which of the tokens follow equal ones only: `[token]`."""
        return self.differing.cumsum(0) == 0


class TokenIndex:
    """Finds requests in the sequences of a dump by windows of tokens.

    Args:
        sequences: of the dump, by number.
    """

    def __init__(self, sequences: Sequence[TrainingSequence]) -> None:
        self._sequences = sequences
        hashes, numbers, positions = [], [], []
        for sequence in sequences:
            hashed, starts = _hash_windows(sequence.tokens, sequence.positions)
            hashes.append(hashed)
            positions.append(starts)
            numbers.append(torch.full_like(starts, sequence.number))
        self._hashes, order = torch.cat(hashes).sort(stable=True)
        self._numbers, self._positions = torch.cat(numbers)[order], torch.cat(positions)[order]

    def find(self, request: Request) -> Match | None:
        """Where a request is; None if no sequence has half of its tokens in order.

        Args:
            request: of the table.
        """
        candidates = self._find_candidates(request)
        matches = [self._match(request, number, offset) for number, offset in candidates]
        best = max(matches, key=lambda m: (int(m.agreeing.sum()), -abs(m.offset), -m.sequence), default=None)
        if best is None or float(best.agreeing.double().mean()) < LEAST_AGREEMENT:
            return None
        return best

    def _find_candidates(self, request: Request) -> list[tuple[int, int]]:
        """Sequences and offsets that have most of the windows; a short request may be in any sequence."""
        hashed, starts = _hash_windows(request.tokens, request.positions)
        if not len(starts):
            return [(sequence.number, 0) for sequence in self._sequences]
        some = torch.linspace(0, len(starts) - 1, min(len(starts), MAX_WINDOWS)).long()
        low = torch.searchsorted(self._hashes, hashed[some])
        high = torch.searchsorted(self._hashes, hashed[some], right=True).minimum(low + MAX_PLACES)
        votes: Counter[tuple[int, int]] = Counter()
        for start, first, last in zip(starts[some].tolist(), low.tolist(), high.tolist(), strict=True):
            offsets = (self._positions[first:last] - start).tolist()
            votes.update(set(zip(self._numbers[first:last].tolist(), offsets, strict=True)))
        return [place for place, _ in votes.most_common(MAX_CANDIDATES)]

    def _match(self, request: Request, number: int, offset: int) -> Match:
        tokens, present = self._sequences[number].find_tokens(request.positions + offset)
        same = tokens == request.tokens
        return Match(number, offset, present & same, present & ~same)


def _hash_windows(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A hash of each window of successive positions, and where it starts."""
    count = len(tokens) - WINDOW + 1
    if count < 1:
        return tokens[:0], positions[:0]
    hashed = torch.zeros(count, dtype=torch.int64)
    for place, factor in enumerate(FACTORS):
        hashed = hashed * 31 + (tokens[place : place + count] + 1) * factor
    unbroken = positions[WINDOW - 1 :] - positions[:count] == WINDOW - 1
    return hashed[unbroken], positions[:count][unbroken]
