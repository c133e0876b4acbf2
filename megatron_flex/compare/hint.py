"""A line of evidence about the first divergence, with the cause that it names."""

from __future__ import annotations

from typing import Literal

Cause = Literal[
    "auxiliary loss",
    "configuration",
    "constant factor",
    "dropped tokens",
    "gradients of parameters",
    "keys and values",
    "layers or experts",
    "mask",
    "not finite",
    "order",
    "place",
    "reduction",
    "rotary angles",
    "router",
    "rows of experts",
    "same vector",
    "swapped",
    "zero",
]


class Hint(str):
    """A line of evidence.

    Attributes:
        cause: the cause, or `place` for what only says where the error is.
    """

    cause: Cause

    def __new__(cls, cause: Cause, text: str) -> Hint:
        """Make a line that names a cause."""
        made = super().__new__(cls, text)
        made.cause = cause
        return made
