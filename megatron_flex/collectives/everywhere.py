"""Give every rank what one has: many tensors at once, small ones together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.edit import broadcast_from_first
from megatron_flex.collectives.rank_agreement import gather_objects
from megatron_flex.mesh import Mesh

TensorHeader = tuple[Any, tuple[int, ...], torch.dtype]


def broadcast_in_buckets(items: Sequence[tuple[Any, Tensor]], mesh: Mesh, bucket_bytes: int) -> list[tuple[Any, Tensor]]:
    """Give every rank the items of the rank with coordinate 0 on all axes. Collective over the mesh.

    Args:
        items: picklable tags with their tensors, on the CPU; unused on the other ranks.
        mesh: the axes.
        bucket_bytes: tensors of at least this size travel alone.

    Returns:
        The items, in their order, on the CPU.
    """
    axes = [a for a in mesh if a.size > 1]
    if not axes:
        return list(items)
    first = mesh.is_first(a.name for a in mesh)
    note: list[TensorHeader] = [(tag, tuple(t.shape), t.dtype) for tag, t in items] if first else []
    headers: list[TensorHeader] = gather_objects(note, mesh, [a.name for a in mesh])[0]
    device = "cuda" if dist.get_backend(axes[0].group) == "nccl" else "cpu"
    mine, out = iter(items), []
    for bucket in _buckets(headers, bucket_bytes):
        sizes = [torch.empty(shape, dtype=dtype, device="meta").nbytes for _, shape, dtype in bucket]
        if first:
            flat = torch.cat([_flatten_to_bytes(next(mine)[1]) for _ in bucket])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
        flat = broadcast_from_first(flat.to(device), mesh).cpu() if len(flat) else flat
        for (tag, shape, dtype), part in zip(bucket, flat.split(sizes), strict=True):
            out.append((tag, part.clone().view(dtype).reshape(shape)))
    return out


def _flatten_to_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _buckets(headers: Sequence[TensorHeader], limit: int) -> Iterator[list[TensorHeader]]:
    bucket: list[TensorHeader] = []
    filled = 0
    for one in headers:
        size = torch.empty(one[1], dtype=one[2], device="meta").nbytes
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(one)
        filled += size
    if bucket:
        yield bucket
