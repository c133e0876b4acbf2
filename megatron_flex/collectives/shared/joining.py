"""Setting it up: the ranks whose reads go to one leader find out which of them share memory."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_flex.collectives.send import REPLICAS
from megatron_flex.collectives.shared.across import Across
from megatron_flex.collectives.shared.board import Board
from megatron_flex.collectives.shared.notes import Door, Line, knock
from megatron_flex.collectives.shared.rooms import Member
from megatron_flex.collectives.shared.segment import sweep
from megatron_flex.collectives.shared.slots import Ring
from megatron_flex.collectives.talk import everyone
from megatron_flex.knobs import knobs
from megatron_flex.mesh import Mesh


def join(mesh: Mesh) -> Board | None:
    """A board for the ranks of a stage; None, on all of them alike, where each read must be gathered.

    Collective over the axes that a stage's tensors are cut along.
    """
    axes = [a.name for a in mesh if a.name not in REPLICAS and a.size > 1]
    if not axes:
        return None
    door = _door()
    member = Member(dist.get_rank(), {a: mesh[a].coord for a in axes}, knobs.node or _node())
    told = everyone((member, door.name if door else "", knobs.shared_bytes), mesh, axes)
    members = [m for m, _, _ in told]
    me = members.index(member)
    firsts = [i for i, m in enumerate(members) if m.node not in [n.node for n in members[:i]]]
    first = next(i for i in firsts if members[i].node == member.node)
    line, across, good = None, None, min(most for _, _, most in told) > 0
    if good and me != first:
        line = knock(told[first][1], me, f"rank {members[first].rank}")
        good = line is not None
    elif good:
        good = door is not None
        if len(firsts) > 1:
            across = _across([members[i].rank for i in firsts], member.rank)
            good = good and across is not None
    if not all(everyone(good, mesh, axes)):
        if line is not None:
            line.close()
        if door is not None:
            door.close()
        return None
    lines: dict[int, Line] = {} if line is None else {first: line}
    ring = None
    if me == first and door is not None:
        near = {i: f"rank {m.rank}" for i, m in enumerate(members) if m.node == member.node and i != me}
        lines = door.let_in(near)
        sweep(knobs.shared_folder)
        ring = Ring(knobs.shared_folder, knobs.shared_bytes)
    if door is not None:
        door.close()
    return Board(members, me, mesh, lines, ring, across)


def _door() -> Door | None:
    if sys.platform != "linux":
        return None
    try:
        return Door()
    except OSError:  # a sandbox without such sockets
        return None


def _across(firsts: list[int], rank: int) -> Across | None:
    try:
        group = dist.new_group(firsts, backend="gloo", use_local_synchronization=True)
    except RuntimeError:  # no network that gloo can use, or a build without it
        return None
    return Across(group, firsts, rank)


def _node() -> str:
    """The same for processes that can reach each other by abstract sockets, which go by network namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
