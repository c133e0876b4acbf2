"""The ranges of the tensors of a step on one rank, and where the first value that is not finite is.

A range is the minimum and the maximum of a shard; both are NaN if any entry is. On a CPU a range is known at
once. A GPU computes it later: the range is copied to the host without waiting, and the tensor is held until
its range has arrived, so that the entries can still be found. `MAX_HELD_BYTES` bounds what is held.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout import Layout, count_parts, spans
from megatron_flex.mesh import Mesh

ItemT = TypeVar("ItemT")

MAX_HELD_BYTES = 1 << 28  # of tensors whose ranges have not arrived
MAX_INDICES = 4  # entries that are named
BLOCK_SLOTS = 1024  # ranges in one allocation
RECENT = 2  # tensors that are compared with the next one
NARROW_BYTES = 1  # dtypes of so many bytes are scaled to their range, which is not near an overflow
NEAR_OVERFLOW = 0.125  # of the largest value of the dtype


class Located(NamedTuple):
    """The entries of a shard that are not finite.

    Attributes:
        nans: the number of NaN.
        infinities: the number of infinities.
        entries: the number of entries of the shard.
        indices: the first such entries, as indices of the full tensor, or of the shard where `full` is false.
        full: whether the indices are those of the full tensor.
        shape: the shape that the indices are in; of the shard, where `full` is false.
        dims: the names of the dims, `""` where a dim has none; empty if they are not known.
    """

    nans: int
    infinities: int
    entries: int
    indices: tuple[tuple[int, ...], ...]
    full: bool
    shape: tuple[int, ...]
    dims: tuple[str, ...] = ()


class PassRange(NamedTuple):
    """The range of a tensor at one pass through a hook point, or of the gradient of a parameter.

    Attributes:
        site: the name of the hook point, with the suffix of a gradient; or of the parameter's gradient.
        call: the number of the pass in its microbatch.
        low: the minimum of the shard; NaN if the shard has a NaN; infinity if the shard is empty.
        high: the maximum of the shard.
        dtype: the dtype of the tensor.
        located: the entries that are not finite, if this was the first such tensor of the pass on this rank.
    """

    site: str
    call: int
    low: float
    high: float
    dtype: torch.dtype
    located: Located | None = None

    @property
    def finite(self) -> bool:
        return self.empty or (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def empty(self) -> bool:
        """Whether the shard has no entries."""
        return self.low == math.inf and self.high == -math.inf

    @property
    def near_overflow(self) -> bool:
        """Whether the largest magnitude is near the largest value of the dtype."""
        if self.empty or not self.finite or self.dtype.itemsize <= NARROW_BYTES:
            return False
        return max(-self.low, self.high) > NEAR_OVERFLOW * torch.finfo(self.dtype).max


EMPTY = math.inf, -math.inf


class PendingRange(NamedTuple):
    """A pass whose range may not be known on the host yet.

    Attributes:
        site: as in `PassRange`.
        call: as in `PassRange`.
        dtype: as in `PassRange`.
        slot: the minimum and the maximum, on the host once `event` has happened; None if the shard is empty.
        shard: the tensor, as long as it is held.
        version: of the tensor when its range was taken: it may be overwritten later.
        layout: the layout of the shard; None if its indices have no meaning outside of this rank.
        event: the copy of the range to the host; None on a CPU.
    """

    site: str
    call: int
    dtype: torch.dtype
    slot: Tensor | None
    shard: Tensor | None
    version: int
    layout: Layout | None
    event: Any


class MeasuredShard(NamedTuple):
    """A shard whose range was taken; the reference keeps its memory from being used for another tensor.

    Attributes:
        shard: the shard.
        version: of the shard when its range was taken.
        slot: its range.
    """

    shard: Tensor
    version: int
    slot: Tensor

    def has_entries_of(self, other: Tensor) -> bool:
        """Whether another tensor has exactly these entries, in any order of dims, unchanged since."""
        mine = self.shard
        return (
            other.data_ptr() == mine.data_ptr()
            and other._version == self.version == mine._version
            and other.numel() == mine.numel()
            and other.dtype == mine.dtype
            and (mine.is_contiguous() or other.stride() == mine.stride())
            and (other.is_contiguous() or other.stride() == mine.stride())
        )


class PassRanges:
    """The ranges of the tensors of one microbatch's pass on this rank, in order of execution.

    Attributes:
        ranges: what is known so far.
        found: whether a tensor is not finite; later ones of the pass are consequences.
        neighbourhood: the shard of the first tensor that is not finite, after that of the tensor before it,
            with their layouts.
    """

    def __init__(self) -> None:
        self.ranges: list[PassRange] = []
        self.found = False
        self.neighbourhood: dict[str, tuple[Tensor, Layout | None]] = {}
        self._before: PendingRange | None = None

    def release(self) -> None:
        """Let go of the tensor that was kept for the next one: tensors of another pass follow."""
        self._before = None

    def add(self, item: PendingRange, mesh: Mesh) -> None:
        """Add a range that is on the host."""
        low, high = EMPTY if item.slot is None else item.slot.tolist()
        known = PassRange(item.site, item.call, low, high, item.dtype)
        if known.finite or self.found:
            self._before = None if self.found else item
        else:
            self.found = True
            known = self._locate(known, item, mesh)
        self.ranges.append(known)

    def _locate(self, known: PassRange, item: PendingRange, mesh: Mesh) -> PassRange:
        before, self._before = self._before, None
        if item.shard is None or item.shard._version != item.version:
            return known
        for near in (before, item):
            if near is not None and near.shard is not None and near.shard._version == near.version:
                self.neighbourhood[near.site] = near.shard, near.layout
        return known._replace(located=locate(item.shard, item.layout, mesh))


class RangeQueue:
    """Takes the ranges of tensors, and holds the tensors until the ranges are on the host.

    Args:
        mesh: the axes of the run.

    Attributes:
        held: the bytes of the tensors that are held.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.held = 0
        self._mesh, self._slots = mesh, Slots()
        self._pending: deque[tuple[PassRanges, PendingRange]] = deque()
        self._latest: PassRanges | None = None
        # Hook points in a row often have one tensor: the output of a module is the input of the next.
        self._recent: deque[MeasuredShard] = deque(maxlen=RECENT)

    def take(self, into: PassRanges, site: str, call: int, shard: Tensor, layout: Layout | None) -> None:
        """Take the range of a shard. Nothing is waited for.

        Args:
            into: the pass that gets the range.
            site: as in `PassRange`.
            call: as in `PassRange`.
            shard: the shard.
            layout: its layout; None if its indices have no meaning outside of this rank.
        """
        if shard.is_complex():
            shard, layout = torch.view_as_real(shard), None
        dtype = shard.dtype
        if dtype.itemsize <= NARROW_BYTES:
            shard = shard.float()  # torch does not reduce float8
        slot = self._measure(shard) if shard.numel() else None
        event = None if slot is None else self._slots.note_copy(shard.device)
        keeps = slot is not None and not into.found
        item = PendingRange(site, call, dtype, slot, shard if keeps else None, shard._version, layout, event)
        self._pending.append((into, item))
        self.held += shard.nbytes if keeps else 0
        self._settle(arrived=False)
        while self.held > MAX_HELD_BYTES:
            self._release_oldest()

    def finish(self) -> None:
        """Wait until all ranges are in their passes, and let go of all tensors."""
        self._slots.wait()
        self._settle(arrived=True)
        self.clear()

    def clear(self) -> None:
        """Forget what is pending."""
        self._pending.clear()
        self._recent.clear()
        self._latest, self.held = None, 0

    def _measure(self, shard: Tensor) -> Tensor:
        for known in self._recent:
            if known.has_entries_of(shard):
                return known.slot
        slot = self._slots.take(shard)
        self._recent.append(MeasuredShard(shard, shard._version, slot))
        return slot

    def _settle(self, arrived: bool) -> None:
        while self._pending:
            into, item = self._pending[0]
            if not arrived and item.event is not None and not item.event.query():
                return
            self._pending.popleft()
            self.held -= 0 if item.shard is None else item.shard.nbytes
            if self._latest is not None and into is not self._latest:
                self._latest.release()
            self._latest = into
            into.add(item, self._mesh)

    def _release_oldest(self) -> None:
        for number, (into, item) in enumerate(self._pending):
            if item.shard is not None:
                self.held -= item.shard.nbytes
                self._pending[number] = into, item._replace(shard=None)
                return


class Slots:
    """Memory for ranges, in blocks: on the device of the tensors, and for a GPU a copy on the host."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._used: dict[tuple[torch.device, torch.dtype], int] = {}
        self._last: dict[torch.device, Any] = {}  # an event of a stream comes after all earlier ones

    def take(self, shard: Tensor) -> Tensor:
        """Begin to compute the range of a shard; the slot has it on the host, once a GPU's copy is over."""
        kind = shard.device, shard.dtype
        used = self._used.get(kind, BLOCK_SLOTS)
        if used == BLOCK_SLOTS:
            there = torch.empty(BLOCK_SLOTS, 2, dtype=shard.dtype, device=shard.device)
            pinned = shard.device.type == "cuda"
            host = torch.empty(BLOCK_SLOTS, 2, dtype=shard.dtype, pin_memory=True) if pinned else there
            self._blocks[kind], used = (there, host), 0
        there, host = self._blocks[kind]
        self._used[kind] = used + 1
        torch.aminmax(shard, out=(there[used, 0], there[used, 1]))
        if host is not there:
            host[used].copy_(there[used], non_blocking=True)
        return host[used]

    def note_copy(self, device: torch.device) -> Any:
        """An event behind the copies so far; None on a CPU, which copies nothing."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self._last[device] = event
        return event

    def wait(self) -> None:
        """Wait until all ranges are on the host."""
        for event in self._last.values():
            event.synchronize()
        self._last.clear()


def locate(shard: Tensor, layout: Layout | None, mesh: Mesh) -> Located:
    """Find the entries of a shard that are not finite, and their places in the full tensor."""
    nans, bad = shard.isnan(), ~shard.isfinite()
    count = int(nans.sum())
    flat = bad.reshape(-1).nonzero()[:MAX_INDICES, 0].cpu()
    places = torch.stack(torch.unravel_index(flat, shard.shape), -1).tolist()
    full = [] if layout is None else [_find_full_index(layout, mesh, shard.shape, p) for p in places]
    known = [index for index in full if index is not None]
    is_full = bool(full) and len(known) == len(full)
    shape: tuple[int, ...] = tuple(shard.shape)
    names: tuple[str, ...] = ()
    if is_full and layout is not None:
        lengths = [n * count_parts(d, mesh.sizes) for d, n in zip(layout.dims, shape, strict=True)]
        shape, names = _reorder(layout, lengths), _reorder(layout, [d.name for d in layout.dims])
    indices = known if is_full else [tuple(p) for p in places]
    return Located(count, int(bad.sum()) - count, shard.numel(), tuple(indices), is_full, shape, names)


def _find_full_index(
    layout: Layout, mesh: Mesh, shape: Sequence[int], place: Sequence[int]
) -> tuple[int, ...] | None:
    """The index in the full tensor of an entry of this rank's shard; None if only all ranks know."""
    if len(layout.dims) != len(shape):
        return None
    out = []
    for dim, length, at in zip(layout.dims, shape, place, strict=True):
        parts = count_parts(dim, mesh.sizes)
        if parts == 1:
            out.append(at)
            continue
        try:
            intervals = spans(dim, length * parts, mesh.coords, mesh.sizes)
        except LayoutError:  # an uneven dim: where this shard begins depends on the lengths of the others
            return None
        rest = at
        for start, stop in intervals:
            if rest < stop - start:
                out.append(start + rest)
                break
            rest -= stop - start
        else:
            return None
    return _reorder(layout, out)


def _reorder(layout: Layout, entries: Sequence[ItemT]) -> tuple[ItemT, ...]:
    """One item for each dim, in the order of the full tensor's dims."""
    return tuple(entries) if layout.permute is None else tuple(entries[i] for i in layout.permute)
