"""Plans in words: bytes, ranks, rows of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_flex.progress import format_bytes

if TYPE_CHECKING:
    from megatron_flex.dump.plan import RankDumpEstimate, SiteDumpEstimate

__all__ = ["format_bytes", "format_rank", "format_site_row", "format_shape", "strip_numbers"]


def format_shape(dims: Sequence[str], shape: Sequence[int | str]) -> str:
    """`[sample 8, token 16, h 512]`; `[s, b, h 512]` where only the data tell."""
    pairs = zip(dims, shape, strict=False)
    return "[" + ", ".join(d if d == n else f"{d} {n}".strip() for d, n in pairs) + "]"


def format_rank(rank: RankDumpEstimate) -> str:
    """Its bytes, and which it is."""
    coords = ", ".join(f"{a} {n}" for a, n in rank.coords.items() if a in ("pp", "dp", "cp", "tp"))
    return f"{format_bytes(rank.bytes)} (rank {rank.rank}: {coords})"


def strip_numbers(name: str) -> str:
    """A name without the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=[.:]|$)", ".*", name)


def format_site_row(group: list[SiteDumpEstimate]) -> tuple[str, str, str, str, str, str]:
    """A row of a table for tensors that are alike."""
    first = group[0]
    name = first.name if len(group) == 1 else f"{strip_numbers(first.name)} ({len(group)})"
    stages = sorted({s.stage for s in group})
    stage_text = f"{stages[0]}-{stages[-1]}" if len(stages) > 1 else str(stages[0])
    about = "~" if first.expected else ""
    kind = "" if first.kind in ("value", "parameter") else ".grad"
    return (
        name + kind,
        stage_text,
        "x".join(map(str, first.shape)) or "1",
        first.layout,
        about + format_bytes(first.rank_bytes),
        about + format_bytes(sum(s.bytes for s in group)),
    )
