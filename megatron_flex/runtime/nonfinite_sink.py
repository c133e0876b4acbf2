"""Watches the tensors of each step for values that are not finite; all ranks agree on the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_flex.collectives import Route, gather_objects, global_rank, max_over_ranks
from megatron_flex.errors import FlexError, NonFiniteError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.nonfinite import Candidate, Neighbourhood, NonFinite, PassRange, Verdict, reach_verdict
from megatron_flex.nonfinite.pass_ranges import PassRanges, RangeQueue
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.edit_failures import StepFailure
from megatron_flex.runtime.full_parameters import ParameterIndex
from megatron_flex.runtime.hooks import make_sink_hooks
from megatron_flex.runtime.sink_cycle import NONFINITE_PURPOSE, SinkCycle, StepStart
from megatron_flex.sites import GRADIENT_SUFFIX, Site
from megatron_flex.wording import count_words

STEP_FLAGS = "whether the values of the step are finite"
MAX_PARAMETERS = 8  # names that a rank reports
MAX_WARNED = 4  # hook points in one warning of an overflow to come


class PassPlace(NamedTuple):
    """A pass of a microbatch through a virtual stage on this rank."""

    microbatch: int
    backward: bool
    stage: int


class NonFiniteSink:
    """The search for values that are not finite on this rank.

    A step gathers ranges and sends nothing. At its end the ranks exchange two flags. Only if a value is not
    finite they exchange which pass it was in, and then the ranges of that pass.

    Attributes:
        settings: what the user registered.
        hooks: the hooks that feed the sink.
        cycle: the steps that are watched.
    """

    def __init__(
        self,
        settings: NonFinite,
        values: tuple[Site, ...],
        gradients: tuple[Site, ...],
        parameter_index: ParameterIndex,
        clock: Clock,
        loss_scale: Callable[[], float],
    ) -> None:
        self.settings, self.mesh, self.clock = settings, parameter_index.mesh, clock
        self.cycle = SinkCycle(NONFINITE_PURPOSE, self.mesh, clock, frozenset())
        self.hooks = make_sink_hooks(self, settings.describe(), values, gradients, settings.groups)
        self._parameter_index, self._loss_scale = parameter_index, loss_scale
        self._watches_gradients = bool(gradients)
        self._hook_points = len(values)
        self._queue = RangeQueue(self.mesh)
        self._passes: dict[PassPlace, PassRanges] = {}
        self._trains = False

    def describe_extent(self) -> str:
        """What is watched, in words."""
        more = " with their gradients" if self._watches_gradients else ""
        parameters = ", and the gradients of parameters" if self.settings.parameters else ""
        return f"{count_words(self._hook_points, 'hook point')}{more}{parameters}"

    @property
    def needs_dim_names(self) -> bool:
        """Whether the sink needs the names of dims."""
        return False

    @property
    def awaits_gradients(self) -> bool:
        """Whether gradients may still arrive after the call of the model."""
        return self.cycle.active and self._trains and (self._watches_gradients or self.settings.parameters)

    def due(self, start: StepStart) -> bool:
        """Begin a step; return whether the step is watched."""
        if start.called and start.mesh["dp"].size != self.mesh["dp"].size:
            self.cycle.warn_once(
                "called",
                "calls outside a step are not watched for values that are not finite with several data "
                "parallel ranks, which may call the model a different number of times; make the calls in "
                "`with flex.step():`",
            )
            return False
        self._forget()
        self._trains = torch.is_grad_enabled()
        self.cycle.begin()
        return True

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Take the range of a shard."""
        if not self.cycle.belongs(key) or not (local.is_floating_point() or local.is_complex()):
            return ""
        stage = self.clock.chunk * self.mesh["pp"].size + self.mesh["pp"].coord
        place = PassPlace(key.microbatch, key.site.endswith(GRADIENT_SUFFIX), stage)
        if place not in self._passes:
            self._passes[place] = PassRanges()
        # Rows of experts come from tokens of many ranks: their place in the full tensor is not known here.
        described = None if route is not None else layout
        self._queue.take(self._passes[place], key.site, key.call, local.detach(), described)
        return ""

    def fail(self, failure: StepFailure) -> None:
        """A failure of this rank is raised by the edits that it comes from; ranges remain valid."""

    def close(self, failed: bool) -> None:
        """Forget everything."""
        self._forget()

    def _forget(self) -> None:
        self._passes.clear()
        self._queue.clear()

    def flush(self, failed: bool, mesh: Mesh) -> None:
        """End a step. All ranks of the mesh make the same call, unless the step `failed` there.

        Raises:
            NonFiniteError: on all ranks: a value is not finite, and the mode is `stop`.
        """
        active, self.cycle.active = self.cycle.active, False
        if active and failed:
            with suppress(RuntimeError):  # of a device that is lost: what the step raised says so
                self._warn_alone()
        if not active or failed:
            self._forget()
            return
        passes = {_make_candidate(place): ranges for place, ranges in self._passes.items()}
        if self.settings.parameters and self._trains:
            passes[Candidate(True, 0, False, 0)] = self._measure_parameter_gradients()
        self._queue.finish()
        self._passes.clear()
        bad = [candidate for candidate, measured in passes.items() if measured.found]
        near = self._list_near_overflow(passes)
        some_bad, some_near = max_over_ranks([int(bool(bad)), int(bool(near))], mesh, STEP_FLAGS)
        self.cycle.complete()
        if some_bad:
            verdict = self._find_first(min(bad, default=None), passes, mesh)
            if self.settings.path is not None and verdict.candidate in passes:
                self._write(Path(self.settings.path), verdict, passes[verdict.candidate])
            self._report(verdict)
        elif some_near:
            self._warn_of_overflow(near, mesh)

    def _warn_alone(self) -> None:
        """Warn of the first tensor on this rank, where the step failed and the ranks cannot compare."""
        passes = {_make_candidate(place): ranges for place, ranges in self._passes.items()}
        self._queue.finish()
        bad = [candidate for candidate, measured in passes.items() if measured.found]
        if bad:
            here = Neighbourhood(global_rank(), self.mesh["dp"].coord, passes[min(bad)].ranges, ())
            verdict = reach_verdict(self.cycle.iteration, min(bad), [here], 1.0)
            self.cycle.warn_once("alone", f"the step failed; of this rank alone: {verdict.describe()}")

    def _list_near_overflow(self, passes: Mapping[Candidate, PassRanges]) -> list[PassRange]:
        """The tensors near the largest value of their dtype; of a scaled loss no gradients.

        A loss scaler raises the scale until gradients overflow.
        """
        near = [(c, r) for c, measured in passes.items() for r in measured.ranges if r.near_overflow]
        gradients = any(c.backward or c.parameters for c, _ in near)
        scaled = gradients and self._loss_scale() > 1
        return [r for c, r in near if not (scaled and (c.backward or c.parameters))]

    def _find_first(
        self, local_first: Candidate | None, passes: Mapping[Candidate, PassRanges], mesh: Mesh
    ) -> Verdict:
        """The verdict of all ranks. Collective over the mesh."""
        axes = [axis.name for axis in mesh]
        candidate = min(c for c in gather_objects(local_first, mesh, axes) if c is not None)
        ranges = passes[candidate].ranges if candidate in passes else []
        neighbourhood = Neighbourhood(
            global_rank(), self.mesh["dp"].coord, ranges, self._list_bad_parameters()
        )
        neighbourhoods = gather_objects(neighbourhood, mesh, axes)
        return reach_verdict(self.cycle.iteration, candidate, neighbourhoods, self._loss_scale())

    def _report(self, verdict: Verdict) -> None:
        if verdict.overflows_scaled or self.settings.mode == "warn":
            self.cycle.warn_once(f"not finite {verdict.site}", verdict.describe(), alike=True)
            return
        raise NonFiniteError(
            verdict.describe(),
            site=verdict.site,
            ranks=verdict.located,
            iteration=verdict.iteration,
            microbatch=None if verdict.candidate.parameters else verdict.candidate.microbatch,
            indices=verdict.indices,
            inputs=verdict.inputs,
            parameters=verdict.parameters,
        )

    def _write(self, path: Path, verdict: Verdict, measured: PassRanges) -> None:
        """Write this rank's shards of the first tensor and of the one before, if the value is among them.

        A disk that fails is a warning: the verdict is worth more than the shards.
        """
        if verdict.site not in measured.neighbourhood:
            return
        folder, near = path / f"iteration-{verdict.iteration}", measured.neighbourhood
        sizes = self.mesh.sizes
        content = {
            "microbatch": verdict.candidate.microbatch,
            "coords": dict(self.mesh.coords),
            "layouts": {name: layout and layout.describe(sizes) for name, (_, layout) in near.items()},
            "shards": {name: shard.detach().clone() for name, (shard, _) in near.items()},
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(content, folder / f"rank-{global_rank()}.pt")
        except OSError as error:
            self.cycle.warn_once("written", f"{folder}: the shards are not written: {error.strerror}")

    def _warn_of_overflow(self, near: list[PassRange], mesh: Mesh) -> None:
        """Warn of tensors near the largest value of their dtype. Collective over the mesh."""
        reports = gather_objects(near[:MAX_WARNED], mesh, [axis.name for axis in mesh])
        greatest: dict[str, tuple[float, torch.dtype]] = {}
        for known in (r for ranges in reports for r in ranges):
            magnitude = max(-known.low, known.high)
            greatest[known.site] = max(
                greatest.get(known.site, (0.0, known.dtype)),
                (magnitude, known.dtype),
                key=lambda pair: pair[0],
            )
        for site, (magnitude, dtype) in list(greatest.items())[:MAX_WARNED]:
            text = (
                f"iteration {self.cycle.iteration}: {site} has the magnitude {magnitude:.4g}, near "
                f"{torch.finfo(dtype).max:g}, the largest value of {dtype}; it may overflow soon"
            )
            self.cycle.warn_once(f"near {site}", text, alike=True)

    def _measure_parameter_gradients(self) -> PassRanges:
        """The ranges of this rank's gradients of parameters, in model order."""
        ranges = PassRanges()
        storage = self._parameter_index.adapter.storage
        reduced = storage.reduced(self._parameter_index.called) is True
        for name, site_layout, parameter in self._list_parameters():
            try:
                gradient = storage.gradient(parameter, reduced)
            except FlexError as error:  # such as a wrapper that has not reduced it
                text = f"the gradient of {name} is not watched: {error}"
                self.cycle.warn_once("gradients", text, alike=True)
                continue
            if gradient.tensor is not None:
                # A flat part is a run of entries in row-major order: it has no index in each dim to report.
                layout = site_layout if gradient.part is None else None
                self._queue.take(ranges, name + GRADIENT_SUFFIX, 0, gradient.tensor.detach(), layout)
        return ranges

    def _list_bad_parameters(self) -> list[str]:
        """The names of this rank's parameters that are not finite. Waits for the device."""
        values = ((name, parameter) for name, _, parameter in self._list_parameters())
        bad = (name for name, p in values if p.numel() and not bool(p.detach().isfinite().all()))
        return [name for name, _ in zip(bad, range(MAX_PARAMETERS), strict=False)]

    def _list_parameters(self) -> Iterator[tuple[str, Layout, torch.nn.Parameter]]:
        for name in self._parameter_index.local_sites:
            for site, parameter in self._parameter_index.held(name)[:1]:
                yield name, site.layout, parameter


def _make_candidate(place: PassPlace) -> Candidate:
    # The backward pass goes through the stages in the opposite order.
    return Candidate(False, place.microbatch, place.backward, -place.stage if place.backward else place.stage)
