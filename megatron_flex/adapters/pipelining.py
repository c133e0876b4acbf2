"""torch.distributed.pipelining: a model whose stages are run by a schedule, one or several on each rank.

The schedule gives the mesh's `pp` axis, the modules of a rank, and the current step and microbatch. Each
stage gets the same adapter as without the schedule, with any further sharding.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_flex.adapters.adapter_base import (
    Architecture,
    AxisSizes,
    Listener,
    LocalGradient,
    ParameterSite,
    Part,
    Undo,
)
from megatron_flex.adapters.data_parallel import DDPParameters
from megatron_flex.adapters.layout_rules import UnknownLayout, spread_from_json, spread_to_json
from megatron_flex.adapters.model_calls import UserLoop
from megatron_flex.adapters.module_adapter import ModuleAdapter, check_names_distinct
from megatron_flex.adapters.sharded_ddp import ShardedDDPParameters
from megatron_flex.adapters.taps import WrappingTap, intercept
from megatron_flex.adapters.tensor_trees import tensors, with_tensor
from megatron_flex.collectives import await_value, store_value
from megatron_flex.config import flex_config
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site, TapCallback

if TYPE_CHECKING:
    from megatron_flex.adapters.propagation import LayoutPropagator


class StageModules(list[nn.Module]):
    """The modules of a schedule's stages on this rank.

    Attributes:
        schedule: the schedule.
        stages: its stages on this rank, in the order of the modules.
    """

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        one = getattr(schedule, "_stage", None)
        self.stages: list[Any] = list(schedule._stages) if one is None else [one]
        self.stages.sort(key=lambda stage: int(stage.stage_index))
        super().__init__(stage.submod for stage in self.stages)


def list_model_chunks(model: Any) -> list[nn.Module]:
    """The modules of the user's model: a module, a list of modules, or a schedule.

    Raises:
        FlexError: it is a stage without its schedule.
    """
    if isinstance(model, nn.Module):
        return [model]
    library = sys.modules.get("torch.distributed.pipelining.schedules")
    if library is not None and isinstance(model, library._PipelineSchedule):
        return StageModules(model)
    if library is not None and _is_stage(model):
        raise FlexError("a PipelineStage does not know what runs it; give the schedule that it is handed to")
    parts = list(model)
    if library is not None and any(_is_stage(part) for part in parts):
        raise FlexError(
            "PipelineStages do not know what runs them; give the schedule that they are handed to"
        )
    return parts


def _is_stage(thing: Any) -> bool:
    return isinstance(thing, sys.modules["torch.distributed.pipelining.stage"]._PipelineStageBase)


def count_turns(stages: int, rank_of: Mapping[int, int], ranks: int) -> list[int]:
    """For each stage the number of earlier rounds of the pipeline, 0 if each rank has one stage.

    Where stages run down and up again (a V), the way up counts one round for each rank.
    """
    place, out = -1, []
    for stage in range(stages):
        place += 1 + (rank_of[stage] - place - 1) % ranks
        out.append(place // ranks)
    return out


SPLIT_BACKWARD = (
    "{schedule} divides backward passes, and then DistributedDataParallel averages no gradients, with hooks "
    "or without; use Interleaved1F1B, or fully_shard"
)
UNKNOWN_STAGE = UnknownLayout(
    "it comes from a pipeline stage that has no parallel module in it, and is not followed there"
)
UNPLANNED_GRADIENT = (
    "what pipeline stage {stage} hands on needs a gradient, and when the schedule learned shapes it needed "
    "none, so that nothing would come back; make the schedule of a model whose parameters need gradients, "
    "and call the FlexModel's freeze()"
)


class PipelineSchedule:
    """A schedule that runs stages.

    Attributes:
        trying: whether it runs them only to infer shapes.
        frozen: whether all parameters are frozen.
        followers: the layout propagator of each stage, by its number in the pipeline.
    """

    _counts: ClassVar[Counter[tuple[int, ...]]] = Counter()  # of watchers over the same pipelines

    def __init__(self, chunks: StageModules, turns: list[int], mesh: Mesh) -> None:
        self.schedule, self.stages, self.turns, self.mesh = chunks.schedule, chunks.stages, turns, mesh
        self.name, self.why = type(self.schedule).__name__, "it was given, and runs this rank's stages"
        self._called = [
            UserLoop(stage.submod, mesh, turn=turn) for stage, turn in zip(chunks.stages, turns, strict=True)
        ]
        self.trying = self.frozen = self._running = False
        self._listener: Listener | None = None
        self.followers: dict[int, LayoutPropagator | None] = {}
        self._told: set[int] = set()  # the stages that have sent their layout to the next one
        self._watches = 0
        self._whole: set[tuple[int, int]] = set()  # backward passes that were not split: stage, microbatch

    def watch(self, listener: Listener) -> Undo:
        """Wrap the schedule's step and its stages' passes."""
        self._listener = listener
        self._told.clear()
        self._watches = PipelineSchedule._counts[self.mesh["pp"].ranks]
        PipelineSchedule._counts[self.mesh["pp"].ranks] += 1
        undos = [intercept(self.schedule, "step", self._step)]
        names = [n for n in ("_initialize_stage", "_initialize_stages") if hasattr(self.schedule, n)]
        undos += [intercept(self.schedule, name, self._try) for name in names]
        for stage, turn in zip(self.stages, self.turns, strict=True):
            undos.append(intercept(stage, "forward_one_chunk", partial(self._forward, stage, turn)))
            undos.append(intercept(stage, "forward_maybe_with_nosync", partial(self._compute, stage)))
            undos.append(intercept(stage, "backward_one_chunk", partial(self._backward, stage)))
            undos.append(intercept(stage, "backward_weight_one_chunk", partial(self._weights, stage)))
        outside = cast(Listener, _UnscheduledCalls(listener, self))
        undos += [called.watch(outside) for called in self._called]
        return join_undos(undos)

    @property
    def busy(self) -> bool:
        """Whether the schedule runs its stages."""
        return self._running or self.trying

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        listener = self._listener
        assert listener is not None
        # The schedule divides parameter gradients at the end of the step, so activations' gradients are
        # of each microbatch's own loss. Where it does not, the loss is the sum over microbatches.
        mean = bool(getattr(self.schedule, "scale_grads", True))
        listener.step_begins(None, None, int(self.schedule._n_microbatches) if mean else 1)
        self._running, failed = True, True
        self._whole.clear()
        try:
            result = step(*args, **kwargs)
            failed = False
        finally:
            self._running = False
            if failed:
                listener.step_ends(True)
        listener.step_ends(False)
        return result

    def _try(self, initialize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Edits can add trained inputs to a frozen model, whose stages then must send gradients.
        frozen = self.frozen and self.schedule._has_backward
        undo = join_undos(
            [s.submod.register_forward_hook(_require_gradients).remove for s in self.stages if frozen]
        )
        self.trying = True
        try:
            return initialize(*args, **kwargs)
        finally:
            self.trying = False
            undo()

    def _forward(self, stage: Any, turn: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        listener = self._listener
        assert listener is not None
        listener.forward_begins(int(args[0] if args else kwargs["fwd_chunk_id"]), turn)
        tell = listener.hooked() and stage.stage_index not in self._told
        if tell:
            self._arrives(stage)
        output = forward(*args, **kwargs)
        if tell:
            self._leaves(stage)
        listener.forward_ends(tensors(output))
        return output

    def _arrives(self, stage: Any) -> None:
        """Receive the layout of this stage's input from the stage before."""
        follower = self.followers[stage.stage_index]
        if follower is None:
            return
        if not stage.is_first:
            spreads = await_value(self._key(stage.stage_index - 1), flex_config.agree_seconds)
            follower.entering = [spread_from_json(spread) for spread in spreads]
        follower.left = None

    def _leaves(self, stage: Any) -> None:
        """Send the output's layout to the next stage."""
        self._told.add(stage.stage_index)
        follower = self.followers[stage.stage_index]
        if any(self.mesh[axis].size > 1 for axis in ("tp", "cp")):
            spreads = [UNKNOWN_STAGE] if follower is None else follower.left or []
            store_value(self._key(stage.stage_index), [spread_to_json(spread) for spread in spreads])

    def _key(self, index: int) -> str:
        """The key of a stage's output layout in this pipeline."""
        return f"pipeline{'-'.join(map(str, self.mesh['pp'].ranks))}/{self._watches}/stage{index}"

    def _compute(self, stage: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The stage's output; detached, and an error on all ranks, where stages do not agree on gradients."""
        output = compute(*args, **kwargs)
        told = getattr(getattr(stage, "_stage_meta", None), "outputs", None)
        if not stage.has_backward or stage.is_last or told is None:
            return output
        for index, (tensor, meta) in enumerate(zip(tensors(output), told, strict=False)):
            if tensor.requires_grad and not meta.requires_grad:
                assert self._listener is not None
                self._listener.report_error(UNPLANNED_GRADIENT.format(stage=stage.stage_index))
                output = with_tensor(output, index, tensor.detach())
        return output

    def _backward(self, stage: Any, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        listener = self._listener
        assert listener is not None
        if not stage.has_backward:
            return backward(*args, **kwargs)
        number = int(args[0] if args else kwargs["bwd_chunk_id"])
        listener.backward_begins(tensors(stage.fwd_cache[number][0]))
        if not kwargs.get("full_backward", True) and isinstance(stage.submod, DistributedDataParallel):
            listener.report_error(SPLIT_BACKWARD.format(schedule=self.name))
        if listener.hooked() and stage.dw_builder is None and not kwargs.get("full_backward", True):
            # Split, the backward pass would reach inputs, then the stage's own parameters, and no tensor that
            # edits have added; unsplit, it reaches all.
            self._whole.add((int(stage.stage_index), number))
            result = _run_undivided(stage, backward, *args, **kwargs)
        else:
            result = backward(*args, **kwargs)
        listener.backward_ends()
        return result

    def _weights(self, stage: Any, weights: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = int(args[0] if args else kwargs["bwd_chunk_id"])
        if (int(stage.stage_index), number) in self._whole:
            return _run_undivided(stage, weights, *args, **kwargs)
        return weights(*args, **kwargs)

    def run(self, tokens: Tensor, microbatch_size: int | None) -> None:
        """Evaluate the schedule; copies fill up its number of microbatches."""
        size = microbatch_size or max(len(tokens), 1)
        pieces = list(tokens.split(size))
        count = int(self.schedule._n_microbatches)
        if len(tokens) % size or len(pieces) > count:
            raise FlexError(
                f"microbatch_size={size} makes {len(pieces)} microbatches of {len(tokens)} sequences, and "
                f"the schedule runs at most {count} of equal size; choose another"
            )
        pieces += pieces[-1:] * (count - len(pieces))
        first = any(stage.is_first for stage in self.stages)
        loss, self.schedule._loss_fn = self.schedule._loss_fn, None  # there are no targets
        try:
            self._forget_shapes()
            devices = {torch.device(stage.device) for stage in self.stages}
            with torch.no_grad(), torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
                self.schedule.eval(*([torch.cat(pieces)] if first else []))
        finally:
            self.schedule._loss_fn = loss
            self._forget_shapes()

    def _forget_shapes(self) -> None:
        """Make the schedule infer shapes again, which may differ from earlier runs."""
        for name in ("_stage", "_stages"):
            for way in ("forward", "backward"):
                if hasattr(self.schedule, f"{name}_{way}_initialized"):
                    setattr(self.schedule, f"{name}_{way}_initialized", False)


def _run_undivided(stage: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a backward function of a stage as for a module that computes its weights' gradients itself."""
    stage.dw_builder = lambda: lambda: None
    try:
        return call(*args, **kwargs)
    finally:
        stage.dw_builder = None


def _require_gradients(_: nn.Module, __: Any, output: Any) -> Any:
    """A module's output, with all tensors marked as requiring a gradient."""
    for index, tensor in enumerate(tensors(output)):
        if tensor.is_floating_point() and not tensor.requires_grad:
            output = with_tensor(output, index, tensor.detach().requires_grad_())
    return output


class _UnscheduledCalls:
    """Reports calls of a stage's module outside of the schedule."""

    def __init__(self, listener: Listener, scheduled: PipelineSchedule) -> None:
        self.listener, self.scheduled = listener, scheduled

    def call_begins(self, gradient_factor: Callable[[], float] | None = None, chunk: int = 0) -> None:
        if not self.scheduled.busy:
            self.listener.call_begins(gradient_factor, chunk)

    def call_ends(self, failed: bool) -> None:
        if not self.scheduled.busy:
            self.listener.call_ends(failed)


@dataclass(frozen=True, eq=False)
class ScheduledTap(WrappingTap):
    """Wraps a tap; silent while a schedule runs its stages to infer shapes."""

    tap: Any
    scheduled: PipelineSchedule

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` through the wrapped tap."""
        undo: Undo = self.tap.install(_ScheduledFire(fire, self.scheduled))
        return undo


class _ScheduledFire:
    """The callback of the wrapped tap."""

    def __init__(self, fire: TapCallback, scheduled: PipelineSchedule) -> None:
        self.fire, self.scheduled = fire, scheduled

    def __call__(self, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return local if self.scheduled.trying else self.fire(local, *args, **kwargs)

    # The callback is the runtime's, which has both methods in addition to those of `TapCallback`.

    def absent(self, count: int) -> None:
        if not self.scheduled.trying:
            self.fire.absent(count)  # type: ignore[attr-defined]

    def unknown(self, local: Tensor, why: str) -> Tensor:
        if self.scheduled.trying:
            return local
        found: Tensor = self.fire.unknown(local, why)  # type: ignore[attr-defined]
        return found


def join_undos(undos: list[Undo]) -> Undo:
    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def make_pipeline_adapter(
    chunks: StageModules, axis_sizes: AxisSizes, adapter_of: Callable[[list[nn.Module], AxisSizes], Any]
) -> PipelineAdapter:
    """The adapter of a schedule's model.

    Args:
        chunks: its modules on this rank.
        said: the sizes given by the user.
        adapter_of: creates the adapter of one module. Collective, called equally often on all ranks.

    Raises:
        FlexError: the user's sizes, or the modules' meshes, contradict the schedule.
    """
    first = chunks.stages[0]
    size = int(first.group_size)
    if axis_sizes.get("pp") not in (None, size):
        raise FlexError(
            f"pipeline_parallel_size={axis_sizes['pp']}, but the schedule's stages are on {size} ranks; "
            "leave it "
            "out"
        )
    parts: list[ModuleAdapter] = []
    for stage, chunk in zip(chunks.stages, chunks, strict=True):
        part = adapter_of([chunk], {**axis_sizes, "pp": size})
        if not isinstance(part, ModuleAdapter):
            raise FlexError(
                f"stage {stage.stage_index} is a model of {part.name}, which has a pipeline schedule of its "
                "own; run that"
            )
        if isinstance(part.keeping, ShardedDDPParameters):
            raise FlexError(
                f"stage {stage.stage_index} is in fairscale's ShardedDataParallel, which reduces with the "
                "first microbatch's backward pass and not again in a step; use DistributedDataParallel or "
                "fully_shard"
            )
        parts.append(part)
    ranks = tuple(dist.get_process_group_ranks(first.group or dist.group.WORLD))
    for part in parts:
        if part.mesh["pp"].ranks != ranks and size > 1:
            raise FlexError(
                f"the schedule's stages are on ranks {list(ranks)}, and the model's mesh "
                f"({part.mesh.describe()}) has {list(part.mesh['pp'].ranks)} in their place; number the "
                "ranks of stages, replicas and tensor parallel shards in that order, as init_device_mesh "
                "does with mesh_dim_names=('pp', 'dp', 'tp')"
            )
    return PipelineAdapter(chunks, parts)


class PipelineAdapter:
    """The stages of one rank as one model.

    Args:
        chunks: the schedule's modules.
        parts: the adapter of each.
    """

    def __init__(self, chunks: StageModules, parts: list[ModuleAdapter]) -> None:
        self._parts, self.mesh, self.name = parts, parts[0].mesh, parts[0].name
        self.prefix = parts[0].prefix
        count = int(chunks.stages[0].num_stages)
        self.logits = f"stage{count - 1}:output"
        at = count_turns(count, chunks.stages[0].stage_index_to_group_rank, self.mesh["pp"].size)
        self.turns = [at[stage.stage_index] for stage in chunks.stages]
        self.driving = PipelineSchedule(chunks, self.turns, self.mesh)
        for stage, part in zip(chunks.stages, parts, strict=True):
            self.driving.followers[int(stage.stage_index)] = part.follower
            part.rename(f"stage{stage.stage_index}")
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
            replace(site, chunk=turn, tap=ScheduledTap(site.tap, self.driving))
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

    def buffers(self) -> dict[str, Tensor]:
        """Those of all stages."""
        return {name: buffer for part in self._parts for name, buffer in part.buffers().items()}

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
