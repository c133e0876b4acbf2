"""torch.distributed.pipelining: a model whose stages are run by a schedule, one or several on each rank.

The schedule gives the mesh's `pp` axis, the modules of a rank, and the current step and microbatch. Each
stage gets the same adapter as without the schedule, with any further sharding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_flex.adapters.adapter_base import AxisSizes, Listener, StepReport, Undo
from megatron_flex.adapters.model_calls import UserLoop
from megatron_flex.adapters.module_adapter import ModuleAdapter
from megatron_flex.adapters.pipeline_stages import (
    PipelineAdapter,
    StageLayouts,
    UnscheduledCalls,
)
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.sharded_ddp import ShardedDDPParameters
from megatron_flex.adapters.taps import intercept, join_undos
from megatron_flex.adapters.tensor_trees import tensors, with_tensor
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh

if TYPE_CHECKING:
    pass


class StageModules(list[nn.Module]):
    """The modules of a schedule's stages on this rank.

    Attributes:
        schedule: the schedule.
        stages: its stages on this rank, in the order of the modules.
    """

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        single_stage = getattr(schedule, "_stage", None)
        self.stages: list[Any] = list(schedule._stages) if single_stage is None else [single_stage]
        self.stages.sort(key=lambda stage: int(stage.stage_index))
        super().__init__(stage.submod for stage in self.stages)


def list_model_chunks(model: Any) -> list[nn.Module]:
    """The modules of the user's model: a module, a list of modules, or a schedule.

    Raises:
        FlexError: it is a stage without its schedule, or no model at all.
    """
    if isinstance(model, nn.Module):
        if hasattr(model, "session") and hasattr(model, "restore"):
            raise FlexError("the model is a FlexModel already; register hooks with it, or restore() it first")
        return [model]
    library = sys.modules.get("torch.distributed.pipelining.schedules")
    if library is not None and isinstance(model, library._PipelineSchedule):
        return StageModules(model)
    if library is not None and _is_stage(model):
        raise FlexError("a PipelineStage does not know what runs it; give the schedule that it is handed to")
    parts = list(model) if isinstance(model, Iterable) and not isinstance(model, str) else [model]
    wrong = [part for part in parts if not isinstance(part, nn.Module) and not _is_stage(part)]
    if wrong:
        raise FlexError(
            f"{wrong[0]!r} is not a model: give an nn.Module, the list of its virtual chunks, or a schedule "
            "of torch.distributed.pipelining"
        )
    if library is not None and any(_is_stage(part) for part in parts):
        raise FlexError(
            "PipelineStages do not know what runs them; give the schedule that they are handed to"
        )
    return parts


def _is_stage(thing: Any) -> bool:
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    return stages is not None and isinstance(thing, stages._PipelineStageBase)


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
        layouts: of the tensors that stages send each other.
    """

    length_multiple = 1

    def __init__(self, chunks: StageModules, turns: list[int], mesh: Mesh) -> None:
        self.schedule, self.stages, self.turns, self.mesh = chunks.schedule, chunks.stages, turns, mesh
        self.name, self.why = type(self.schedule).__name__, "it was given, and runs this rank's stages"
        self._called = [
            UserLoop(stage.submod, mesh, turn=turn, accumulates=False)
            for stage, turn in zip(chunks.stages, turns, strict=True)
        ]
        self.trying = self.frozen = self._running = False
        self._listener: Listener | None = None
        self.layouts = StageLayouts(mesh)
        self._unsplit: set[tuple[int, int]] = set()  # backward passes that were not split: stage, microbatch

    def watch(self, listener: Listener) -> Undo:
        """Wrap the schedule's step and its stages' passes."""
        self._listener = listener
        self.layouts.begin()
        undos = [intercept(self.schedule, "step", self._step)]
        names = [n for n in ("_initialize_stage", "_initialize_stages") if hasattr(self.schedule, n)]
        undos += [intercept(self.schedule, name, self._try) for name in names]
        for stage, turn in zip(self.stages, self.turns, strict=True):
            undos.append(intercept(stage, "forward_one_chunk", partial(self._forward, stage, turn)))
            undos.append(intercept(stage, "forward_maybe_with_nosync", partial(self._compute, stage)))
            undos.append(intercept(stage, "backward_one_chunk", partial(self._backward, stage)))
            undos.append(intercept(stage, "backward_weight_one_chunk", partial(self._weights, stage)))
        outside = cast(Listener, UnscheduledCalls(listener, self))
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
        microbatches = int(self.schedule._n_microbatches) if mean else 1
        self._unsplit.clear()
        with StepReport(listener, None, microbatches=microbatches):
            self._running = True
            try:
                return step(*args, **kwargs)
            finally:
                self._running = False

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
        exchange = listener.hooked() and self.layouts.due(stage.stage_index)
        if exchange:
            self.layouts.receive(stage.stage_index)
        output = forward(*args, **kwargs)
        if exchange:
            self.layouts.send(stage.stage_index)
        listener.forward_ends(tensors(output))
        return output

    def _compute(self, stage: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The stage's output; detached, and an error on all ranks, where stages do not agree on gradients."""
        output = compute(*args, **kwargs)
        outputs_meta = getattr(getattr(stage, "_stage_meta", None), "outputs", None)
        if not stage.has_backward or stage.is_last or outputs_meta is None:
            return output
        for index, (tensor, meta) in enumerate(zip(tensors(output), outputs_meta, strict=False)):
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
            self._unsplit.add((int(stage.stage_index), number))
            result = _run_undivided(stage, backward, *args, **kwargs)
        else:
            result = backward(*args, **kwargs)
        listener.backward_ends()
        return result

    def _weights(self, stage: Any, weights: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = int(args[0] if args else kwargs["bwd_chunk_id"])
        if (int(stage.stage_index), number) in self._unsplit:
            return _run_undivided(stage, weights, *args, **kwargs)
        return weights(*args, **kwargs)

    def run(self, prompts: Prompts, microbatch_size: int | None) -> None:
        """Evaluate the schedule; copies fill up its number of microbatches."""
        prompts.check_tokens_alone(self.name)
        tokens = prompts.tokens
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
            for direction in ("forward", "backward"):
                if hasattr(self.schedule, f"{name}_{direction}_initialized"):
                    setattr(self.schedule, f"{name}_{direction}_initialized", False)


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


def make_pipeline_adapter(
    chunks: StageModules, axis_sizes: AxisSizes, adapter_of: Callable[[list[nn.Module], AxisSizes], Any]
) -> PipelineAdapter:
    """The adapter of a schedule's model.

    Args:
        chunks: its modules on this rank.
        axis_sizes: the sizes given by the user.
        adapter_of: creates the adapter of one module. Collective, called equally often on all ranks.

    Raises:
        FlexError: the user's sizes, or the modules' meshes, contradict the schedule.
    """
    first = chunks.stages[0]
    size = int(first.group_size)
    if axis_sizes.get("pp") not in (None, size):
        raise FlexError(
            f"pipeline_parallel_size={axis_sizes['pp']}, but the schedule's stages are on {size} ranks; "
            "leave it out"
        )
    parts: list[ModuleAdapter] = []
    for stage, chunk in zip(chunks.stages, chunks, strict=True):
        part = adapter_of([chunk], {**axis_sizes, "pp": size})
        if not isinstance(part, ModuleAdapter):
            raise FlexError(
                f"stage {stage.stage_index} is a model of {part.name}, which has a pipeline schedule of its "
                "own; run that"
            )
        if isinstance(part.storage, ShardedDDPParameters):
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
    count = int(first.num_stages)
    turns = count_turns(count, first.stage_index_to_group_rank, parts[0].mesh["pp"].size)
    stages = [int(stage.stage_index) for stage in chunks.stages]
    on_rank = [turns[stage] for stage in stages]
    return PipelineAdapter(parts, stages, on_rank, count, PipelineSchedule(chunks, on_rank, parts[0].mesh))
