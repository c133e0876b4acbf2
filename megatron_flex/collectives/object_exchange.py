"""Exchanges of objects whose size on a rank does not grow with the number of ranks that have the same.

`gather_objects` has every rank hold the item of every other: it is for few ranks, such as pipeline stages,
and for errors.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_flex.collectives.gather_scatter import broadcast_from_first
from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.collectives.host_groups import device_of, global_rank
from megatron_flex.collectives.rank_agreement import (
    all_gather_pickled,
    equal_over_ranks,
    gather_objects,
    max_over_ranks,
)
from megatron_flex.errors import FlexError, list_some
from megatron_flex.mesh import Mesh

ItemT = TypeVar("ItemT")
MAX_RANKS_SHOWN = 8  # ranks that an error names; others are only counted
EXPERT_AXIS = "ep"  # experts differ along it, and the items of ranks that hold the same ones are equal


def gather_distinct(item: ItemT, mesh: Mesh, axes: Sequence[str] | None = None) -> list[ItemT]:
    """The distinct items of all ranks, that of the first rank first; the same list on all ranks.

    Along each axis ranks compare digests, and send items only where they differ. Equal items are recognised
    by their pickled bytes. Collective over `axes`.

    Args:
        item: this rank's item.
        mesh: the run's axes.
        axes: the axes; by default those of the mesh.
    """
    names = list(axes or (axis.name for axis in mesh))
    if axes is None and "dp" in names:
        names.append(EXPERT_AXIS)
    items = [pickle.dumps(item)]
    for axis in (mesh[name] for name in reversed(names)):
        if axis.size == 1:
            continue
        code = int.from_bytes(hashlib.sha256(b"".join(items)).digest()[:7])
        if not equal_over_ranks(code, Mesh((axis,)), "items that may differ"):
            several = all_gather_pickled(items, axis.group)
            items = list(dict.fromkeys(pickled for of_rank in several for pickled in of_rank))
    return [pickle.loads(pickled) for pickled in items]  # noqa: S301  # ranks of this job pickled them


def gather_reports(report: ItemT | None, mesh: Mesh) -> list[tuple[int, ItemT]]:
    """The reports of the ranks that have one, with the ranks. Collective over the mesh.

    Where no rank has one, only a flag is sent.
    """
    if not max_over_ranks([int(report is not None)], mesh, "whether a rank reports")[0]:
        return []
    reports = gather_objects((global_rank(), report), mesh, [axis.name for axis in mesh])
    return [(who, rank_report) for who, rank_report in reports if rank_report is not None]


def run_or_raise_on_all(mesh: Mesh, act: Callable[[], ItemT]) -> ItemT:
    """Call a function that may fail on some ranks; raise on all ranks if it failed. Collective over the mesh.

    Returns:
        The result of `act`.

    Raises:
        FlexError: on the ranks where `act` succeeded, with the messages of the others.
        Exception: on a rank where `act` failed, its own exception.
    """
    error: Exception | None = None
    result: ItemT | None = None
    try:
        result = act()
    except Exception as caught:  # sent to all ranks, and raised unchanged on this one
        error = caught
    reports = gather_reports(None if error is None else _error_text(error), mesh)
    if error is not None:
        raise error
    wrong: dict[str, list[int]] = {}
    for who, what in reports:
        wrong.setdefault(what, []).append(who)
    if wrong:
        texts = (f"{what} (rank {list_some(ranks, MAX_RANKS_SHOWN)})" for what, ranks in wrong.items())
        raise FlexError("; ".join(texts))
    return cast(ItemT, result)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, FlexError) else f"{type(error).__name__}: {error}"


def broadcast_object(item: Any, mesh: Mesh) -> Any:
    """The item of the first rank, on every rank; ignored elsewhere. Collective over the mesh."""
    axis = next((axis for axis in mesh if axis.size > 1), None)
    if axis is None:
        return item
    first = mesh.is_first(axis.name for axis in mesh)
    data = pickle.dumps(item) if first else b""
    (length,) = max_over_ranks([len(data)], mesh, "an object of the first rank")
    buffer = torch.zeros(length, dtype=torch.uint8)
    if first:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    buffer = broadcast_from_first(buffer.to(device_of(axis.group)), mesh).cpu()
    return pickle.loads(buffer.numpy().tobytes())  # noqa: S301  # a rank of this job pickled it


def gather_numbers_to_first(numbers: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """The numbers of all ranks on the first rank, in the order of ranks; of few or none elsewhere.

    Collective over the mesh; all ranks give as many numbers.
    """
    max_over_ranks([len(numbers)], mesh, "numbers for the first rank")
    rows = torch.tensor([list(numbers)], dtype=torch.int64)
    for axis in reversed(mesh.axes):
        if axis.size == 1:
            continue
        rows = rows.to(device_of(axis.group))
        parts = [torch.empty_like(rows) for _ in range(axis.size)] if axis.coord == 0 else None
        run_collective(dist.gather, rows, parts, dst=axis.ranks[0], group=axis.group)
        if parts is None:
            return []  # the first rank along this axis goes on
        rows = torch.cat(parts)
    return [[int(n) for n in row] for row in rows.tolist()]
