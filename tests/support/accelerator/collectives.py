"""NCCL's rules for the collectives of the simulated device, which gloo carries out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.accelerator.recording import Collective
from tests.support.accelerator.streams import device_of_process

# Which argument of an operation has the same shapes on all ranks; the others differ rightly.
COMMON = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_"), 0),
    **dict.fromkeys(("gather_", "reduce_scatter_", "_allgather_base_"), 1),
    **dict.fromkeys(("scatter_", "_reduce_scatter_base_", "send", "recv_"), 0),
}
FOR_TWO = ("send", "recv_")
UNKNOWN_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.complex128)

_host_groups: set[str] = set()  # the names of those that were made for gloo, as long as this process lives


def is_nccl(group: Any) -> bool:
    """Whether a process group simulates one of NCCL."""
    return (dist.group.WORLD if group is None else group).group_name not in _host_groups


def made(group: Any, backend: str | None) -> None:
    """Note the backend for which a process group was made."""
    if backend is not None and "nccl" not in backend and isinstance(group, dist.ProcessGroup):
        _host_groups.add(group.group_name)


def check_split(ranks: Any) -> None:
    """Refuse a group that its members alone make while the job's group is bound to a device.

    torch then splits NCCL's communicator of the job, which waits for all its ranks.
    """
    job: Any = dist.group.WORLD
    if ranks is not None and len(ranks) < dist.get_world_size() and job.bound_device_id is not None:
        what = f"ncclCommSplit for ranks {list(ranks)} waits for all ranks of the job"
        raise RuntimeError(device_of_process().recording.violation(what))


def run_collective(func: Any, args: Any, kwargs: Any, kind: type[Tensor]) -> Any:
    """Run an operation of torch.distributed on the bytes of tensors of the device."""
    device = device_of_process()
    name = func._schema.name.partition("::")[2]
    group = dist.ProcessGroup.unbox(
        next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    )
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if name != "barrier":
        if why := _refused(name, args, tensors, is_nccl(group), kind):
            raise RuntimeError(device.recording.violation(f"{name} of {group.group_name}: {why}"))
        device.recording.collectives.append(_describe(name, group, args))
    elif is_nccl(group):
        device.recording.wait("a barrier")
    ours = {id(t.host): t for t in tensors if isinstance(t, kind)}  # type: ignore[attr-defined]
    for tensor in ours.values():
        if not device.read(tensor.memory):  # type: ignore[attr-defined]
            device.recording.violation(f"{name} of a tensor that another stream makes")
    out = func(*tree_map(_bytes, args), **tree_map(_bytes, kwargs))
    for tensor in ours.values():
        device.wrote(tensor.memory)  # type: ignore[attr-defined]
    return tree_map(lambda t: ours.get(id(t), t), out)


def _bytes(value: Any) -> Any:
    return getattr(value, "host", value) if isinstance(value, Tensor) else value


def _refused(name: str, args: Any, tensors: list[Tensor], nccl: bool, kind: type[Tensor]) -> str:
    """Why the group's backend refuses the tensors; empty if it does not."""
    on_device = [isinstance(t, kind) for t in tensors]
    if nccl and not all(on_device):
        return "NCCL got a tensor of the CPU"
    if not nccl:
        return "gloo got a tensor of the device" if any(on_device) else ""
    if unknown := [t.dtype for t in tensors if t.dtype in UNKNOWN_DTYPES]:
        return f"NCCL does not know {unknown[0]}"
    if not all(t.is_contiguous() for t in tensors):
        return "NCCL got a tensor that is not contiguous"
    if name in ("gather_", "scatter_") and len({(t.shape, t.dtype) for t in tensors}) > 1:
        return f"NCCL got tensors of different sizes: {[tuple(t.shape) for t in tensors]}"
    return ""


def _describe(name: str, group: Any, args: Any) -> Collective:
    ranks = tuple(dist.get_process_group_ranks(group))
    at = COMMON.get(name)
    common = [] if at is None else [t for t in tree_leaves(args[at]) if isinstance(t, Tensor)]
    tensors = tuple((tuple(t.shape), str(t.dtype)) for t in common)
    if name in FOR_TWO:
        here, there = dist.get_rank(), ranks[args[2]]
        peers = (here, there) if name == "send" else (there, here)
        return Collective(group.group_name, ranks, "message", tensors, peers)
    roots = (
        [a for a in args if type(a) is int][:1]
        if name in ("broadcast_", "reduce_", "gather_", "scatter_")
        else []
    )
    return Collective(group.group_name, ranks, " ".join([name, *map(str, roots)]), tensors)
