"""The dumps of a session."""

from __future__ import annotations

from megatron_flex.dump import Dump, Manifest
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.dumps.taking import Dumped, Sinking
from megatron_flex.runtime.registry import Registry


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
