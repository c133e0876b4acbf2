"""A module to insert where a tensor is not the output of a module."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

T = TypeVar("T")


class DummyModule(nn.Module):
    """The identity: insert one to hook a tensor that is not the output of a module."""

    def forward(self, inputs: T) -> T:
        return inputs
