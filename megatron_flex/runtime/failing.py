"""What went wrong on some ranks, raised on all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch.distributed as dist

from megatron_flex.collectives import gather_objects
from megatron_flex.errors import AbsentError, HookError
from megatron_flex.mesh import Mesh

MAX_ERRORS = 4  # errors that are told before it is said how many more there are


def raise_on_all_ranks(failure: tuple[str, BaseException] | None, mesh: Mesh) -> NoReturn:
    """Raise what any rank says. Collective over the mesh, once some rank has something to say.

    Args:
        failure: this rank's, in words, and the error; None if it has none.
        mesh: the axes.

    Raises:
        HookError: on every rank; it names the ranks that each error came up on.
    """
    reports = gather_objects((global_rank(), failure and failure[0]), mesh, [a.name for a in mesh])
    found = group_ranks((rank, message) for rank, message in reports if message)
    messages = [f"{message}{format_on_ranks(ranks)}" for message, ranks in found.items()]
    more = f"; and {len(messages) - MAX_ERRORS} more" if len(messages) > MAX_ERRORS else ""
    kind = type(failure[1]) if failure and isinstance(failure[1], AbsentError) else HookError
    raise kind("; ".join(messages[:MAX_ERRORS]) + more) from (failure and failure[1])


def group_ranks(reports: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """The ranks that say the same, by what they say."""
    out: dict[str, list[int]] = {}
    for rank, message in reports:
        out.setdefault(message, []).append(rank)
    return out


def global_rank() -> int:
    """This rank's number in the job."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def format_on_ranks(ranks: Sequence[int]) -> str:
    """` (on rank 3)`, ` (on ranks 0-3, 8)`; nothing in a job of one rank."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    reports = ", ".join("-".join(map(str, run)) for run in runs)
    return f" (on rank{'s' if len(ranks) > 1 else ''} {reports})"
