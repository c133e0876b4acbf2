"""The statistics of a session."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from os.path import realpath

from megatron_flex.collectives import BackgroundReduction, gather_objects
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.measuring.measurer import StatisticsSink, StatisticsSelection
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.sink import Sink


class SessionStatistics:
    """The statistics of a session.

    Args:
        registry: of the hooks.
        mesh: the axes of the run.
        clock: which step and iteration it is.
        agree: holds what is said of statistics against what other ranks say.
    """

    def __init__(self, registry: HookRegistry, mesh: Mesh, clock: Clock, agree: Callable[[str], None]) -> None:
        self.registry, self.mesh, self.clock = registry, mesh, clock
        self._agree = agree
        self._adding: BackgroundReduction | None = None
        self.statistics_sinks: list[StatisticsSink] = []

    def add(self, statistics: Statistics, wanted: StatisticsSelection, opened: Callable[[], Sink]) -> StatisticsSink:
        """Begin to measure from the next step on. Collective over the mesh.

        Args:
            statistics: the settings.
            wanted: what they are of.
            opened: makes what the numbers go to; one on each rank.

        Raises:
            FlexError: on all ranks: others go to the same folder, or they cannot be written there.
            HookError: on all ranks: they have different statistics.
        """
        names = " ".join(e.name for e in wanted.entries())
        self._agree(f"{statistics.describe()}: {sha256(names.encode()).hexdigest()[:16]}")
        if any(realpath(m.statistics.path) == realpath(statistics.path) for m in self.statistics_sinks):
            raise FlexError(f"statistics are written to {statistics.path} already; name another folder")
        sink = self._open(opened)
        if self._adding is None:
            self._adding = BackgroundReduction(self.mesh)
        measurer = StatisticsSink(statistics, wanted, self.mesh, self.clock, self._adding, sink)
        self.statistics_sinks.append(measurer)
        return measurer

    def _open(self, opened: Callable[[], Sink]) -> Sink:
        """The sink of this rank; what one rank finds wrong, all raise."""
        sink, why = None, ""
        try:
            sink = opened()
        except FlexError as error:
            why = str(error)
        problems = [w for w in gather_objects(why, self.mesh, [a.name for a in self.mesh]) if w]
        if problems or sink is None:
            if sink is not None:
                sink.close()
            raise FlexError("; ".join(dict.fromkeys(problems)))
        return sink

    def remove(self, statistics: Statistics) -> StatisticsSink:
        """Take statistics out, once all of them are written. Every rank calls it alike.

        Raises:
            FlexError: they are not there.
        """
        found = next((m for m in self.statistics_sinks if m.statistics is statistics), None)
        if found is None:
            raise FlexError(f"the statistics in {statistics.path} are not registered here; nothing to remove")
        self.statistics_sinks.remove(found)
        found.close(False)
        return found

    def begins(self, mesh: Mesh, called: bool = False, probing: bool = False) -> set[HookFunction]:
        """A step starts; arguments as for `Dumping.begins`.

        Returns:
            The hooks that are to rest.
        """
        resting: set[HookFunction] = set()
        for measurer in self.statistics_sinks:
            measurer.end_overdue_step()
            wanted = not probing and self.registry.takes(measurer.statistics.tags)
            if not wanted or not measurer.begins(mesh, called):
                resting |= set(measurer.hooks)
        return resting

    def ends(self, failed: bool, later: bool = False) -> None:
        """It is over; or, with `later`, only its forward pass is, and a backward pass may follow."""
        for measurer in self.statistics_sinks:
            if failed or not (later and measurer.awaits_gradients):
                measurer.ends(failed)

    def close(self, failed: bool) -> None:
        """Wait until everything is written; every rank calls it alike, unless something `failed`."""
        statistics_sinks, self.statistics_sinks = self.statistics_sinks, []
        for measurer in statistics_sinks:
            measurer.close(failed)
