"""The sinks of a session: registered, given their steps, and closed with the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import Protocol, TypeVar

from megatron_flex.collectives import Agreement, BackgroundReduction, agreement_seconds
from megatron_flex.dump import Dump
from megatron_flex.errors import DumpError, FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.nonfinite import NonFinite
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.dump_sink import DumpSink
from megatron_flex.runtime.edit_failures import StepFailure
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import HookFunction, TensorSink
from megatron_flex.runtime.nonfinite_sink import NonFiniteSink
from megatron_flex.runtime.sink_cycle import StepStart
from megatron_flex.runtime.statistics_sink import StatisticsSink
from megatron_flex.statistics import Statistics

SinkSettings = Dump | Statistics | NonFinite


class Sink(TensorSink, Protocol):
    """A dump, statistics or a search for values that are not finite, on this rank.

    Attributes:
        settings: what the user registered.
        hooks: the hooks that feed the sink.
    """

    hooks: list[HookFunction]

    @property
    def settings(self) -> SinkSettings: ...

    @property
    def awaits_gradients(self) -> bool:
        """Whether gradients may still arrive after the call of the model."""

    def due(self, start: StepStart) -> bool:
        """Begin a step, and return whether the sink records it; on all ranks alike."""

    def flush(self, failed: bool, mesh: Mesh) -> None:
        """End a step, recorded or not; `failed`: what was recorded of it is dropped."""

    def fail(self, failure: StepFailure) -> None:
        """Know that this rank could not record all of the step, before the step is flushed as a good one."""

    def close(self, failed: bool) -> None:
        """Wait until everything is written. Collective, unless `failed`."""


S = TypeVar("S", bound=Sink)


class SessionSinks:
    """The dumps, statistics and searches of a session, in the order of registration.

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
        self.mesh, self.clock = mesh, clock
        self._registry, self._update_taps = registry, update_taps
        # A separate agreement: a rank still inside a step would match the session's with a different text.
        self._agreement = Agreement(f"{name}/sinks", agreement_seconds(), mesh.ranks)
        self._sinks: list[Sink] = []
        self._reduction: BackgroundReduction | None = None

    def __iter__(self) -> Iterator[Sink]:
        return iter(self._sinks)

    @property
    def dumps(self) -> list[DumpSink]:
        return [s for s in self._sinks if isinstance(s, DumpSink)]

    @property
    def statistics(self) -> list[StatisticsSink]:
        return [s for s in self._sinks if isinstance(s, StatisticsSink)]

    @property
    def nonfinite(self) -> list[NonFiniteSink]:
        """The search for values that are not finite, if one is registered."""
        return [s for s in self._sinks if isinstance(s, NonFiniteSink)]

    @property
    def groups(self) -> set[str]:
        """The groups of all sinks, including those of parameters alone, which have no hooks."""
        return {group for sink in self._sinks for group in sink.settings.groups}

    @property
    def need_step(self) -> bool:
        """Whether any of them cannot record all that it wants in a call of the model outside a step.

        Gradients of parameters exist at the end of a step, and statistics and values that are not finite are
        combined over data parallel ranks there.
        """
        combined = any(not isinstance(s, DumpSink) for s in self._sinks)
        return combined or any(d.parameter_gradients for d in self.dumps)

    @property
    def reduction(self) -> BackgroundReduction:
        """The sums of statistics over all ranks. The first access is collective."""
        if self._reduction is None:
            self._reduction = BackgroundReduction(self.mesh)
        return self._reduction

    def add(self, kind: type[S], path: str | Path | None, description: str, open_sink: Callable[[], S]) -> S:
        """Add a sink; the caller registers its hooks. Collective over the mesh.

        Args:
            kind: the class of the sink.
            path: its folder; None if it writes nothing.
            description: what all ranks must have alike.
            open_sink: makes the sink. Collective.

        Raises:
            FlexError: on all ranks: another sink of this kind writes to the folder, or is registered and
                needs none, or the folder cannot be written.
            HookError: on all ranks: the ranks have different sinks.
        """
        self._agreement.compare(description)
        for other in self._sinks:
            if type(other) is kind and _find_folder(other.settings) == (path and realpath(path)):
                raise _make_clash(other.settings)
        sink = open_sink()
        self._sinks.append(sink)
        return sink

    def has(self, settings: SinkSettings) -> bool:
        """Whether a dump or statistics are registered."""
        return any(s.settings is settings for s in self._sinks)

    def remove(self, settings: SinkSettings) -> Sink:
        """Remove a sink after all of it is written; the caller removes its hooks. Collective.

        Raises:
            FlexError: nothing of these settings is registered.
            DumpError: writing failed, and the settings ask to raise.
        """
        sink = next((s for s in self._sinks if s.settings is settings), None)
        if sink is None:
            raise _make_error(settings, f"{settings!r} is not registered here; nothing to remove")
        self._sinks.remove(sink)
        sink.close(False)
        return sink

    def begins(self, start: StepStart, probing: bool = False) -> None:
        """Begin a step, and deactivate the hooks of sinks that do not record it.

        Args:
            start: the step.
            probing: whether the model runs only to be captured, which is not a step of the training loop.
        """
        resting: set[HookFunction] = set()
        for sink in self._sinks:
            if sink.cycle.active:  # the backward pass that the last call waited for did not come
                sink.cycle.warn_of_missing_backward()
                sink.flush(False, start.mesh)
            selected = not probing and self._registry.selects(sink.settings.groups)
            if not selected or not sink.due(start):
                resting |= set(sink.hooks)
        if self._registry.suspend(resting):
            self._update_taps()

    def ends(self, failed: bool, mesh: Mesh, later: bool = False) -> None:
        """End the step; with `later` only its forward pass, after which a backward pass may follow."""
        if self._sinks:
            due = [s for s in self._sinks if failed or not (later and s.awaits_gradients)]
            _call_all([partial(sink.flush, failed, mesh) for sink in due])

    def fail(self, failure: StepFailure) -> None:
        """Let the sinks that record this step report a failure of this rank, as no other exchange does."""
        for sink in self._sinks:
            if sink.cycle.active:
                sink.fail(failure)

    def deliver_statistics(self) -> None:
        """Write the statistics of the last measured step now. Collective over the mesh, between steps."""
        for sink in self.statistics:
            sink.deliver_last()

    def close(self, failed: bool) -> None:
        """Finish all sinks. Collective over the mesh, unless `failed`."""
        sinks, self._sinks = self._sinks, []
        _call_all([partial(sink.close, failed) for sink in sinks])


def _find_folder(settings: SinkSettings) -> str | None:
    return None if isinstance(settings, NonFinite) else realpath(settings.path)


def _make_clash(other: SinkSettings) -> FlexError:
    if isinstance(other, NonFinite):
        return FlexError(f"{other!r} is registered already; remove it before another is registered")
    kind = type(other).__name__
    text = f"{other.path}: another {kind} of this model is written there; name another folder"
    return _make_error(other, text)


def _make_error(settings: SinkSettings, text: str) -> FlexError:
    return DumpError(text, path=settings.path) if isinstance(settings, Dump) else FlexError(text)


def _call_all(calls: list[Callable[[], None]]) -> None:
    """Make all calls, whatever one raises: each error is raised on all ranks. The first is raised."""
    if calls:
        try:
            calls[0]()
        finally:
            _call_all(calls[1:])
