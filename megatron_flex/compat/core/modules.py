"""A module to stand on where a model has none."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

T = TypeVar("T")


class DummyModule(nn.Module):
    """The identity: put one where a tensor passes that no module returns, and hook it."""

    def forward(self, inputs: T) -> T:
        """Return what came in."""
        return inputs
