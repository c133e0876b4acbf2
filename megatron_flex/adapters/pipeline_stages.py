"""The stages that one rank has of a pipeline, as one model: what every framework's schedule has in common.

A stage has the adapter that its modules have without a schedule. The schedule reports steps and microbatches
for all of them, and the rank of a stage tells that of the next one the layout of what it sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import (
    Adapter,
    Listener,
    LocalGradient,
    NormListener,
    ParameterSite,
    Part,
    Undo,
)
from megatron_flex.adapters.data_parallel import DDPParameters
from megatron_flex.adapters.gradient_norms import watch_torch_clipping
from megatron_flex.adapters.layout_rules import UnknownLayout, spread_from_json, spread_to_json
from megatron_flex.adapters.model_calls import ModelRunner
from megatron_flex.adapters.module_adapter import ModuleAdapter, check_names_distinct
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.taps import join_undos
from megatron_flex.collectives import agreement_seconds, await_value, store_value
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site, Tap, TapCallbacks

if TYPE_CHECKING:
    from megatron_flex.adapters.propagation import LayoutPropagator

UNKNOWN_STAGE = UnknownLayout(
    "it comes from a pipeline stage that has no parallel module in it, and is not followed there"
)


class StageLayouts:
    """The layouts of the tensors that stages send each other, exchanged once after each attachment.

    Args:
        mesh: the axes of the run.

    Attributes:
        propagators: the layout propagator of each stage on this rank, by its number in the pipeline.
    """

    _counts: ClassVar[Counter[tuple[int, ...]]] = Counter()  # of watchers over the same pipelines

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.propagators: dict[int, LayoutPropagator | None] = {}
        self._sent: set[int] = set()  # the stages that have sent their layout to the next one
        self._watches = 0

    def begin(self) -> None:
        """A session starts to watch the schedule; all ranks of a pipeline start the same number of times."""
        self._sent.clear()
        self._watches = StageLayouts._counts[self.mesh["pp"].ranks]
        StageLayouts._counts[self.mesh["pp"].ranks] += 1

    def due(self, stage: int) -> bool:
        """Whether a stage's layouts have yet to be exchanged."""
        return stage not in self._sent

    def receive(self, stage: int) -> None:
        """Receive the layout of a stage's input from the stage before; waits until that stage has run."""
        propagator = self.propagators[stage]
        if propagator is None:
            return
        if stage > 0:
            spreads = await_value(self._key(stage - 1), agreement_seconds())
            propagator.entering = [spread_from_json(spread) for spread in spreads]
        propagator.left = None

    def send(self, stage: int) -> None:
        """Send the layout of a stage's output to the next stage."""
        self._sent.add(stage)
        propagator = self.propagators[stage]
        if any(self.mesh[axis].size > 1 for axis in ("tp", "cp")):
            spreads = [UNKNOWN_STAGE] if propagator is None else propagator.left or []
            store_value(self._key(stage), [spread_to_json(spread) for spread in spreads])

    def _key(self, stage: int) -> str:
        """The key of a stage's output layout in this pipeline."""
        return f"pipeline{'-'.join(map(str, self.mesh['pp'].ranks))}/{self._watches}/stage{stage}"


class StageSchedule(ModelRunner, Protocol):
    """What runs the stages of a rank, and knows when it does."""

    frozen: bool
    layouts: StageLayouts

    @property
    def busy(self) -> bool:
        """Whether the schedule runs its stages."""

    @property
    def trying(self) -> bool:
        """Whether it runs them only to infer shapes."""


class UnscheduledCalls:
    """Reports calls of a stage's module outside of the schedule."""

    def __init__(self, listener: Listener, scheduled: StageSchedule) -> None:
        self.listener, self.scheduled = listener, scheduled

    def call_begins(
        self,
        gradient_factor: Callable[[], float] | None = None,
        chunk: int = 0,
        microbatch: int | None = None,
    ) -> None:
        if not self.scheduled.busy:
            self.listener.call_begins(gradient_factor, chunk, microbatch)

    def call_ends(self, failed: bool) -> None:
        if not self.scheduled.busy:
            self.listener.call_ends(failed)


def scheduled_call(_: Any, callbacks: TapCallbacks, tap: Tap, schedule: StageSchedule, leaf: int = 0) -> Undo:
    """A tap that is silent while a schedule runs its stages to infer shapes."""
    unknown = callbacks.unknown

    def run(local: Tensor, *args: Any) -> Tensor:
        return local if schedule.trying else callbacks.run(local, *args)

    def absent(count: int) -> None:
        if not schedule.trying:
            callbacks.absent(count)

    def run_unknown(local: Tensor, why: str) -> Tensor:
        return local if schedule.trying or unknown is None else unknown(local, why)

    return tap.leaf(leaf).install(TapCallbacks(run, absent, unknown and run_unknown))


class StageParameters:
    """The parameters of the stages of one rank, each where the storage of its stage keeps it.

    Args:
        parts: the adapter of each stage.
        runner: the schedule that runs them.
    """

    name, why = "the stages' storage", "the schedule runs several modules"

    def __init__(self, parts: Sequence[ModuleAdapter], runner: StageSchedule) -> None:
        self._parts, self._runner = parts, runner
        self._storages = [part.storage for part in parts]
        self._owners = {id(p.parameter): part.storage for part in parts for p in part.parameters()}

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """The shards of all stages."""
        return {name: shard for storage in self._storages for name, shard in storage.shards().items()}

    def value(self, parameter: nn.Parameter) -> Tensor:
        return self._owners[id(parameter)].value(parameter)

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        self._owners[id(parameter)].set_value(parameter, value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        return self._owners[id(parameter)].gradient(parameter, reduced)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Set that."""
        self._owners[id(parameter)].put_gradient(parameter, value, reduced)

    def reduced(self, called: bool = False) -> bool | str:
        """Whether all stages' gradients are reduced; as text, if that is unknown for one."""
        answers = [storage.reduced(called) for storage in self._storages]
        return next((t for t in answers if isinstance(t, str)), all(answers))

    def wait_until_ready(self) -> None:
        """Wait for the storage of each stage."""
        for storage in self._storages:
            storage.wait_until_ready()

    def watch_gradient_norm(self, listener: NormListener) -> Undo:
        """Trace the clipping of this rank's stages together."""
        return watch_torch_clipping([part.root for part in self._parts], listener)

    def freeze(self) -> Undo:
        self._runner.frozen = True
        thaw = partial(setattr, self._runner, "frozen", False)
        return join_undos([thaw, *(storage.freeze() for storage in self._storages)])


class PipelineAdapter(Adapter):
    """The stages of one rank as one model.

    Args:
        parts: the adapter of each stage.
        stages: the number of each in the pipeline.
        turns: the round of the pipeline in which each runs.
        count: the number of stages of all ranks.
        runner: the schedule that runs them.
    """

    def __init__(
        self,
        parts: list[ModuleAdapter],
        stages: list[int],
        turns: list[int],
        count: int,
        runner: StageSchedule,
    ) -> None:
        self._parts, self.mesh, self.name = parts, parts[0].mesh, parts[0].name
        self.prefix = parts[0].prefix
        self.logits = f"stage{count - 1}:output"
        self._turns, self.runner = turns, runner
        for stage, part in zip(stages, parts, strict=True):
            runner.layouts.propagators[stage] = part.propagator
            part.rename(f"stage{stage}")
            part.runner = SilentRunner()
            if isinstance(part.storage, DDPParameters):
                part.storage.scheduled = True
        self.storage = StageParameters(parts, runner)

    def module_names(self) -> list[str]:
        """The names of all stages here."""
        return list(dict.fromkeys(n for part in self._parts for n in part.module_names()))

    def parts(self) -> list[Part]:
        """The components of the stages, and the schedule."""
        inside = [p for part in self._parts for p in part.parts() if p.name != SilentRunner.name]
        return [Part(self.runner.name, self.runner.why), *dict.fromkeys(inside)]

    def check(self) -> None:
        """Refuse modules that would be refused alone, and names that two stages share."""
        for part in self._parts:
            part.check_modules()
        check_names_distinct([part.names() for part in self._parts], self.mesh)

    def sites(self) -> list[Site]:
        """The sites of all stages, silent while the schedule infers shapes."""
        return [
            replace(site, chunk=turn, tap=site.tap and site.tap.around(scheduled_call, self.runner))
            for turn, part in zip(self._turns, self._parts, strict=True)
            for site in part.sites()
        ]

    def parameters(self) -> list[ParameterSite]:
        """The parameters of all stages."""
        return self._number(lambda part: part.parameters())

    def buffers(self) -> list[ParameterSite]:
        """The buffers of all stages."""
        return self._number(lambda part: part.buffers())

    def _number(self, listed: Callable[[ModuleAdapter], list[ParameterSite]]) -> list[ParameterSite]:
        """What is listed of each stage, with the round of the stage."""
        pairs = zip(self._turns, self._parts, strict=True)
        return [replace(site, chunk=turn) for turn, part in pairs for site in listed(part)]

    def without_layout(self) -> dict[str, str]:
        """The parameters of all stages without a layout."""
        return {name: kind for part in self._parts for name, kind in part.without_layout().items()}

    def buffer_owners(self) -> dict[str, str]:
        """The owners of buffers of all stages."""
        return {name: kind for part in self._parts for name, kind in part.buffer_owners().items()}

    def gradient_partial_axes(self, name: str) -> tuple[str, ...] | None:
        """The axes that the stage with the parameter knows."""
        owners = (part for part in self._parts if any(k.name == name for k in part.storage.parameters()))
        return next((part.gradient_partial_axes(name) for part in owners), ())

    def watch(self, listener: Listener) -> Undo:
        """Report the schedule's steps, and propagate layouts in them."""
        return join_undos([self.runner.watch(listener), *(part.watch(listener) for part in self._parts)])


class SilentRunner:
    """Reports nothing: the schedule reports for all stages together."""

    name, why = "nobody", ""
    length_multiple = 1

    def watch(self, listener: Listener) -> Undo:
        return lambda: None

    def run(self, prompts: Prompts, microbatch_size: int | None) -> None:
        """The schedule runs the stages."""
