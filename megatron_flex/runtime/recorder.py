"""Passes captured shards to the transports of the stage, and delivered tensors to the captures of the
session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_flex.collectives import (
    REPLICA_AXES,
    DeviceCopies,
    PipelineGather,
    Route,
    is_leader,
    is_leader_for,
    max_over_ranks,
    open_transports,
)
from megatron_flex.errors import LayoutError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Captures, Key

ENDING_SECONDS = 3.0  # from when a process that was killed has closed its connections until it has ended
Finish = Callable[[Tensor], Mapping[str, Tensor]]  # full tensor -> captures, by the suffix of their name


class Recorder:
    """The recorder of a session. All ranks of a stage record the same keys in the same order.

    To record copies the local shard and does nothing else; a transport delivers the shard at `flush`, or
    earlier.
    """

    def __init__(
        self, mesh: Mesh, captures: Captures, name: str, watch: Callable[[], None] | None = None
    ) -> None:
        """Make a recorder for the session of a name; `watch` is called repeatedly while this rank waits for
        what others have recorded.
        """
        self.mesh, self.captures, self._name, self._watch = mesh, captures, name, watch
        self._leader, self._alone = is_leader(mesh), mesh["pp"].size == 1
        self._stages = PipelineGather(mesh)
        self._arrived: list[tuple[Key, Tensor]] = []
        self._transports = open_transports(mesh, watch, False, name)
        self._prepared = False
        self._finishes: dict[Key, Finish] = {}
        self._last: dict[str, torch.Size] = {}  # of the shards at each site
        self._copies: DeviceCopies | None = None  # of full tensors, which no transport carries

    def prepare(self) -> None:
        """Open the transports, the first time. Collective in the model replica; nothing is recorded yet."""
        if not self._prepared:
            self._prepared = True
            self._transports = open_transports(self.mesh, self._watch, True, self._name)
            if self._leader:
                self._stages.open()

    def shard(
        self,
        key: Key,
        local: Tensor,
        layout: Layout,
        route: Route | None = None,
        finish: Finish | None = None,
    ) -> None:
        """Record a copy of a local tensor: frameworks overwrite many tensors in place.

        Rows of experts are first returned to the order of their tokens. With `finish` the result of
        `finish(full tensor)` is captured; `finish` runs only on the rank that receives captures, and must not
        raise.

        Raises:
            LayoutError: the tensor does not fit its layout. Other ranks may send theirs within the step, so
                zeros of the last valid shape at this site are recorded instead.
        """
        local = local.detach()
        if route is not None:
            self._submit(key, local, route.token_layout, route)
            return
        if finish is not None:
            self._finishes[key] = finish
        try:
            for transport in self._transports:
                if transport.submit(key, local, layout):
                    break
            else:
                raise AssertionError(f"no transport carries {key}")  # the process group carries everything
        except LayoutError:
            last = self._last.get(key.site)
            if last is not None:
                self._submit(key, local.new_zeros(last), layout, None)
            raise
        self._last[key.site] = local.shape

    def _submit(self, key: Key, local: Tensor, layout: Layout, route: Route | None) -> None:
        for transport in self._transports:
            if transport.submit(key, local, layout, route):
                return
        raise AssertionError(f"no transport carries {key}")  # the process group carries everything

    def record_full(self, key: Key, full: Tensor, layout: Layout, finish: Finish | None = None) -> None:
        """Record a full tensor, in `layout`, that every rank holds; only the receiving rank keeps the
        tensor.
        """
        if is_leader_for(layout, self.mesh):
            for named, tensor in _finish_capture(key, full.detach(), finish):
                host = self._copy_late(tensor) if tensor.is_cuda else tensor.to("cpu", copy=True)
                self._arrived.append((named, host))

    def _copy_late(self, tensor: Tensor, owned: bool = False) -> Tensor:
        """Begin a copy to the host, which `_copies` finish; `owned`: nothing else writes to the tensor."""
        if self._copies is None:
            self._copies = DeviceCopies(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._copies.start([(host, tensor)], owned=owned)
        return host

    def drop(self, failed: bool = True) -> None:
        """Discard undelivered tensors; `failed`: whether other ranks may have recorded other keys."""
        if self._copies is not None:
            self._copies.finish()
        for transport in self._transports:
            transport.drop(failed)
        self._arrived.clear()
        self._finishes.clear()

    def forget(self) -> None:
        """Discard the tensors of hooks that were removed in this step, on every rank alike."""
        if self._arrived or any(t.active for t in self._transports):
            self.drop(failed=False)

    def close(self) -> None:
        """Discard undelivered tensors, and release shared memory."""
        self.drop()
        for transport in self._transports:
            transport.close()
        self._transports = open_transports(self.mesh, self._watch, False, self._name)
        self._stages.close()

    def gather_if_large(self) -> None:
        """Begin to send the recorded tensors if they have become large. Collective within the stage."""
        for transport in self._transports:
            if arrivals := transport.start():
                self._receive(arrivals)

    def collect(self, flags: Sequence[int], mesh: Mesh, at: str) -> tuple[list[int], str]:
        """End the step: the greatest value of each flag over the mesh, and why captures are lost, where this
        rank knows it.

        Collective over the mesh. The transport's own notes travel with the flags.

        Args:
            flags: the first is positive if the step failed on this rank, or if captures are lost.
            mesh: the ranks that end the step together.
            at: as in `max_over_ranks`.
        """
        flags, lost, axes = list(flags), "", tuple(mesh)
        try:
            for transport in self._transports:
                flags, why = transport.collect(flags, at)
                lost = lost or why
                if transport.combines:
                    axes = tuple(a for a in axes if a.name in REPLICA_AXES)
            return max_over_ranks(flags, Mesh(axes), at, self._watch), lost
        except RuntimeError:  # of a process group: it does not name the rank that has ended
            end = time.monotonic() + ENDING_SECONDS
            while self._watch is not None and time.monotonic() < end:
                self._watch()
                time.sleep(0.05)
            raise

    def flush(self) -> None:
        """Deliver the recorded tensors to the captures of the receiving rank, once `collect` was good on all
        ranks. Collective in the model replica.
        """
        for transport in self._transports:
            self._receive(transport.finish())
        if self._copies is not None:
            self._copies.finish()
        self._finishes.clear()
        arrived, self._arrived = self._arrived, []
        if self._leader:
            for key, tensor in arrived if self._alone else self._gather_stages(arrived):
                self.captures.add(key, tensor)

    def _gather_stages(self, arrived: list[tuple[Key, Tensor]]) -> Iterator[tuple[Key, Tensor]]:
        """The captures of all stages, on the first; keys are sent as they differ from the step's first key,
        so that each step describes the same.
        """
        step, iteration = arrived[0][0][1:3] if arrived else (0, 0)
        items = [
            ((k.site, k.step - step, k.iteration - iteration, k.microbatch, k.call), tensor)
            for k, tensor in arrived
        ]
        for base, (site, steps, iterations, microbatch, call), tensor in self._stages.gather(
            items, (step, iteration)
        ):
            yield Key(site, base[0] + steps, base[1] + iterations, microbatch, call), tensor

    def _receive(self, arrivals: list[tuple[Key, Tensor]]) -> None:
        for key, full in arrivals:
            finish = self._finishes.get(key) if self._finishes else None
            finished = [(key, full)] if finish is None else _finish_capture(key, full, finish)
            for named, tensor in finished:
                host = self._copy_late(tensor, owned=True) if tensor.is_cuda else tensor.cpu()
                self._arrived.append((named, host))


def _finish_capture(key: Key, full: Tensor, finish: Finish | None) -> Iterator[tuple[Key, Tensor]]:
    """The captures made from a full tensor, with their keys."""
    if finish is None:
        yield key, full
    else:
        for ending, tensor in finish(full).items():
            yield key._replace(site=key.site + ending), tensor
