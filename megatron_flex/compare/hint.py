"""Lines of evidence about the first divergence, each with a cause, and the runs that they are found in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_flex.compare.block_sums import COMPARE_BLOCK
from megatron_flex.compare.compared_dump import ComparedDump, ComparedTensor
from megatron_flex.compare.comparison import Row

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
        hint = super().__new__(cls, text)
        hint.cause = cause
        return hint


@dataclass(frozen=True)
class ComparedRuns:
    """Both runs and all rows, in which causes of the first divergence are looked for.

    Args:
        a: the first dump.
        b: the second dump.
        rows: what was compared.
        most: bytes of one block.
    """

    a: ComparedDump
    b: ComparedDump
    rows: Sequence[Row]
    most: int = COMPARE_BLOCK

    def find_row(self, item: ComparedTensor, iteration: int) -> Row | None:
        return next((r for r in self.rows if r.name == item.name and r.iteration == iteration), None)
