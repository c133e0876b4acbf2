"""Ranks in lines along the axes of a run, and process groups of them."""

from __future__ import annotations

from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis

Ranks = tuple[int, ...]
GroupCache = dict[Any, list[Any]]  # by all ranks and the sizes of the axes, or by the lines, or by one line

_group_cache: WeakKeyDictionary[Any, GroupCache] = WeakKeyDictionary()  # by the process group of the whole job


def divide_ranks(ranks: Ranks, sizes: Ranks) -> list[list[Ranks]]:
    """For each axis the ranks along it, from every place on the other axes."""
    out = []
    for axis, size in enumerate(sizes):
        step = prod(sizes[axis + 1 :])
        firsts = [n for n in range(len(ranks)) if n // step % size == 0]
        out.append([tuple(ranks[first + i * step] for i in range(size)) for first in firsts])
    return out


def groups_along_axes(ranks: Ranks, sizes: Ranks, given: Any) -> list[Any]:
    """This rank's process group on each axis of more than one rank; made once for the same division."""
    known = _group_cache.setdefault(dist.group.WORLD, {})
    if (ranks, sizes) not in known:
        part = len(ranks) < dist.get_world_size()
        if part and max(sizes) == len(ranks):
            return [given if size > 1 else None for size in sizes]
        if part:
            _check_group_names(given)
        known[ranks, sizes] = [_line_group(lines, part) for lines in divide_ranks(ranks, sizes)]
    return known[ranks, sizes]


def groups_of_lines(divided: list[list[Ranks]], part: bool) -> list[Any]:
    """This rank's process group of each division of ranks into lines; made once for the same ones.

    Args:
        divided: each division.
        part: whether only a part of the job's ranks are in them, and call this.
    """
    known, key = _group_cache.setdefault(dist.group.WORLD, {}), tuple(tuple(lines) for lines in divided)
    if key not in known:
        known[key] = [_line_group(lines, part) for lines in divided]
    return known[key]


def _line_group(lines: list[Ranks], part: bool) -> Any:
    """The group of this rank's line. All ranks make all lines, unless they are only a part of the job.

    Ranks have one group in all: what another division has made for the same line is used again.
    """
    known, mine = _group_cache.setdefault(dist.group.WORLD, {}), None
    for line in lines:
        if len(line) > 1 and (not part or dist.get_rank() in line):
            if (line, part) not in known:
                known[line, part] = [dist.new_group(list(line), use_local_synchronization=part)]
            mine = known[line, part][0] if dist.get_rank() in line else mine
    return mine


def _check_group_names(group: Any) -> None:
    """Refuse where torch would name the same new group differently on its ranks, and wait for ever.

    Collective over `group`.
    """
    counts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(counts)) > 1:
        raise FlexError(
            f"the ranks of process_group are in differently many process groups ({counts}), so that torch "
            "cannot make groups among them; make the FlexModel before those, or give no process_group"
        )


def axis_of(name: str, group: Any) -> Axis:
    """The axis along a process group that a framework has made already; of one rank if it is None."""
    if group is None:
        return Axis(name)
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), dist.get_rank(group), group if len(ranks) > 1 else None, ranks)
