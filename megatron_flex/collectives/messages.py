"""Many tensors in one message: one after the other, each at a place that every dtype may start at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.meter import call_metered
from megatron_flex.mesh import Axis

ALIGN = 16  # bytes; every dtype may start at a multiple of it


def align_size(width: int) -> int:
    """How many bytes after a tensor of `width` bytes the next one starts."""
    return -(-width // ALIGN) * ALIGN


def message_offsets(widths: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor starts, and how long the message is; nothing follows on the last one."""
    out, offset, end = [], 0, 0
    for width in widths:
        out.append(offset)
        end = offset + width
        offset += align_size(width)
    return out, end


def group_by_size(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Which tensors go in which message, in order: at most so many bytes, or one alone with more."""
    group: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if group and filled + size > most:
            yield group
            group, filled = [], 0
        group.append(index)
        filled += size
    if group:
        yield group


def pack(tensors: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """The bytes of tensors as one message, a view if they lie that way in memory already.

    Args:
        tensors: on one device.
        widths: how many bytes each takes, its own or more.
    """
    at, length = message_offsets(widths)
    found = _view_as_message(tensors, at, length)
    if found is not None:
        return found
    out = torch.empty(length, dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, at, strict=True):
        out[start : start + tensor.nbytes].copy_(as_bytes(tensor))
    return out


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view, or copy, of bytes, since not every backend moves every dtype."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def begin_collective(op: str, axis: Axis, result: Tensor, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Begin a collective over an axis's group; what it gives can be waited for."""
    found: list[Any] = []

    def begin(*args: Any, **kwargs: Any) -> None:
        found.append(call(*args, async_op=True, **kwargs))

    call_metered(op, axis, result, begin, *args, **kwargs)
    return found[0]


class PendingMessages:
    """Messages on their way, all of which are waited for."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        """Until they are through."""
        for work in self.works:
            if work is not None:
                work.wait()


def begin_gather_to_first(mine: Tensor, rows: Sequence[Tensor], axis: Axis) -> PendingMessages:
    """Begin to bring everyone's message to the first rank of an axis; what it gives can be waited for.

    On the host by messages from rank to rank, which gloo writes straight to `rows`: a gather of its own goes
    by way of fresh memory. On a GPU by a gather: NCCL's is made of such messages anyhow, and gloo would take
    the address of a message there for one of the host.

    Args:
        mine: this rank's, flat.
        rows: on the first rank, where to put those of the others.
        axis: the ranks.
    """
    out = PendingMessages()

    def begin(group: Any) -> None:
        if mine.device.type != "cpu":
            slots = None if axis.coord else [mine, *rows]
            out.works.append(dist.gather(mine, slots, axis.ranks[0], group=group, async_op=True))
        elif axis.coord:
            out.works.append(dist.isend(mine, axis.ranks[0], group=group))
        else:
            out.works += [
                dist.irecv(row, r, group=group) for row, r in zip(rows, axis.ranks[1:], strict=True)
            ]

    call_metered("gather", axis, mine, begin)
    return out


def _view_as_message(tensors: Sequence[Tensor], at: Sequence[int], length: int) -> Tensor | None:
    first = tensors[0]
    storage = first.untyped_storage()
    begin = first.storage_offset() * first.itemsize
    for tensor, start in zip(tensors, at, strict=True):
        same = tensor.untyped_storage().data_ptr() == storage.data_ptr() and tensor.is_contiguous()
        if not same or tensor.storage_offset() * tensor.itemsize != begin + start:
            return None
    if begin + length > storage.nbytes():
        return None
    out = torch.empty(0, dtype=torch.uint8, device=first.device)
    out.set_(storage, begin, (length,), (1,))
    return out
