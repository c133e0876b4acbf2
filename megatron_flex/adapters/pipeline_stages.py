"""The stages that one rank has of a pipeline, as one model: what every framework's schedule has in common.

A stage has the adapter that its modules have without a schedule. The schedule reports steps and microbatches
for all of them, and the rank of a stage tells that of the next one the layout of what it sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import (
    Architecture,
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
from megatron_flex.adapters.module_adapter import ModuleAdapter, check_names_distinct
from megatron_flex.adapters.taps import join_undos
from megatron_flex.collectives import agreement_seconds, await_value, store_value
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Fire, Site, Tap

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
        followers: the layout propagator of each stage on this rank, by its number in the pipeline.
    """

    _counts: ClassVar[Counter[tuple[int, ...]]] = Counter()  # of watchers over the same pipelines

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.followers: dict[int, LayoutPropagator | None] = {}
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
        follower = self.followers[stage]
        if follower is None:
            return
        if stage > 0:
            spreads = await_value(self._key(stage - 1), agreement_seconds())
            follower.entering = [spread_from_json(spread) for spread in spreads]
        follower.left = None

    def send(self, stage: int) -> None:
        """Send the layout of a stage's output to the next stage."""
        self._sent.add(stage)
        follower = self.followers[stage]
        if any(self.mesh[axis].size > 1 for axis in ("tp", "cp")):
            spreads = [UNKNOWN_STAGE] if follower is None else follower.left or []
            store_value(self._key(stage), [spread_to_json(spread) for spread in spreads])

    def _key(self, stage: int) -> str:
        """The key of a stage's output layout in this pipeline."""
        return f"pipeline{'-'.join(map(str, self.mesh['pp'].ranks))}/{self._watches}/stage{stage}"


class StageSchedule(Protocol):
    """What runs the stages of a rank: a `ModelRunner` that knows when it does."""

    name: str
    why: str
    frozen: bool
    layouts: StageLayouts

    @property
    def busy(self) -> bool:
        """Whether the schedule runs its stages."""

    @property
    def trying(self) -> bool:
        """Whether it runs them only to infer shapes."""

    def watch(self, listener: Listener) -> Undo:
        """Notify `listener` of steps and passes, until the returned function is called."""

    def run(self, tokens: Tensor, microbatch_size: int | None) -> None:
        """Run the stages forward over full sequences of tokens."""


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


def scheduled_call(_: Any, fire: Fire, tap: Tap, schedule: StageSchedule, leaf: int = 0) -> Undo:
    """A tap that is silent while a schedule runs its stages to infer shapes."""
    unknown = fire.unknown

    def run(local: Tensor, *args: Any) -> Tensor:
        return local if schedule.trying else fire.run(local, *args)

    def absent(count: int) -> None:
        if not schedule.trying:
            fire.absent(count)

    def run_unknown(local: Tensor, why: str) -> Tensor:
        return local if schedule.trying or unknown is None else unknown(local, why)

    return tap.leaf(leaf).install(Fire(run, absent, unknown and run_unknown))


class PipelineAdapter:
    """The stages of one rank as one model.

    Args:
        parts: the adapter of each stage.
        stages: the number of each in the pipeline.
        turns: the round of the pipeline in which each runs.
        count: the number of stages of all ranks.
        driving: the schedule that runs them.
    """

    def __init__(
        self,
        parts: list[ModuleAdapter],
        stages: list[int],
        turns: list[int],
        count: int,
        driving: StageSchedule,
    ) -> None:
        self._parts, self.mesh, self.name = parts, parts[0].mesh, parts[0].name
        self.prefix = parts[0].prefix
        self.logits = f"stage{count - 1}:output"
        self.turns, self.driving = turns, driving
        for stage, part in zip(stages, parts, strict=True):
            driving.layouts.followers[stage] = part.follower
            part.rename(f"stage{stage}")
            part.driving = SilentDriving()
            if isinstance(part.keeping, DDPParameters):
                part.keeping.scheduled = True
        self._owners = {id(p.parameter): part for part in parts for p in part.parameters()}

    def _owner(self, parameter: nn.Parameter) -> ModuleAdapter:
        return self._owners[id(parameter)]

    def module_names(self) -> list[str]:
        """The names of all stages here."""
        return list(dict.fromkeys(n for part in self._parts for n in part.module_names()))

    def parts(self) -> list[Part]:
        """The components of the stages, and the schedule."""
        inside = [p for part in self._parts for p in part.parts() if p.name != SilentDriving.name]
        return [Part(self.driving.name, self.driving.why), *dict.fromkeys(inside)]

    def check(self) -> None:
        """Refuse modules that would be refused alone, and names that two stages share."""
        for part in self._parts:
            part.check_modules()
        check_names_distinct([part.names() for part in self._parts], self.mesh)

    def sites(self) -> list[Site]:
        """The sites of all stages, silent while the schedule infers shapes."""
        return [
            replace(site, chunk=turn, tap=site.tap and site.tap.around(scheduled_call, self.driving))
            for turn, part in zip(self.turns, self._parts, strict=True)
            for site in part.sites()
        ]

    def parameters(self) -> list[ParameterSite]:
        """The parameters of all stages."""
        return [
            replace(p, chunk=turn)
            for turn, part in zip(self.turns, self._parts, strict=True)
            for p in part.parameters()
        ]

    def without_layout(self) -> dict[str, str]:
        """The buffers of all stages."""
        return {name: kind for part in self._parts for name, kind in part.without_layout().items()}

    def buffers(self) -> list[ParameterSite]:
        """Those of all stages."""
        return [
            replace(buffer, chunk=turn)
            for turn, part in zip(self.turns, self._parts, strict=True)
            for buffer in part.buffers()
        ]

    def buffer_owners(self) -> dict[str, str]:
        """Those of all stages."""
        return {name: kind for part in self._parts for name, kind in part.buffer_owners().items()}

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """Those of all stages."""
        return {name: shard for part in self._parts for name, shard in part.shards().items()}

    def lengths(self) -> dict[str, int]:
        """None are known."""
        return {}

    def wait_until_ready(self) -> None:
        """Wait for the parameter storage."""
        for part in self._parts:
            part.wait_until_ready()

    def gradients_reduced(self, called: bool = False) -> bool | str:
        """Whether the storage reduces gradients; as text, if that is unknown for one stage."""
        answers = [part.gradients_reduced(called) for part in self._parts]
        return next((t for t in answers if isinstance(t, str)), all(answers))

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A parameter."""
        return self._owner(parameter).value(parameter)

    def gradient_partial_axes(self, name: str) -> tuple[str, ...] | None:
        """As the stage that has the parameter knows."""
        mine = (part for part in self._parts if any(k.name == name for k in part.keeping.parameters()))
        return next((part.gradient_partial_axes(name) for part in mine), ())

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set it."""
        self._owner(parameter).set_value(parameter, value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Its gradient."""
        return self._owner(parameter).gradient(parameter, reduced)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Set that."""
        self._owner(parameter).put_gradient(parameter, value, reduced)

    def watch_gradient_norm(self, listener: NormListener) -> Undo:
        """Trace the clipping of this rank's stages together."""
        return watch_torch_clipping([part.root for part in self._parts], listener)

    def freeze(self) -> Undo:
        """Freeze all parameters."""
        self.driving.frozen = True
        return join_undos(
            [partial(setattr, self.driving, "frozen", False), *(p.freeze() for p in self._parts)]
        )

    def enable_recomputed_gradients(self) -> Undo:
        """Nothing: recomputation is up to the module."""
        return lambda: None

    def architecture(self) -> Architecture | None:
        """Not known."""
        return None

    def run(self, tokens: Tensor, microbatch_size: int | None = None) -> None:
        """Run the schedule forward over full sequences of tokens."""
        self.driving.run(tokens, microbatch_size)

    def watch(self, listener: Listener) -> Undo:
        """Report the schedule's steps, and propagate layouts in them."""
        return join_undos([self.driving.watch(listener), *(part.watch(listener) for part in self._parts)])


class SilentDriving:
    """Reports nothing: the schedule reports for all stages together."""

    name, why = "nobody", ""

    def watch(self, listener: Listener) -> Undo:
        """Nothing."""
        return lambda: None

    def run(self, tokens: Tensor, microbatch_size: int | None) -> None:
        """Nothing."""
