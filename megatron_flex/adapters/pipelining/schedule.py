"""Follow a schedule: which step, which microbatch, forward or backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_flex.adapters.base import Listener, Undo
from megatron_flex.adapters.driving import UserLoop
from megatron_flex.adapters.leaves import WrappingTap
from megatron_flex.adapters.pipelining.stages import StageModules
from megatron_flex.adapters.spread import Unknown, spread_from_json, spread_to_json
from megatron_flex.adapters.taps import intercept
from megatron_flex.adapters.tensor_trees import tensors, with_tensor
from megatron_flex.collectives import await_value, store_value
from megatron_flex.errors import FlexError
from megatron_flex.config import flex_config
from megatron_flex.mesh import Mesh
from megatron_flex.sites import TapCallback

if TYPE_CHECKING:
    from megatron_flex.adapters.propagation import LayoutPropagator

SPLIT_BACKWARD = (
    "{schedule} divides backward passes, and then DistributedDataParallel averages no gradients, with hooks "
    "or without; use Interleaved1F1B, or fully_shard"
)
UNKNOWN_STAGE = Unknown(
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
        trying: whether it runs them only to learn shapes.
        frozen: whether no parameter gets a gradient.
        followers: who follows layouts in each stage, by its number in the pipeline.
    """

    _counts: ClassVar[Counter[tuple[int, ...]]] = Counter()  # of watches over the same pipelines

    def __init__(self, chunks: StageModules, turns: list[int], mesh: Mesh) -> None:
        self.schedule, self.stages, self.turns, self.mesh = chunks.schedule, chunks.stages, turns, mesh
        self.name, self.why = type(self.schedule).__name__, "it was given, and runs this rank's stages"
        self._called = [UserLoop(stage.submod, mesh) for stage in chunks.stages]
        self.trying = self.frozen = self._running = False
        self._listener: Listener | None = None
        self.followers: dict[int, LayoutPropagator | None] = {}
        self._told: set[int] = set()  # the stages that have told the next one
        self._watches = 0
        self._whole: set[tuple[int, int]] = set()  # backward passes that were not split: stage, microbatch

    def watch(self, listener: Listener) -> Undo:
        """Stand around the schedule's step and its stages' passes."""
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
        # The schedule divides parameter gradients when all are there, so that those of tensors are of each
        # microbatch's own loss. Where it does not, the loss is the sum over microbatches.
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
        # What edits add to a frozen model needs gradients, which stages then have to be ready to send.
        frozen = self.frozen and self.schedule._has_backward
        undo = join_undos([s.submod.register_forward_hook(_require_gradients).remove for s in self.stages if frozen])
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
        """Learn from the stage before how what it hands on lies on the ranks."""
        follower = self.followers[stage.stage_index]
        if follower is None:
            return
        if not stage.is_first:
            told = await_value(self._key(stage.stage_index - 1), flex_config.agree_seconds)
            follower.entering = [spread_from_json(one) for one in told]
        follower.left = None

    def _leaves(self, stage: Any) -> None:
        """Tell the next stage."""
        self._told.add(stage.stage_index)
        follower = self.followers[stage.stage_index]
        if any(self.mesh[axis].size > 1 for axis in ("tp", "cp")):
            told = [UNKNOWN_STAGE] if follower is None else follower.left or []
            store_value(self._key(stage.stage_index), [spread_to_json(one) for one in told])

    def _key(self, index: int) -> str:
        """What the layout at the end of a stage is called by the ranks of this pipeline."""
        return f"pipeline{'-'.join(map(str, self.mesh['pp'].ranks))}/{self._watches}/stage{index}"

    def _compute(self, stage: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The stage's output; without a graph, and all ranks raise, where stages have not agreed on one."""
        output = compute(*args, **kwargs)
        told = getattr(getattr(stage, "_stage_meta", None), "outputs", None)
        if not stage.has_backward or stage.is_last or told is None:
            return output
        for index, (tensor, meta) in enumerate(zip(tensors(output), told, strict=False)):
            if tensor.requires_grad and not meta.requires_grad:
                assert self._listener is not None
                self._listener.fails(UNPLANNED_GRADIENT.format(stage=stage.stage_index))
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
            listener.fails(SPLIT_BACKWARD.format(schedule=self.name))
        if listener.hooked() and stage.dw_builder is None and not kwargs.get("full_backward", True):
            # Split, it would go to inputs and then to the stage's own parameters, and to nothing else that
            # edits have brought in; whole, it goes everywhere.
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
        """Evaluate the schedule, whose own number of microbatches the tokens are made up to by copies."""
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
        """Let the schedule learn shapes again, which may differ from those that it has run with."""
        for name in ("_stage", "_stages"):
            for way in ("forward", "backward"):
                if hasattr(self.schedule, f"{name}_{way}_initialized"):
                    setattr(self.schedule, f"{name}_{way}_initialized", False)


def _run_undivided(stage: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a backward function of a stage as for a module that sees to its weights' gradients itself."""
    stage.dw_builder = lambda: lambda: None
    try:
        return call(*args, **kwargs)
    finally:
        stage.dw_builder = None


def _require_gradients(_: nn.Module, __: Any, output: Any) -> Any:
    """What a module returned, as if all of it needed a gradient."""
    for index, tensor in enumerate(tensors(output)):
        if tensor.is_floating_point() and not tensor.requires_grad:
            output = with_tensor(output, index, tensor.detach().requires_grad_())
    return output


class _UnscheduledCalls:
    """Hears of calls of a stage's module that no schedule makes."""

    def __init__(self, listener: Listener, scheduled: PipelineSchedule) -> None:
        self.listener, self.scheduled = listener, scheduled

    def call_begins(self, gradient_factor: Callable[[], float] | None = None) -> None:
        if not self.scheduled.busy:
            self.listener.call_begins(gradient_factor)

    def call_ends(self, failed: bool) -> None:
        if not self.scheduled.busy:
            self.listener.call_ends(failed)


@dataclass(frozen=True, eq=False)
class ScheduledTap(WrappingTap):
    """Another tap, that passes nothing on while a schedule runs its stages to learn shapes."""

    tap: Any
    scheduled: PipelineSchedule

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` by way of the other tap."""
        undo: Undo = self.tap.install(_ScheduledFire(fire, self.scheduled))
        return undo


class _ScheduledFire:
    """What the other tap calls."""

    def __init__(self, fire: TapCallback, scheduled: PipelineSchedule) -> None:
        self.fire, self.scheduled = fire, scheduled

    def __call__(self, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return local if self.scheduled.trying else self.fire(local, *args, **kwargs)

    # What is called here is the runtime's, which has both methods beside what `TapCallback` promises.

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
