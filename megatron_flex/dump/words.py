"""Plans in words: bytes, ranks, rows of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_flex.progress import in_bytes

if TYPE_CHECKING:
    from megatron_flex.dump.plan import PlannedRank, PlannedSite

__all__ = ["in_bytes", "rank_in_words", "row_of", "shape_in_words", "unnumbered"]


def shape_in_words(dims: Sequence[str], shape: Sequence[int | str]) -> str:
    """`[sample 8, token 16, h 512]`; `[s, b, h 512]` where only the data tell."""
    pairs = zip(dims, shape, strict=False)
    return "[" + ", ".join(d if d == n else f"{d} {n}".strip() for d, n in pairs) + "]"


def rank_in_words(rank: PlannedRank) -> str:
    """Its bytes, and which it is."""
    coords = ", ".join(f"{a} {n}" for a, n in rank.coords.items() if a in ("pp", "dp", "cp", "tp"))
    return f"{in_bytes(rank.bytes)} (rank {rank.rank}: {coords})"


def unnumbered(name: str) -> str:
    """A name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=[.:]|$)", ".*", name)


def row_of(group: list[PlannedSite]) -> tuple[str, str, str, str, str, str]:
    """A row of a table for tensors that are alike."""
    first = group[0]
    name = first.name if len(group) == 1 else f"{unnumbered(first.name)} ({len(group)})"
    stages = sorted({s.stage for s in group})
    told = f"{stages[0]}-{stages[-1]}" if len(stages) > 1 else str(stages[0])
    about = "~" if first.expected else ""
    kind = "" if first.kind in ("value", "parameter") else ".grad"
    return (
        name + kind,
        told,
        "x".join(map(str, first.shape)) or "1",
        first.layout,
        about + in_bytes(first.rank_bytes),
        about + in_bytes(sum(s.bytes for s in group)),
    )
