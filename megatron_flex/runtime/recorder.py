"""Keeps what was read until it can be sent: shards to the stage's leader, wholes up the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron_flex.collectives import (
    SharedMemoryTransport,
    PendingShard,
    Route,
    LeaderGather,
    GatherStep,
    is_leader,
    open_shared_memory,
    is_leader_for,
    plan_read,
    gather_up_pipeline,
    buffer_pool,
    takes_part,
)
from megatron_flex.config import flex_config
from megatron_flex.layout import Layout, full_shape
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.buffers import CopyTapes, TapeBlock
from megatron_flex.runtime.captures import Captures, Key

MAX_SEND_PLANS = 4096  # layouts and shapes that are remembered
Finish = Callable[[Tensor], Mapping[str, Tensor]]  # of what arrives: what is kept, by how its name ends


@dataclass(slots=True)
class _PendingCapture:
    key: Key
    layout: Layout
    tensor: Tensor | None  # None on a rank whose part nobody needs
    route: Route | None = None
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class _SendPlan:
    """What there is to know of all local tensors of one layout and shape.

    Attributes:
        layout: itself: while it is here no other one is found by its identity.
        needed: whether this rank's part is.
        steps: in which it is sent.
        entries: of the whole, as far as ranks count alike.
    """

    layout: Layout
    needed: bool
    steps: list[GatherStep]
    entries: int


@dataclass(slots=True)
class _InFlight:
    """What is on its way: as it was read, as it is sent, and the memory that it lies in."""

    read: list[_PendingCapture]
    order: list[_PendingCapture]
    pieces: list[TapeBlock]
    sending: LeaderGather


class Recorder:
    """One for a session. All ranks of a stage record the same keys in the same order.

    Recording copies this rank's part and nothing else: ranks of one node copy it to shared memory, straight
    to its place, and what cannot go there is kept, to be sent at `flush`.
    """

    def __init__(self, mesh: Mesh, captures: Captures) -> None:
        self.mesh, self.captures = mesh, captures
        self._leader = is_leader(mesh)
        self._pending: list[_PendingCapture] = []
        self._arrived: list[tuple[Key, Tensor]] = []
        self._waiting_bytes = 0
        self._buffers = CopyTapes()
        self._sent: _InFlight | None = None
        self._board: SharedMemoryTransport | None = None
        self._prepared = False
        self._finishes: dict[Key, Finish] = {}  # of what lies in shared memory
        self._known: dict[tuple[int, torch.Size], _SendPlan] = {}

    def prepare(self) -> None:
        """Set shared memory up, the first time. Collective within the stage; nothing is recorded yet."""
        if not self._prepared:
            self._prepared, self._board = True, open_shared_memory(self.mesh)

    def shard(self, key: Key, local: Tensor, layout: Layout, finish: Finish | None = None) -> None:
        """Record a local tensor. It is copied: frameworks overwrite many of them in place.

        With `finish` what it gives of the whole is kept; it runs on the leader alone, and must not raise.
        """
        if self._board is not None and self._board.put(key, local.detach(), layout):
            if finish is not None:
                self._finishes[key] = finish
            return
        known = self._of(layout, local.shape)
        kept = self._copy(local.detach(), known) if known.needed else None
        self._pending.append(_PendingCapture(key, layout, kept, None, finish))
        self._waiting_bytes += known.entries * local.element_size()

    def rows(self, key: Key, local: Tensor, route: Route) -> None:
        """Record rows of experts. Every rank's are needed: they go home to their tokens first."""
        if self._board is not None:
            self._board.note(key)
        kept = self._buffers.copy(local.detach(), "rows", flex_config.bucket_bytes)
        self._pending.append(_PendingCapture(key, route.token_layout, kept, route))

    def whole(self, key: Key, whole: Tensor, layout: Layout, finish: Finish | None = None) -> None:
        """Record a tensor, in `layout`, that every rank has whole; the leader alone keeps it."""
        if is_leader_for(layout, self.mesh):
            for named, tensor in _finish_capture(key, whole.detach(), finish):
                self._arrived.append((named, tensor.to("cpu", copy=True)))

    def drop(self, failed: bool = True) -> None:
        """Forget what was not sent; `failed`: perhaps other ranks recorded more, or less."""
        if self._board is not None and (failed or self._board.count):
            self._board.drop()
        self._pending.clear()
        self._arrived.clear()
        self._finishes.clear()
        self._sent = None
        self._buffers.clear()
        buffer_pool.clear()
        self._waiting_bytes = 0

    def forget(self) -> None:
        """Forget what hooks that were taken out in this step have left, on every rank alike."""
        if self._pending or self._arrived or self._sent or (self._board is not None and self._board.count):
            self.drop(failed=False)

    def close(self) -> None:
        """Forget what was not sent, and give shared memory back."""
        self.drop()
        if self._board is not None:
            self._board.close()
            self._board = None

    def gather_if_large(self) -> None:
        """Begin to send shards to the stage's leader if they have become many.

        What was sent so before is waited for first, so that no more than two lots are in memory. Collective
        within the stage; all its ranks decide alike, from the wholes' sizes.
        """
        if self._waiting_bytes > flex_config.pending_bytes:
            self._post()

    def gather(self) -> None:
        """Send all shards to the stage's leader.

        Collective within the stage: `tp` and `cp`, and for what experts hold `ep` and `etp`.
        """
        self._post()
        self._arrive()

    def _post(self) -> None:
        self._arrive()
        todo, self._pending, self._waiting_bytes = self._pending, [], 0
        sent = sorted(todo, key=lambda p: p.route is not None)  # as their copies lie in memory
        for pending in sent:
            if pending.route is not None and pending.tensor is not None:
                home = pending.route.home(pending.tensor)
                known = self._of(pending.layout, home.shape)
                pending.tensor = self._copy(home, known) if known.needed else None
        parcels = [
            PendingShard(p.layout, [] if p.tensor is None else [p.tensor], bool(plan_read(p.layout, self.mesh)))
            for p in sent
        ]
        self._sent = _InFlight(todo, sent, self._buffers.take(), LeaderGather(parcels, self.mesh, flex_config.bucket_bytes))

    def _arrive(self) -> None:
        """Wait for what was sent."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        for pending, whole in zip(sent.order, sent.sending.wait(), strict=True):
            order = pending.route.order if pending.route else None
            pending.tensor = whole if whole is None or order is None else whole[order]
        for p in sent.read:
            if p.tensor is not None:
                self._arrived += [(k, t.cpu()) for k, t in _finish_capture(p.key, p.tensor, p.finish)]
        self._buffers.give_back(sent.pieces)

    def _of(self, layout: Layout, shape: torch.Size) -> _SendPlan:
        """What is known of a local tensor."""
        found = self._known.get((id(layout), shape))
        if found is None:
            if len(self._known) >= MAX_SEND_PLANS:
                self._known.clear()
            even = not any(d.uneven for d in layout.dims)
            entries = prod(full_shape(layout, shape, self.mesh.sizes)) if even else 0
            needed = takes_part(layout, self.mesh)
            found = _SendPlan(layout, needed, plan_read(layout, self.mesh), entries)
            self._known[id(layout), shape] = found
        return found

    def _copy(self, tensor: Tensor, known: _SendPlan) -> Tensor:
        """A copy: where it will be sent, behind what goes the same way first; else the whole itself."""
        if not known.steps:
            return tensor.clone(memory_format=torch.contiguous_format)
        first = known.steps[0]
        tape = (first, tensor.dtype if first.op == "sum" else None)
        return self._buffers.copy(tensor, tape, flex_config.bucket_bytes)

    def flush(self) -> None:
        """Bring everything recorded to the leader's captures. Collective within the model replica.

        What lies in shared memory needs no collective within the stage.
        """
        if self._board is not None:
            finishes, self._finishes = self._finishes, {}
            for key, whole in self._board.settle(gathers=bool(self._pending)):
                self._arrived += _finish_capture(key, whole, finishes.get(key))
        self.gather()
        arrived, self._arrived = self._arrived, []
        if self._leader:
            for key, tensor in gather_up_pipeline(arrived, self.mesh):
                self.captures.add(key, tensor)


def _finish_capture(key: Key, whole: Tensor, finish: Finish | None) -> Iterator[tuple[Key, Tensor]]:
    """What is kept of what arrived, and under which keys."""
    if finish is None:
        yield key, whole
    else:
        for ending, tensor in finish(whole).items():
            yield key._replace(site=key.site + ending), tensor
