"""Differences of gloo from NCCL: it reads a sent tensor late, and gathers only shards of equal size.

Megatron swaps the storage of a tensor right after it started to send it; gloo reads the tensor until the
work is done. Expert parallel with tensor parallel experts gathers and scatters shards of unequal size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.cpu.patches import Patches


class FinishedWork:
    """The work of a collective that has finished before it returned."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Whether it is done: always."""
        return True


def _is_gloo(group: Any) -> bool:
    return "gloo" in dist.get_backend(group)


def _differ_in_shape(shards: Sequence[torch.Tensor]) -> bool:
    return any(shard.shape != shards[0].shape for shard in shards)


def _send_alias(isend: Callable[..., Any]) -> Callable[..., Any]:
    def isend_alias(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Send another tensor over the same storage, which stays when the sender's is swapped."""
        return isend(tensor.detach(), *args, **kwargs)

    return isend_alias


def _gather_unequal(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    def gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """`all_gather`; shards of unequal size are broadcast, each by its owner."""
        if not _differ_in_shape(tensor_list) or not _is_gloo(group):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for owner, shard in enumerate(tensor_list):
            run_collective(dist.broadcast, shard, group=group, group_src=owner)
        return FinishedWork() if async_op else None

    return gather


def _scatter_unequal(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """`reduce_scatter`; shards of unequal size are reduced, each to its owner."""
        if not _differ_in_shape(input_list) or not _is_gloo(group):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        for owner, shard in enumerate(input_list):
            # gloo sums in place on every rank, and the caller keeps its shards.
            total = shard.clone()
            run_collective(dist.reduce, total, op=op, group=group, group_dst=owner)
            if owner == dist.get_rank(group):
                output.copy_(total)
        return FinishedWork() if async_op else None

    return scatter


def install_gloo_wrappers(patches: Patches) -> None:
    """Wrap the three calls in `torch.distributed`, if torch was built with it."""
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    wrappers = {"isend": _send_alias, "all_gather": _gather_unequal, "reduce_scatter": _scatter_unequal}
    for name, wrap in wrappers.items():
        # One object in both modules: batched sends are recognised by identity.
        wrapped = wrap(getattr(c10d, name))
        for module in (c10d, dist):
            patches.set(module, name, wrapped)
