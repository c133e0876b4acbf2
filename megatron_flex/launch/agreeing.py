"""What may fail on one rank alone, done so that all ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from megatron_flex.collectives import gather_objects
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh

MAX_RANKS_SHOWN = 8  # ranks that an error names before it says how many more there are
T = TypeVar("T")


def job_mesh() -> Mesh:
    """All ranks of the job, as one axis."""
    if not (dist.is_available() and dist.is_initialized()):
        return Mesh()
    size = dist.get_world_size()
    return Mesh((Axis("job", size, dist.get_rank(), None, tuple(range(size))),))


def run_or_raise_on_all(mesh: Mesh, act: Callable[[], T]) -> T:
    """Do what may fail on some ranks, and raise on all if it did. Collective over the mesh.

    Returns:
        What `act` did.

    Raises:
        FlexError: on the ranks where nothing failed, with what the others say.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = act()
    except Exception as caught:  # told to all, and raised as it is
        error = caught
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    reports = gather_objects((rank, None if error is None else _error_text(error)), mesh, [a.name for a in mesh])
    if error is not None:
        raise error
    wrong: dict[str, list[int]] = {}
    for who, what in reports:
        if what is not None:
            wrong.setdefault(what, []).append(who)
    if wrong:
        raise FlexError("; ".join(f"{what} (rank {_list_first_ranks(who)})" for what, who in wrong.items()))
    return cast(T, result)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, FlexError) else f"{type(error).__name__}: {error}"


def _list_first_ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - MAX_RANKS_SHOWN} more" if len(ranks) > MAX_RANKS_SHOWN else ""
    return ", ".join(map(str, ranks[:MAX_RANKS_SHOWN])) + more
