"""What finished statistics are handed to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_flex.statistics.measured import TensorStatistics


class Sink(Protocol):
    """Something that keeps statistics; there is one on every rank, and nothing in it is collective.

    Attributes:
        wanted: whether this rank's has any use for them; the numbers need not be made where none has.
    """

    @property
    def wanted(self) -> bool: ...

    def write(self, iteration: int, rows: Sequence[TensorStatistics]) -> None:
        """Keep those of an iteration: a row for each tensor that passed in it. No error is raised."""

    def close(self) -> None:
        """The last ones were written."""
