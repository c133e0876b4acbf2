"""The differences of log-probabilities, token by token, and which of them are beyond round-off.

The round-off of a log-probability follows from that of the logits before it: their relative error, which has
the bound of `megatron_flex.compare`, times their spread, times how far the log-probability follows a logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_flex.rollout.training_dump import LogProbabilities

MIN_BEFORE = 16  # tokens, from which the noise is measured
MEASURED_MARGIN = 10.0  # of the greatest difference of a token over the root mean square of those before it
LEAST_SHARE = 1 / 3  # of the derived bound: the first tokens of a sequence have less noise than later ones


@dataclass(frozen=True)
class TokenDifferences:
    """The compared tokens, in the order of the table.

    Attributes:
        requests: the number of the request of each token: `[token]`.
        positions: likewise, in the request.
        tokens: likewise.
        rollout: the log-probability of the table.
        training: that of the dump.
        bounds: how far they may differ; empty until `with_bounds`.
    """

    requests: Tensor
    positions: Tensor
    tokens: Tensor
    rollout: Tensor
    training: LogProbabilities
    bounds: Tensor

    @staticmethod
    def join(parts: Sequence[TokenDifferences]) -> TokenDifferences:
        """Those of several requests."""
        training = zip(*(part.training for part in parts), strict=True)
        return TokenDifferences(
            torch.cat([part.requests for part in parts]),
            torch.cat([part.positions for part in parts]),
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.rollout for part in parts]),
            LogProbabilities(*(torch.cat(tensors) for tensors in training)),
            torch.zeros(0, dtype=torch.float64),
        )

    @property
    def differences(self) -> Tensor:
        """Training minus rollout."""
        return self.training.values - self.rollout

    @property
    def relative(self) -> Tensor:
        """The relative error of the logits that explains each difference."""
        excess = (self.differences.abs() - self.training.floors).clamp(min=0)
        return excess / self.training.scales.clamp(min=torch.finfo(torch.float64).tiny)

    @property
    def beyond(self) -> Tensor:
        """Which tokens differ by more than round-off."""
        return self.differences.abs() > self.bounds

    def with_bounds(self, derived: float) -> TokenDifferences:
        """With a bound for each token: derived, or measured on the tokens before the first that is beyond it.

        Args:
            derived: the greatest relative error of logits that round-off explains.
        """
        relative = self.relative
        limits = torch.full_like(relative, derived)
        if len(relative) > MIN_BEFORE:
            counts = torch.arange(1, len(relative), dtype=torch.float64)
            noise = (relative.square().cumsum(0)[:-1] / counts).sqrt()
            limits[1:] = (MEASURED_MARGIN * noise).clamp(LEAST_SHARE * derived, derived)
            limits[:MIN_BEFORE] = derived
        beyond = (relative > limits).nonzero().flatten()
        if len(beyond):  # what differs more is not noise, and must not widen the bounds of later tokens
            limits[beyond[0] :] = limits[beyond[0]]
        return replace(self, bounds=limits * self.training.scales + self.training.floors)
