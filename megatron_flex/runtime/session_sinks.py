"""Where tensors of a session go beside memory: its dumps and statistics, and which of their hooks rest."""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.collectives import Agreement
from megatron_flex.config import flex_config
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.dumps import SessionDumps
from megatron_flex.runtime.measuring import SessionStatistics
from megatron_flex.runtime.hook_registry import HookRegistry


class SessionSinks:
    """The dumps and statistics of a session.

    Args:
        registry: of the hooks.
        mesh: the axes of the run.
        clock: which step and iteration it is.
        name: the session's, the same on all ranks.
        retap: puts taps where hooks stand now.
    """

    def __init__(
        self, registry: HookRegistry, mesh: Mesh, clock: Clock, name: str, update_taps: Callable[[], None]
    ) -> None:
        self.registry, self._retap = registry, update_taps
        # Its own: a rank that is still in a step would take part in the session's, and differ.
        agreement = Agreement(f"{name}/sinks", flex_config.agree_seconds, mesh.ranks)
        self.dumping = SessionDumps(registry, mesh, clock, agreement.compare)
        self.measuring = SessionStatistics(registry, mesh, clock, agreement.compare)

    @property
    def tags(self) -> set[str]:
        """The groups that they are in, with hooks or, of parameters alone, without."""
        kept = [d.dump.tags for d in self.dumping.dumps]
        return {t for tags in (*kept, *(m.statistics.tags for m in self.measuring.statistics_sinks)) for t in tags}

    def begins(self, microbatches: int, mesh: Mesh, called: bool = False, probing: bool = False) -> None:
        """A step starts: hooks of those that do not take it rest. Arguments as for `SessionDumps.begins`."""
        resting = self.dumping.begins(microbatches, mesh, called, probing)
        resting |= self.measuring.begins(mesh, called, probing)
        if self.registry.rest(resting):
            self._retap()

    def ends(self, failed: bool, mesh: Mesh, later: bool = False) -> None:
        """It is over; or, with `later`, only its forward pass is, and a backward pass may follow."""
        try:
            self.dumping.ends(failed, mesh, later)
        finally:  # what one of them raises, it raises on all ranks
            self.measuring.ends(failed, later)

    def close(self, failed: bool) -> None:
        """Finish everything. Collective over the mesh, unless something `failed`."""
        try:
            self.dumping.close(failed)
        finally:
            self.measuring.close(failed)
