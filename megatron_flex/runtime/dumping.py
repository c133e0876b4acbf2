"""Dumps at work: hooks that hand each rank's shards to its writer, and the clock that tells iterations."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import Route, everyone
from megatron_flex.dump import (
    GRADIENT,
    VALUE,
    Dump,
    Entry,
    Manifest,
    Ownership,
    Picked,
    Place,
    Writer,
    mean,
    mean_layout,
    open_run,
    pick,
    to_json,
)
from megatron_flex.dump.selection import SAMPLE, TOKEN, dim_of
from megatron_flex.errors import DumpError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.hooks import HookFunction, HookType
from megatron_flex.runtime.registry import Registry
from megatron_flex.sites import GRAD, Site
from megatron_flex.version import __version__

PACKAGES = ("torch", "megatron-core", "fairscale", "deepspeed", "transformers", "accelerate")


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
        self._ownership = Ownership(mesh)
        self._runs: Counter[int] = Counter()
        self._skipped: frozenset[str] = frozenset()
        self._microbatches = self._turns = 0

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
        self._microbatches, self._turns = microbatches, 0
        if self.active and self.writer is not None:
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
        turn, self._turns = self._turns, self._turns + 1
        if not self._ownership.mine(layout, local.nbytes):
            return
        local, layout, picked = self._wanted(key, local.detach(), layout)
        shape = tuple(local.shape)
        if picked is not None:
            local = picked.of(local, layout)
        if factor != 1.0:
            local = (local.float() if local.dtype == torch.float16 else local) / factor
        if self.dump.dtype is not None and local.is_floating_point():
            local = local.to(self.dump.dtype)
        entry = Entry(site, kind, key.microbatch, key.call, 0, shape, "", picked is not None, turn=turn)
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


class Dumping:
    """The dumps of a session."""

    def __init__(self, registry: Registry, mesh: Mesh, clock: Clock) -> None:
        self.registry, self.mesh, self.clock = registry, mesh, clock
        self.dumps: list[Dumped] = []

    def add(self, dump: Dump, manifest: Manifest, names: frozenset[str], fixed: frozenset[str]) -> Dumped:
        """Open a dump. Collective over the mesh.

        Args:
            dump: the settings.
            manifest: of the run; what is found when it is opened is filled in.
            names: of the sites.
            fixed: those of them that have no gradient.
        """
        dumped = Dumped(dump, self.mesh, self.clock)
        dumped.open(manifest)
        if names:
            dumped.hooks.append(Sinking(dumped, names, "forward"))
        if names - fixed and dump.gradients:
            dumped.hooks.append(Sinking(dumped, names - fixed, "tensor"))
        self.dumps.append(dumped)
        return dumped

    def begins(self, microbatches: int) -> bool:
        """A step starts; returns whether taps have to be put in or out."""
        if not self.dumps:
            return False
        return self.registry.rest({h for d in self.dumps if not d.begins(microbatches) for h in d.hooks})

    def ends(self, failed: bool) -> None:
        """It is over."""
        for dumped in self.dumps:
            dumped.ends(failed)

    def close(self) -> None:
        """Wait until everything is written."""
        for dumped in self.dumps:
            dumped.close()
        self.dumps.clear()


def manifest_of(
    dump: Dump,
    framework: str,
    mesh: Mesh,
    sites: list[Site],
    parameters: Mapping[str, ParameterSite],
    config: Any,
) -> Manifest:
    """What a run says of itself, as far as every rank knows it."""
    shapes = sorted((name, list(p.shape)) for name, p in parameters.items())
    return Manifest(
        run=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=_versions(),
        framework=framework,
        axes={a.name: a.size for a in mesh.axes},
        experts={a.name: a.size for a in mesh.experts},
        ranks=(),
        model=plain(config),
        identity=hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16],
        sites=tuple(_place(s) for s in sites),
        parameters=(),
        settings=dump.to_json(),
    )


def _place(site: Site) -> Place:
    return Place(site.name, to_json(site.layout), tuple(site.shape), site.stage, site.chunk, site.inferred)


def _versions() -> dict[str, str]:
    out = {"megatron_flex": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        if package.replace("-core", "") in sys.modules:
            try:
                out[package] = version(package)
            except PackageNotFoundError:
                out[package] = "unknown"
    return out


def plain(config: Any) -> dict[str, Any]:
    """The plain values of a config."""
    found = getattr(config, "__dict__", None) or {}
    return {k: v for k, v in sorted(found.items()) if isinstance(v, (bool, int, float, str, type(None)))}
