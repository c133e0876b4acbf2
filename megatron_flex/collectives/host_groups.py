"""This rank, the device of a process group's tensors, and groups of gloo for messages of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

HOST, DEVICE = "cpu", "cuda"
JOIN_SECONDS = 60.0  # in which the ranks connect: a wrong network interface may fail on one rank alone


def global_rank() -> int:
    """This rank's global rank in the job; 0 where there are no process groups."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def device_of(group: Any) -> str:
    """Whose tensors the collectives of a process group take: the host's wherever it has a backend for them.

    NCCL alone has none. `get_backend` calls it "nccl", or "cuda:nccl" if the group was made by that name.
    None is the group of the job, as in torch's functions.
    """
    if dist.get_backend(group) == "nccl":
        return DEVICE
    named: Any = dist.group.WORLD if group is None else group
    kinds = {device.type for device in named._device_types}
    return HOST if HOST in kinds or not kinds else DEVICE


def open_host_group(name: str, ranks: Sequence[int], me: int) -> Any:
    """Connect the ranks. Collective over them.

    Not dist.new_group: all ranks of the job would have to call it, or a later group would reuse the name, and
    with the name the old group's entries in the store.

    Args:
        name: the same on all ranks, and different from that of every earlier group of these ranks.
        ranks: global ranks.
        me: this rank's index among them.

    Raises:
        RuntimeError: they did not connect: no network that gloo can use, or a build without it.
    """
    prefix = f"megatron_flex/{name}/{'-'.join(map(str, ranks))}"
    store = dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, me, len(ranks), timeout=timedelta(seconds=JOIN_SECONDS))


def send_to(group: Any, tensor: Tensor, index: int, tag: int = 0) -> HostWork:
    """Begin to send a tensor of the host to a member of the group; the result waits as collectives do."""
    return HostWork(group.send([tensor], index, tag), tensor)


def receive_from(group: Any, tensor: Tensor, index: int, tag: int = 0) -> HostWork:
    """Begin to receive a tensor of the host from a member of the group."""
    return HostWork(group.recv([tensor], index, tag), tensor)


class HostWork:
    """A message on its way; it holds the tensor."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> None:
        """Wait as long as torch's collectives do: the receiver may be busy with messages of other ranks."""
        self._work.wait(default_pg_timeout)
