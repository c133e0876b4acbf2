"""Setting it up: the ranks whose reads go to one leader find out which of them share memory."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_flex.collectives.leader_gather import REPLICA_AXES
from megatron_flex.collectives.shared.across import NodeExchange
from megatron_flex.collectives.shared.board import SharedMemoryTransport
from megatron_flex.collectives.transport.node_sockets import NodeServer, NodeConnection, connect_to_node
from megatron_flex.collectives.shared.rooms import Member
from megatron_flex.collectives.shared.segment import remove_stale_files
from megatron_flex.collectives.shared.slots import SlotRing
from megatron_flex.collectives.rank_agreement import gather_objects
from megatron_flex.config import flex_config
from megatron_flex.mesh import Mesh


def open_shared_memory(mesh: Mesh) -> SharedMemoryTransport | None:
    """A board for the ranks of a stage; None, on all of them alike, where each read must be gathered.

    Collective over the axes that a stage's tensors are cut along.
    """
    axes = [a.name for a in mesh if a.name not in REPLICA_AXES and a.size > 1]
    if not axes:
        return None
    door = _open_server()
    member = Member(dist.get_rank(), {a: mesh[a].coord for a in axes}, flex_config.node or _node_name())
    told = gather_objects((member, door.name if door else "", flex_config.shared_bytes), mesh, axes)
    members = [m for m, _, _ in told]
    me = members.index(member)
    firsts = [i for i, m in enumerate(members) if m.node not in [n.node for n in members[:i]]]
    first = next(i for i in firsts if members[i].node == member.node)
    line, across, good = None, None, min(most for _, _, most in told) > 0
    if good and me != first:
        line = connect_to_node(told[first][1], me, f"rank {members[first].rank}")
        good = line is not None
    elif good:
        good = door is not None
        if len(firsts) > 1:
            across = _open_node_exchange([members[i].rank for i in firsts], member.rank)
            good = good and across is not None
    if not all(gather_objects(good, mesh, axes)):
        if line is not None:
            line.close()
        if door is not None:
            door.close()
        return None
    lines: dict[int, NodeConnection] = {} if line is None else {first: line}
    ring = None
    if me == first and door is not None:
        near = {i: f"rank {m.rank}" for i, m in enumerate(members) if m.node == member.node and i != me}
        lines = door.let_in(near)
        remove_stale_files(flex_config.shared_folder)
        ring = SlotRing(flex_config.shared_folder, flex_config.shared_bytes)
    if door is not None:
        door.close()
    return SharedMemoryTransport(members, me, mesh, lines, ring, across)


def _open_server() -> NodeServer | None:
    if sys.platform != "linux":
        return None
    try:
        return NodeServer()
    except OSError:  # a sandbox without such sockets
        return None


def _open_node_exchange(firsts: list[int], rank: int) -> NodeExchange | None:
    try:
        group = dist.new_group(firsts, backend="gloo", use_local_synchronization=True)
    except RuntimeError:  # no network that gloo can use, or a build without it
        return None
    return NodeExchange(group, firsts, rank)


def _node_name() -> str:
    """The same for processes that can reach each other by abstract sockets, which go by network namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
