"""What a part of scripts/gpu finds: checks with their bounds, tables for the page, raw figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """Something that must hold.

    Attributes:
        what: it is.
        found: the number that was found.
        bound: the greatest that it may be; what is bit-identical has a difference of 0.
        good: whether it holds.
    """

    what: str
    found: float
    bound: float
    good: bool


@dataclass
class Findings:
    """All that one part found.

    Attributes:
        checks: each must be good.
        tables: for the page: a title, the head and the rows.
        notes: sentences for the page.
        figures: raw numbers.
    """

    checks: list[Check] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def at_most(self, what: str, found: float, bound: float) -> None:
        """Check that a number is at most `bound`; no number (NaN) is not."""
        good = found <= bound
        # JSON has neither NaN nor infinity
        self.checks.append(Check(what, found if math.isfinite(found) else -1.0, bound, good))

    def holds(self, what: str, good: bool) -> None:
        """Check something that is or is not: 0 is found where it is, 1 where it is not."""
        self.at_most(what, 0.0 if good else 1.0, 0.0)

    def same(self, what: str, got: Tensor, want: Tensor) -> None:
        """Check that two tensors have the same bits, wherever they are."""
        self.holds(what, identical(got, want))

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        self.tables.append({"title": title, "head": list(head), "rows": [list(r) for r in rows]})

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def identical(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, wherever they are; a NaN equals itself."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    ours, theirs = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
    return torch.equal(ours, theirs)
