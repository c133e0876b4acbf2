"""The ranks of a process group that receives features, on which all ranks of the mesh agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_flex.collectives import gather_objects, global_rank
from megatron_flex.errors import HookError
from megatron_flex.mesh import Mesh

NO_GROUP = (
    dist.GroupMember.NON_GROUP_MEMBER if dist.is_available() else None
)  # from `new_group` outside of it


@dataclass(frozen=True, slots=True)
class ReceivingRanks:
    """The ranks of the process groups that ranks gave.

    Attributes:
        ranks: global numbers, of all replicas.
        stages: the pipeline stages of those in this rank's replica.
        here: whether this rank is one of them.
        complete: whether they are all ranks of the last stage of every replica.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    here: bool
    complete: bool


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What a rank knows.

    Attributes:
        rank: its global number.
        replica: its data parallel replica.
        stage: its pipeline stage.
        group: the ranks of the group that it gave; None outside of a group.
    """

    rank: int
    replica: int
    stage: int
    group: tuple[int, ...] | None


def is_group(to: object) -> bool:
    """Whether it is a process group, or what `torch.distributed.new_group` returns outside of it."""
    if not dist.is_available():
        return False
    return isinstance(to, dist.ProcessGroup) or (type(to) is type(NO_GROUP) and to == NO_GROUP)


def gather_receiving_ranks(group: Any, mesh: Mesh) -> ReceivingRanks:
    """The ranks of the process groups that all ranks gave. Collective over the mesh.

    Raises:
        HookError: on all ranks: no rank gave a group, a group has ranks outside of a model replica, or two
            ranks of a group gave different ones.
    """
    member = isinstance(group, dist.ProcessGroup)
    ranks = tuple(sorted(dist.get_process_group_ranks(group))) if member else None
    report = GroupReport(global_rank(), mesh["dp"].coord, mesh["pp"].coord, ranks)
    reports = {r.rank: r for r in gather_objects(report, mesh, [axis.name for axis in mesh])}
    for known in reports.values():
        _check_group(known, reports)
    receivers = [r for r in reports.values() if r.group is not None]
    if not receivers:
        raise HookError(
            "features(to=group): no rank is in the group; give the result of torch.distributed.new_group, "
            "which is the group on its own ranks"
        )
    last = max(r.stage for r in reports.values())
    return ReceivingRanks(
        ranks=tuple(sorted(r.rank for r in receivers)),
        stages=tuple(sorted({r.stage for r in receivers if r.replica == report.replica})),
        here=member,
        complete={r.rank for r in receivers} == {r.rank for r in reports.values() if r.stage == last},
    )


def _check_group(known: GroupReport, reports: Mapping[int, GroupReport]) -> None:
    group = known.group or ()
    replica = sorted(r.rank for r in reports.values() if r.replica == known.replica)
    outside = [rank for rank in group if rank not in replica]
    if outside:
        raise HookError(
            f"features(to=group of ranks {list(group)}): ranks {outside} are outside the model replica of "
            f"ranks {replica}; make a group of ranks of one replica, one group for each replica"
        )
    for rank in group:
        if reports[rank].group != group:
            other = list(reports[rank].group or ()) or "none"
            raise HookError(
                f"features(to=group): rank {known.rank} gave the group of ranks {list(group)}, and rank "
                f"{rank}, which is in it, gave {other}; give it on all its ranks"
            )
