"""The dumps of a session."""

from __future__ import annotations

from collections.abc import Callable
from os.path import realpath

from megatron_flex.dump import Dump, Manifest
from megatron_flex.errors import DumpError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.dumps.dumped import DumpSelection, DumpSink
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.hook_registry import HookRegistry


class SessionDumps:
    """The dumps of a session.

    Args:
        registry: of the hooks.
        mesh: the axes of the run.
        clock: which step and iteration it is.
        agree: holds what is said of a dump against what other ranks say.
    """

    def __init__(
        self,
        registry: HookRegistry,
        mesh: Mesh,
        clock: Clock,
        agree: Callable[[str], None],
    ) -> None:
        self.registry, self.mesh, self.clock = registry, mesh, clock
        self._agree = agree
        self.dumps: list[DumpSink] = []

    def add(self, dump: Dump, chosen: DumpSelection, manifest: Manifest) -> DumpSink:
        """Open a dump. Collective over the mesh.

        Args:
            dump: the settings.
            chosen: what it is of.
            manifest: of the run; what is found when it is opened is filled in.

        Raises:
            DumpError: on all ranks: it cannot be written there.
            HookError: on all ranks: they have different dumps.
        """
        self._agree(dump.describe())
        if any(realpath(d.dump.path) == realpath(dump.path) for d in self.dumps):
            raise DumpError(f"{dump.path} is being written by another dump here; name another folder")
        dumped = DumpSink(dump, chosen, self.mesh, self.clock)
        dumped.open(manifest)
        self.dumps.append(dumped)
        return dumped

    def remove(self, dump: Dump) -> DumpSink:
        """Take a dump out, once all of it is written. Collective over the mesh.

        Raises:
            DumpError: it is not there; or writing it failed, as the settings say.
        """
        found = next((d for d in self.dumps if d.dump is dump), None)
        if found is None:
            raise DumpError(f"the dump to {dump.path} is not registered here; nothing to remove")
        self.dumps.remove(found)
        found.close(False)
        return found

    def begins(
        self, microbatches: int, mesh: Mesh, called: bool = False, probing: bool = False
    ) -> set[HookFunction]:
        """A step starts: hooks of dumps that do not take it are to rest.

        Args:
            microbatches: how many it has on each data parallel rank; 0 if that is not known yet.
            mesh: of the ranks that are in it.
            called: whether it is a call of the model by itself.
            probing: whether the model is only run for what is read, which is no step of the loop.

        Returns:
            The hooks that are to rest.
        """
        resting: set[HookFunction] = set()
        for dumped in self.dumps:
            dumped.end_overdue_step(mesh)
            wanted = not probing and self.registry.takes(dumped.dump.tags)
            if not wanted or not dumped.begins(microbatches, mesh, called):
                resting |= set(dumped.hooks)
        return resting

    def ends(self, failed: bool, mesh: Mesh, later: bool = False) -> None:
        """It is over; or, with `later`, only its forward pass is, and a backward pass may follow."""
        for dumped in self.dumps:
            if failed or not (later and dumped.awaits_gradients):
                dumped.ends(failed, mesh)

    def close(self, failed: bool) -> None:
        """Wait until everything is written. Collective over the mesh, unless something `failed`."""
        dumps, self.dumps = self.dumps, []
        for dumped in dumps:
            dumped.close(failed)
