"""Many tensors concatenated in one message, and a pool of buffers for such messages.

Each tensor is aligned for every dtype. Buffers are reused: on a host, allocating fresh pages costs more than
the copy into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.meter import call_metered
from megatron_flex.mesh import Axis

MAX_POOL_BYTES = 256 << 20  # maximum bytes of all pooled buffers together
MAX_POOL_BUFFERS = 4
MAX_RECEIVERS = 64  # of small gathers, each of one shape and dtype


class Receiver(NamedTuple):
    """Memory that a small gather of equal shards is received in.

    Attributes:
        received: the shards, one after the other along the first dim.
        shards: views of each.
    """

    received: Tensor
    shards: tuple[Tensor, ...]


class BufferPool:
    """Reusable byte buffers on the host. (On a GPU the caching allocator has this function.)"""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._receivers: dict[tuple[int, torch.Size, torch.dtype], Receiver] = {}

    def find_receiver(self, count: int, like: Tensor) -> Receiver:
        """Memory for `count` shards like this one, which the next gather of such shards overwrites.

        On a GPU it is new memory: another stream may still read that of the gather before.
        """
        if not like.is_cpu:
            return _make_receiver(count, like)
        at = count, like.shape, like.dtype
        receiver = self._receivers.get(at)
        if receiver is None:
            if len(self._receivers) >= MAX_RECEIVERS:
                self._receivers.clear()
            with torch.inference_mode(False):  # written inside and outside inference mode
                receiver = self._receivers[at] = _make_receiver(count, like)
        return receiver

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """A flat, uninitialized tensor of bytes."""
        best, size = -1, 0
        for place, buffer in enumerate(self._free if device.type == "cpu" else ()):
            if buffer.nbytes >= nbytes and (best < 0 or buffer.nbytes < size):
                best, size = place, buffer.nbytes
        if best < 0:
            return allocate_bytes(nbytes, device)
        return self._free.pop(best) if size == nbytes else self._free.pop(best)[:nbytes]

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer, which a later `take` may overwrite. The caller must not read it afterwards."""
        base = buffer if buffer._base is None else buffer._base
        if base.device.type != "cpu" or base.nbytes > MAX_POOL_BYTES:
            return
        free, total = self._free, 0
        free.append(base)
        for buffer_in_pool in free:
            total += buffer_in_pool.nbytes
        while len(free) > MAX_POOL_BUFFERS or total > MAX_POOL_BYTES:
            total -= free.pop(0).nbytes

    def clear(self) -> None:
        """Release all memory."""
        self._free.clear()
        self._receivers.clear()


def _make_receiver(count: int, like: Tensor) -> Receiver:
    received = like.new_empty((count * like.shape[0], *like.shape[1:]))
    return Receiver(received, received.split(like.shape[0]))


def allocate_bytes(nbytes: int, device: torch.device) -> Tensor:
    """New uninitialized bytes, writable inside and outside inference mode."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


buffer_pool = BufferPool()


ALIGN = 16  # bytes; every dtype may start at a multiple of it


def align_size(width: int, align: int = ALIGN) -> int:
    """The bytes that a tensor of `width` bytes occupies, including alignment; by default in a message."""
    return -(-width // align) * align


def message_offsets(widths: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each tensor, and the length of the message, without padding at its end."""
    out, offset, end = [], 0, 0
    for width in widths:
        out.append(offset)
        end = offset + width
        offset += align_size(width)
    return out, end


def group_by_size(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """The indices of the tensors of each message, in order: at most `most` bytes, or one larger tensor."""
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
    """The bytes of tensors as one message; a view if the tensors already have this arrangement in memory.

    Args:
        tensors: the tensors, on one device.
        widths: the bytes reserved for each tensor, at least its size.
    """
    at, length = message_offsets(widths)
    view = _view_as_message(tensors, at, length)
    if view is not None:
        return view
    out = torch.empty(length, dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, at, strict=True):
        out[start : start + tensor.nbytes].copy_(as_bytes(tensor))
    return out


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view, or copy, of bytes, since not every backend supports every dtype."""
    if tensor.dtype is torch.uint8 and tensor.ndim == 1 and tensor.is_contiguous():
        return tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def begin_collective(
    op: str, axis: Axis, result: Tensor, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Start a collective over an axis's group; the result has a `wait` method."""
    handles: list[Any] = []

    def begin(*args: Any, **kwargs: Any) -> None:
        handles.append(call(*args, async_op=True, **kwargs))

    call_metered(op, axis, result, begin, *args, **kwargs)
    return handles[0]


class PendingMessages:
    """Messages in transit, with a common `wait`."""

    def __init__(self) -> None:
        self.works: list[Any] = []
        self._sent_before: list[PendingMessages] = []  # over the same group, these included, in their order

    def hold(self, group: Any) -> None:
        """Keep the tensors, also if nobody waits: until later messages over the group have arrived.

        gloo stops all later messages between two ranks, whoever sends them, where it finds that a tensor of
        an earlier one has been released. A step that fails waits for none of its messages.
        """
        self._sent_before = _in_transit.setdefault(dist.group.WORLD if group is None else group, [])
        self._sent_before.append(self)

    def wait(self) -> None:
        """Wait until all messages are complete."""
        for work in self.works:
            if work is not None:
                work.wait()
        if self._sent_before:  # messages between two ranks arrive in the order in which they were sent
            del self._sent_before[: self._sent_before.index(self) + 1]


_in_transit: WeakKeyDictionary[Any, list[PendingMessages]] = WeakKeyDictionary()  # by process group


def begin_gather_to_first(
    message: Tensor, rows: Sequence[Tensor], axis: Axis, tag: int = 0
) -> PendingMessages:
    """Start a gather of all messages to the first rank of an axis; the result has a `wait` method.

    On the host the messages are sent point to point, and gloo writes them directly to `rows`, whereas gloo's
    gather uses fresh memory. On a GPU a gather is used: NCCL's consists of such messages anyway, and gloo
    would take the address of a message on the GPU for a host address.

    Args:
        message: this rank's message, flat.
        rows: on the first rank, the buffers of the other ranks' messages.
        axis: the ranks.
        tag: of messages that are sent point to point.
    """
    out = PendingMessages()

    def begin(group: Any) -> None:
        if message.device.type != "cpu":
            slots = None if axis.coord else [message, *rows]
            out.works.append(dist.gather(message, slots, axis.ranks[0], group=group, async_op=True))
            return
        out.hold(group)
        if axis.coord:
            out.works.append(dist.isend(message, axis.ranks[0], group=group, tag=tag))
        else:
            out.works += [
                dist.irecv(row, r, group=group, tag=tag) for row, r in zip(rows, axis.ranks[1:], strict=True)
            ]

    call_metered("gather", axis, message, begin)
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
    return as_bytes(first).as_strided((length,), (1,), begin)  # beyond the first tensor, within its storage
