"""The dumps and statistics of a session: registered, begun and ended with its steps, and closed with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_flex.collectives import Agreement, agreement_seconds
from megatron_flex.dump import Dump
from megatron_flex.dump.schema import Manifest
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.dump_sink import DumpSelection, DumpSink, SessionDumps
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.statistics_sink import SessionStatistics, StatisticsSelection, StatisticsSink
from megatron_flex.statistics import Statistics
from megatron_flex.statistics.statistics_records import Sink


class SessionSinks:
    """The dumps and statistics of a session.

    Args:
        registry: the hooks of the session.
        mesh: the axes of the run.
        clock: the current step and iteration.
        name: the session's name, the same on all ranks.
        update_taps: installs taps where hooks are active, and removes the others.
    """

    def __init__(
        self, registry: HookRegistry, mesh: Mesh, clock: Clock, name: str, update_taps: Callable[[], None]
    ) -> None:
        self._registry, self._update_taps = registry, update_taps
        # A separate agreement: a rank still inside a step would match the session's with a different text.
        agreement = Agreement(f"{name}/sinks", agreement_seconds(), mesh.ranks)
        self._dumps = SessionDumps(registry, mesh, clock, agreement.compare)
        self._statistics = SessionStatistics(registry, mesh, clock, agreement.compare)

    @property
    def dumps(self) -> Sequence[DumpSink]:
        """The registered dumps, in the order of registration."""
        return self._dumps.dumps

    @property
    def statistics(self) -> Sequence[StatisticsSink]:
        """The registered statistics, in the order of registration."""
        return self._statistics.statistics_sinks

    @property
    def groups(self) -> set[str]:
        """The groups of all dumps and statistics, including those of parameters alone, which have no
        hooks.
        """
        dumps = [d.dump.groups for d in self.dumps]
        statistics = [s.statistics.groups for s in self.statistics]
        return {group for groups in (*dumps, *statistics) for group in groups}

    @property
    def need_step(self) -> bool:
        """Whether any of them cannot record all that it wants in a call of the model outside a step.

        Gradients of parameters exist at the end of a step, and statistics are combined over data parallel
        ranks there.
        """
        return bool(self.statistics) or any(
            d.dump.gradients and d.chosen.parameters is not None for d in self.dumps
        )

    def add_dump(self, dump: Dump, chosen: DumpSelection, manifest: Manifest) -> DumpSink:
        """Open a dump; the caller adds its hooks. Arguments and errors as for `SessionDumps.add`."""
        return self._dumps.add(dump, chosen, manifest)

    def remove_dump(self, dump: Dump) -> DumpSink:
        """Remove a dump after all of it is written; the caller removes its hooks. Collective.

        Raises:
            DumpError: the dump is not registered; or writing failed and the settings ask to raise.
        """
        return self._dumps.remove(dump)

    def has_dump(self, dump: Dump) -> bool:
        """Whether a dump is registered."""
        return any(d.dump is dump for d in self.dumps)

    def add_statistics(
        self, statistics: Statistics, wanted: StatisticsSelection, opened: Callable[[], Sink]
    ) -> StatisticsSink:
        """Add statistics; the caller adds their hooks. As for `SessionStatistics.add`."""
        return self._statistics.add(statistics, wanted, opened)

    def remove_statistics(self, statistics: Statistics) -> StatisticsSink:
        """Remove statistics after all are written; the caller removes their hooks. Collective.

        Raises:
            FlexError: the statistics are not registered.
        """
        return self._statistics.remove(statistics)

    def has_statistics(self, statistics: Statistics) -> bool:
        """Whether statistics are registered."""
        return any(m.statistics is statistics for m in self.statistics)

    def begins(self, microbatches: int, mesh: Mesh, called: bool = False, probing: bool = False) -> None:
        """Begin a step, and deactivate the hooks of sinks that skip it. Arguments as for
        `SessionDumps.begins`.
        """
        resting = self._dumps.begins(microbatches, mesh, called, probing)
        resting |= self._statistics.begins(mesh, called, probing)
        if self._registry.rest(resting):
            self._update_taps()

    def ends(self, failed: bool, mesh: Mesh, later: bool = False) -> None:
        """End the step; with `later` only its forward pass, after which a backward pass may follow."""
        try:
            self._dumps.ends(failed, mesh, later)
        finally:  # each of these errors is raised on all ranks
            self._statistics.ends(failed, later)

    def flush_statistics(self) -> None:
        """Write the statistics of the last measured step now. Collective over the mesh, between steps."""
        for sink in self.statistics:
            sink.flush()

    def close(self, failed: bool) -> None:
        """Finish all sinks. Collective over the mesh, unless `failed`."""
        try:
            self._dumps.close(failed)
        finally:
            self._statistics.close(failed)
