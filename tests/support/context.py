"""Attention over context parallel ranks without Transformer Engine, for tests: gather keys and values.

Megatron's own `DotProductAttention` refuses context parallelism. This one gives it whole keys and values in
the order of the sequence, and a causal mask by the queries' places in the whole; the rest is Megatron's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def places(length: int, size: int, rank: int) -> Tensor:
    """Which positions of a sequence a context parallel rank has: chunks `rank` and `2 size - 1 - rank`."""
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def here(length: int) -> Tensor:
    """The positions that this rank has; all of them without context parallelism."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    return (
        places(length, size, parallel_state.get_context_parallel_rank()) if size > 1 else torch.arange(length)
    )


def total(loss: Tensor) -> Tensor:
    """The sum of the context parallel ranks' losses, as Megatron's own loss functions report it."""
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    return loss


class Gather(torch.autograd.Function):
    """The whole sequence, in order, of which each rank has its part; backward sums what all ranks want.

    `order` says where the ranks' entries, one after the other, belong.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, order: Tensor | None = None) -> Tensor:
        size, ctx.group = dist.get_world_size(group), group
        if order is None:
            order = torch.cat([places(part.shape[0] * size, size, r) for r in range(size)])
        ctx.order = order
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, part.contiguous(), group=group)
        whole = torch.cat(parts)
        return torch.empty_like(whole).index_copy_(0, ctx.order, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.order].chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None, None


def attention() -> type:
    """The class, to be named in a layer spec; made when Megatron can be imported."""
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class GatheringAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **kwargs)
            self.config = config

        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
            group = parallel_state.get_context_parallel_group()
            key, value = Gather.apply(key, group), Gather.apply(value, group)
            length = key.shape[0]
            mask = torch.arange(length)[None, None, None, :] > here(length)[None, None, :, None]
            return super().forward(query, key, value, mask, **kwargs)

    return GatheringAttention


def plug_in(spec: Any) -> Any:
    """A layer spec of Megatron's, with this attention in it."""
    spec = copy.deepcopy(spec)
    spec.submodules.self_attention.submodules.core_attention = attention()
    return spec
