"""Norms in plain torch that Megatron's local layers can use under sequence parallel.

Sequence parallel needs nothing of a norm but a mark on its parameters: each rank sees a part of the
sequence, so Megatron sums the gradients of marked parameters over the tensor parallel group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron_flex.errors import FlexError


class FlexLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, with the weight stored around zero if asked (`zero_centered`)."""

    def __init__(self, hidden_size: int, eps: float, zero_centered: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        if zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; shape and layout are those of `input`."""
        if not self.zero_centered:
            return super().forward(input)
        shape = list(self.normalized_shape)
        return nn.functional.layer_norm(input, shape, self.weight + 1, self.bias, self.eps)


class FlexRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, with the weight stored around zero if asked (`zero_centered`)."""

    def __init__(self, hidden_size: int, eps: float, zero_centered: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        if zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; shape and layout are those of `x`."""
        if not self.zero_centered:
            return super().forward(x)
        return nn.functional.rms_norm(x, list(self.normalized_shape), self.weight + 1, self.eps)


_NORM_CLASSES: dict[str, type[FlexLayerNorm] | type[FlexRMSNorm]] = {
    "LayerNorm": FlexLayerNorm,
    "RMSNorm": FlexRMSNorm,
}


def build_norm(config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:
    """The norm that a Megatron `config` asks for (`config.normalization`), over `hidden_size` features.

    Its parameters carry `sequence_parallel`, as Megatron's gradient reduction expects. Which kernel is
    asked for (`persist_layer_norm`, `memory_efficient_layer_norm`) makes no difference here.

    Raises:
        FlexError: if `config.normalization` is neither "LayerNorm" nor "RMSNorm".
    """
    kind = _NORM_CLASSES.get(config.normalization)
    if kind is None:
        known = " or ".join(_NORM_CLASSES)
        raise FlexError(f"normalization {config.normalization!r} has no plain torch norm; use {known}")
    norm = kind(hidden_size, eps, bool(config.layernorm_zero_centered_gamma))
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
