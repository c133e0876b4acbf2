"""A module to insert where a tensor is no module's output."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

T = TypeVar("T")


class DummyModule(nn.Module):
    """The identity: insert one to hook a tensor that is no module's output."""

    def forward(self, inputs: T) -> T:
        """Return the input."""
        return inputs
