"""One dump at work on this rank: hooks that hand what passes to the writer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives import Route, everyone
from megatron_flex.dump import (
    GRADIENT,
    VALUE,
    Dump,
    Entry,
    Manifest,
    Ownership,
    Picked,
    Writer,
    mean,
    mean_layout,
    open_run,
    pick,
)
from megatron_flex.dump.selection import SAMPLE, TOKEN, dim_of
from megatron_flex.errors import DumpError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.dumps.routed import Routed
from megatron_flex.runtime.hooks import HookFunction, HookType
from megatron_flex.sites import GRAD, Site


class Sinking(HookFunction):
    """The hook of a dump: it keeps nothing and edits nothing, and hands what passes to the dump.

    Attributes:
        dumped: the dump at work.
    """

    def __init__(self, dumped: Dumped, names: frozenset[str], hook_type: HookType) -> None:
        def chosen(site: Site) -> bool:
            return site.name in names

        chosen.__qualname__ = f"{dumped.dump.describe()}: {len(names)} places"
        super().__init__(chosen, hook_type=hook_type, tags=dumped.dump.tags)
        self.save, self.dumped = False, dumped


class Dumped:
    """One dump at work on this rank.

    Attributes:
        dump: its settings.
        active: whether this step is dumped.
    """

    def __init__(self, dump: Dump, mesh: Mesh, clock: Clock) -> None:
        self.dump, self.mesh, self.clock = dump, mesh, clock
        self.active = False
        self.hooks: list[HookFunction] = []
        self.writer: Writer | None = None
        self._ownership, self._routed = Ownership(mesh), Routed()
        self._runs: Counter[int] = Counter()
        self._skipped: frozenset[str] = frozenset()
        self._microbatches = 0

    def open(self, manifest: Manifest) -> None:
        """Begin a run of the dump. Collective over the mesh.

        Raises:
            DumpError: on all ranks: it cannot be written there.
        """
        axes = [a.name for a in self.mesh]
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        ranks = everyone((rank, dict(self.mesh.coords)), self.mesh, axes)
        answer: Manifest | str | None = None
        if rank == ranks[0][0]:
            try:
                answer = open_run(Path(self.dump.path), replace(manifest, ranks=tuple(ranks)))
            except DumpError as error:
                answer = str(error)
        answer = everyone(answer, self.mesh, axes)[0]
        if not isinstance(answer, Manifest):
            raise DumpError(str(answer))
        folder = Path(self.dump.path) / f"run-{answer.run:04d}"
        blind = [r for r in everyone(None if folder.is_dir() else rank, self.mesh, axes) if r is not None]
        if blind:
            raise DumpError(
                f"{folder} was made by rank {ranks[0][0]}, and rank(s) {blind[:8]} do not see it: "
                "name a folder on a file system that all ranks share"
            )
        self._skipped = frozenset(answer.skipped)
        self.writer = Writer(folder, rank, self.mesh.coords, self.dump)

    def begins(self, microbatches: int) -> bool:
        """A step starts; returns whether it is dumped."""
        number = self.clock.iteration
        run_of = self._runs[number]
        wanted = self.dump.wants_iteration(number) and (run_of == 0 or self.dump.runs == "all")
        self._runs[number] += 1
        name = f"{number:010d}" + (f".{run_of}" if run_of else "")
        self.active = wanted and name not in self._skipped
        self._microbatches = microbatches
        if self.active and self.writer is not None:
            self._routed.begins()
            self.writer.begin(number, run_of, torch.is_grad_enabled(), microbatches)
        return self.active

    def ends(self, failed: bool) -> None:
        """The step is over."""
        if self.active and self.writer is not None:
            if failed:
                self.writer.abandon()
            else:
                self.writer.finish()
        self.active = False

    def close(self) -> None:
        """Wait until everything is written."""
        if self.writer is not None:
            self.writer.close()

    # -- on the way of a tensor ------------------------------------------------------------------------

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> None:
        """Copy this rank's shard, or what is wanted of it, if this rank writes it."""
        if not self.active or self.writer is None or not self.dump.wants_microbatch(key.microbatch):
            return
        site, kind = key.site.removesuffix(GRAD), GRADIENT if key.site.endswith(GRAD) else VALUE
        told = over = None
        if route is not None:
            told, layout, over = self._routed.tell(key, route, self.writer), route.layout, (self.mesh["etp"],)
        if (route is not None and told is None) or not self._ownership.mine(layout, local.nbytes, over=over):
            return
        local, layout, picked = self._wanted(key, local.detach(), layout)
        shape = tuple(local.shape)
        if picked is not None:
            local = picked.of(local, layout)
        if factor != 1.0:
            local = (local.float() if local.dtype == torch.float16 else local) / factor
        if self.dump.dtype is not None and local.is_floating_point():
            local = local.to(self.dump.dtype)
        entry = Entry(site, kind, key.microbatch, key.call, 0, shape, "", picked is not None, route=told)
        self.writer.put(entry, layout, local)

    def _wanted(self, key: Key, local: Tensor, layout: Layout) -> tuple[Tensor, Layout, Picked | None]:
        """What is picked, and the mean over the sequence if that is wanted."""
        dump, mesh = self.dump, self.mesh
        if dump.tokens is None and dump.samples is None and dump.reduce is None:
            return local, layout, None
        numbers = self._numbers(key.microbatch, local, layout)
        iteration, tokens = key.iteration, dump.tokens
        if dump.reduce == "mean" and dim_of(layout, TOKEN) is not None:
            local = mean(local, layout, mesh.sizes, mesh.coords, tokens, iteration, numbers)
            layout, tokens = mean_layout(layout), None
        samples = dump.samples if isinstance(dump.samples, frozenset) else None
        where = layout, local.shape, mesh.sizes, mesh.coords, iteration, numbers
        return local, layout, pick(tokens, samples, *where)

    def _numbers(self, microbatch: int, local: Tensor, layout: Layout) -> list[int] | None:
        """The numbers of the local samples in the global batch."""
        dim = dim_of(layout, SAMPLE)
        if dim is None:
            return None
        count, replica = local.shape[dim], self.mesh["dp"]
        if self.dump.order == "interleaved":
            first = (microbatch * replica.size + replica.coord) * count
        elif self._microbatches or replica.size == 1:
            first = (replica.coord * self._microbatches + microbatch) * count
        else:
            return None
        return list(range(first, first + count))
