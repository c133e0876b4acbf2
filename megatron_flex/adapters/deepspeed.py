"""DeepSpeed's engines: ZeRO keeps parameters and gradients, and the pipeline engine runs a schedule.

What is relied on, in DeepSpeed's words: an engine's `module`, `optimizer`, `seq_data_parallel_group` and, of a
pipeline, `grid`; `averaged_gradients` and `bit16_groups` of its ZeRO optimizers; `_hp_mapping`, `ds_id`,
`ds_shape`, `ds_tensor` and `ds_process_group` of parameters; the functions of `deepspeed.utils` that read and
set what ZeRO has spread; `_exec_schedule`, through which a pipeline engine runs every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters.base import Listener, LocalGradient, Undo
from megatron_flex.adapters.composing import compose
from megatron_flex.adapters.driving import Called, Driving
from megatron_flex.adapters.keeping import Keeping, Kept, Resident
from megatron_flex.adapters.modules import Modules
from megatron_flex.adapters.naming import clean, of_deepspeed
from megatron_flex.adapters.taps import intercept
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh

ENGINE, PIPELINE, INFERENCE = "DeepSpeedEngine", "PipelineEngine", "InferenceEngine"
ZERO_12, ZERO_3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
OTHERS = ("megatron.", "fairscale.", "transformer_engine.", "apex.")  # whose modules have rules of their own

# Questions that an engine answers from its configuration, and what a yes to them is.
WITHOUT_A_RULE = {
    "autotp_size": "AutoTP (tensor_parallel.autotp_size)",
    "mics_shard_size": "MiCS (mics_shard_size)",
    "zero_hpz_partition_size": "ZeRO++'s secondary partitions (zero_hpz_partition_size)",
    "zero_quantized_weights": "ZeRO++'s quantized weights (zero_quantized_weights)",
    "zero_quantized_nontrainable_weights": "quantized weights (zero_quantized_nontrainable_weights)",
    "zero_quantized_gradients": "ZeRO++'s quantized gradients (zero_quantized_gradients)",
    "is_deepcompile_enabled": "DeepCompile (compile.deepcompile)",
}

OFFLOADED = (
    "its gradient is kept in offload_optimizer's memory, where it is not known to be whole; hook it as it "
    'comes (hook_type="tensor")'
)
NOT_WHOLE = (
    "ZeRO puts gradients together in the backward pass of the last of {steps} microbatches, and engine.step() "
    "takes them away; ask in between"
)
NO_MASTER = "a {kind} steps a copy of it, out of reach; use ZeRO (zero_optimization.stage 1 to 3)"
NOT_REDUCED = (
    'a {kind} does not tell whether its gradient is reduced; hook it as it comes (hook_type="tensor"), or let '
    "ZeRO keep gradients in the parameters' dtype (data_types.grad_accum_dtype)"
)
NOT_FROZEN = (
    "{what} waits for gradients that would never come; leave the parameters as they are and do not call the "
    "optimizer's step, or set requires_grad before deepspeed.initialize()"
)


# -- finding it ----------------------------------------------------------------------------------------


def claims(chunks: list[nn.Module]) -> str:
    """Why a model is DeepSpeed's; empty if it is not, or another framework's rules say how it is cut."""
    for chunk in chunks:
        if of_deepspeed(chunk, INFERENCE):
            return "it is in an InferenceEngine"
        if of_deepspeed(chunk, ENGINE) and not any(_has_rules(m) for m in chunk.modules()):
            return f"it is in a {type(chunk).__name__} of deepspeed.initialize()"
    return ""


def take(chunks: list[nn.Module], said: Any) -> Modules:
    """The adapter of an engine.

    Raises:
        FlexError: there are several, or it does what no rule covers.
    """
    if len(chunks) != 1:
        raise FlexError(f"{len(chunks)} models with a DeepSpeed engine among them; give one engine")
    engine = chunks[0]
    _refuse(engine)
    mesh = mesh_of(engine)
    mesh.check_sizes(said)
    if of_deepspeed(engine, PIPELINE):
        keeping, driving = keeping_of(engine, _module(engine), mesh), driving_of(engine, mesh)
        return Pipelined(engine, mesh, None, keeping, driving, "deepspeed")
    return compose(engine, mesh, name="deepspeed")


def mesh_of(engine: Any) -> Mesh:
    """The axes of an engine's run: of its pipeline's grid, or of its data parallel group and `mpu`."""
    if of_deepspeed(engine, PIPELINE):
        grid = engine.grid
        lines: dict[str, tuple[Any, Any]] = {
            "pp": (grid.pp_group, grid.pp_proc_group),
            "dp": (grid.dp_group, grid.dp_proc_group),
            "tp": (grid.slice_group, grid.slice_proc_group),
        }
    else:
        cut = getattr(engine.mpu, "get_tensor_model_parallel_group", None) or getattr(
            engine.mpu, "get_model_parallel_group", None
        )
        lines = {"dp": _line(engine.seq_data_parallel_group), "tp": _line(cut()) if cut else ((), None)}
    return Mesh(tuple(_axis(name, *lines.get(name, ((), None))) for name in ("pp", "dp", "tp")))


def _line(group: Any) -> tuple[Any, Any]:
    return dist.get_process_group_ranks(group), group


def _axis(name: str, ranks: Any, group: Any) -> Axis:
    line = tuple(ranks)
    if len(line) < 2:
        return Axis(name)
    return Axis(name, len(line), line.index(dist.get_rank()), group, line)


def _module(engine: Any) -> nn.Module:
    module: nn.Module = engine.module
    return module


def _has_rules(module: nn.Module) -> bool:
    return any(c.__module__.startswith(OTHERS) for c in type(module).__mro__)


def _refuse(engine: Any) -> None:
    """Refuse what no rule covers. The configuration is the same on all ranks, and so is the error."""
    for question, what in WITHOUT_A_RULE.items():
        ask = getattr(type(engine), question, None)
        if ask is not None and int(ask(engine) or 0) > ("size" in question and "mics" not in question):
            raise FlexError(f"{what} is on, for which there is no rule; turn it off to hook this model")
    kind = type(engine).__name__
    if of_deepspeed(engine, INFERENCE) or kind == "DeepSpeedHybridEngine":
        raise FlexError(
            f"a {kind} puts kernels in place of the model's modules, for which there is no rule; hook the "
            "model before deepspeed.init_inference(), or without hybrid_engine"
        )
    if engine.has_moe_layers:
        raise FlexError("it has deepspeed.moe layers, for which there is no rule; hook a model without them")
    if getattr(engine, "zenflow", None):
        raise FlexError("ZenFlow (zero_optimization.zenflow) is on, for which there is no rule; turn it off")
    if engine.is_compiled:
        raise FlexError("engine.compile() made code that runs past hooks; attach without compiling")
    from deepspeed.utils import groups

    if groups._get_sequence_parallel_world_size() > 1:
        raise FlexError("sequence parallelism cuts its samples, for which there is no rule; turn it off")
    if of_deepspeed(engine, PIPELINE):
        _refuse_tied(engine)


def _refuse_tied(engine: Any) -> None:
    """Refuse layers that are one module on several stages; told from what all ranks know."""
    model = engine.module
    stages: dict[str, set[int]] = {}
    for stage, (start, stop) in enumerate(zip(model.parts, model.parts[1:], strict=False)):
        for spec in model._layer_specs[start:stop]:
            if type(spec).__name__ == "TiedLayerSpec":
                stages.setdefault(spec.key, set()).add(stage)
    for key, found in stages.items():
        if len(found) > 1:
            raise FlexError(
                f"the tied layer {key!r} is on pipeline stages {sorted(found)}, for which there is no rule; "
                "give each stage a layer of its own, or partition so that one stage has both"
            )


# -- who keeps parameters and gradients ----------------------------------------------------------------


def keeping_of(chunk: nn.Module, root: nn.Module, mesh: Mesh) -> Keeping | None:
    """The engine's ZeRO, or its plain optimizer; None if there is no engine.

    Raises:
        FlexError: parameters are spread by ZeRO, but the model was given without its engine; or the engine
            does what no rule covers.
    """
    if not of_deepspeed(chunk, ENGINE):
        kept = next((n for n, p in root.named_parameters() if _is_spread(p)), None)
        if kept is not None:
            raise FlexError(f"{kept} is kept by ZeRO; give the engine that deepspeed.initialize() returned")
        return None
    _refuse(chunk)
    engine: Any = chunk
    ranks = tuple(dist.get_process_group_ranks(engine.seq_data_parallel_group))
    if mesh["dp"].size != len(ranks):
        raise FlexError(
            f"DeepSpeed's data parallel ranks are {list(ranks)}, but {mesh.describe()} was found; give "
            "deepspeed.initialize() the framework's mpu"
        )
    return Partitioned(engine, root) if engine.zero_optimization_stage() == 3 else Replicated(engine, root)


def _is_spread(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


class Replicated(Resident):
    """ZeRO-1, ZeRO-2 or none of them: parameters are whole on each rank, ZeRO's gradients are not."""

    def __init__(self, engine: Any, root: nn.Module) -> None:
        super().__init__(root)
        self.engine, self.optimizer = engine, engine.optimizer
        groups = getattr(self.optimizer, "bit16_groups", [])
        self._group = {id(p): number for number, group in enumerate(groups) for p in group}
        self.kind = type(self.optimizer).__name__

    def _own_masters(self) -> bool:
        """Whether the optimizer steps the parameters themselves."""
        return isinstance(self.optimizer, torch.optim.Optimizer) or self.optimizer is None

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into it, and into the part of ZeRO's own copy that is on this rank."""
        if not hasattr(parameter, "_hp_mapping") and not self._own_masters():
            raise FlexError(NO_MASTER.format(kind=self.kind))
        super().put(parameter, value)
        if hasattr(parameter, "_hp_mapping"):
            from deepspeed.utils import safe_set_full_fp32_param

            safe_set_full_fp32_param(parameter, value.detach().float())

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """The mean over data parallel ranks, put together of the parts that they have."""
        if not self._check(parameter):
            return LocalGradient(None)
        if id(parameter) not in self._group:
            return LocalGradient(parameter.grad)
        from deepspeed.utils import safe_get_full_grad

        return LocalGradient(safe_get_full_grad(parameter))

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into the part that this rank has."""
        if not self._check(parameter):
            raise FlexError(NOT_WHOLE.format(steps=self.engine.gradient_accumulation_steps()))
        if id(parameter) not in self._group:
            super().put_gradient(parameter, value)
            return
        from deepspeed.utils import safe_set_full_grad

        safe_set_full_grad(parameter, value)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, where nothing counts on gradients."""
        if of_deepspeed(self.engine, PIPELINE):
            raise FlexError(NOT_FROZEN.format(what="a pipeline stage"))
        if not self._own_masters():
            raise FlexError(NOT_FROZEN.format(what=f"a {self.kind}"))
        return super().freeze()

    def _check(self, parameter: nn.Parameter) -> bool:
        """Whether it has a gradient now; known alike on all ranks, as asking for it is collective."""
        if not parameter.requires_grad:
            return False
        last = self.engine.is_gradient_accumulation_boundary() or of_deepspeed(self.engine, PIPELINE)
        if self._own_masters():
            if not last:
                raise FlexError(NOT_WHOLE.format(steps=self.engine.gradient_accumulation_steps()))
            return True
        if self.kind != ZERO_12:
            raise FlexError(NOT_REDUCED.format(kind=self.kind))
        if id(parameter) not in self._group:
            raise FlexError("the optimizer was not given it, so that nothing reduces its gradient")
        if self.optimizer.cpu_offload:
            raise FlexError(OFFLOADED)
        if self.optimizer.averaged_gradients.get(self._group[id(parameter)]) is not None:
            return True
        if not last:
            raise FlexError(NOT_WHOLE.format(steps=self.engine.gradient_accumulation_steps()))
        return False


class Partitioned(Resident):
    """ZeRO-3: each rank has a part of every parameter, counted flat, but while a module runs."""

    def __init__(self, engine: Any, root: nn.Module) -> None:
        self.root, self.engine, self.optimizer = root, engine, engine.optimizer
        self._lazy = {}
        self._kept = [Kept(clean(n), p, tuple(p.ds_shape)) for n, p in root.named_parameters()]

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Gathered in DeepSpeed's own context, and copied there."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into it where it is whole, and into this rank's part of the copy that the optimizer steps."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_local_fp32_param

        with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)
        if hasattr(parameter, "_z3_optimizer"):
            safe_set_local_fp32_param(parameter, _part(parameter, value))

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """The mean over data parallel ranks, as far as it is accumulated."""
        if not self._check(parameter):
            return LocalGradient(None)
        from deepspeed.utils import safe_get_full_grad

        return LocalGradient(safe_get_full_grad(parameter))

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into the part that this rank has."""
        if not self._check(parameter):
            raise FlexError(NOT_WHOLE.format(steps=self.engine.gradient_accumulation_steps()))
        from deepspeed.utils import safe_set_local_grad

        safe_set_local_grad(parameter, _part(parameter, value))

    def _check(self, parameter: nn.Parameter) -> bool:
        """Whether it has a gradient now, that a backward pass has left and no step has used."""
        if not parameter.requires_grad or not hasattr(parameter, "_z3_optimizer"):
            return False
        if self.optimizer.offload_optimizer:
            raise FlexError(OFFLOADED)
        return any(g is not None for g in self.optimizer.averaged_gradients.values())


def _part(parameter: Any, value: Tensor) -> Tensor:
    """This rank's part of a whole, counted flat and filled up with zeros."""
    length, rank = parameter.ds_tensor.numel(), dist.get_rank(parameter.ds_process_group)
    out = torch.zeros(length, dtype=torch.float32, device=value.device)
    mine = value.detach().reshape(-1)[rank * length : (rank + 1) * length]
    out[: len(mine)] = mine
    return out


# -- who calls the model -------------------------------------------------------------------------------


def driving_of(chunk: nn.Module, mesh: Mesh) -> Driving | None:
    """How an engine is run; None if there is none."""
    if of_deepspeed(chunk, PIPELINE):
        return Scheduled(chunk)
    return Called(_module(chunk), mesh, partial(_factor, chunk)) if of_deepspeed(chunk, ENGINE) else None


def _factor(engine: Any) -> float:
    """By how much gradients are greater than those of a microbatch's own loss."""
    scale = engine._get_optimizer_loss_scale()
    return float(scale or 1.0) / float(engine.gradient_accumulation_steps())


class Scheduled:
    """A pipeline engine, by `train_batch` or `eval_batch`; the n-th pass on a stage is of microbatch n."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def watch(self, listener: Listener) -> Undo:
        """Tell each schedule, and the passes in it."""

        def around(execute: Callable[[Any], None], schedule: Any) -> None:
            factor = partial(_factor, self.engine)
            listener.step_begins(self.engine.global_steps, factor, schedule.micro_batches)
            failed = True
            try:
                execute(_Told(schedule, self.engine, listener))
                failed = False
            finally:
                if failed:
                    listener.step_ends(True)
            listener.step_ends(False)

        return intercept(self.engine, "_exec_schedule", around)

    def run(self, tokens: Tensor, microbatch_size: int | None) -> None:
        """Evaluate it on tokens, whatever they are to its first layer; microbatches along their first dim."""
        engine = self.engine
        parts = list(tokens.split(microbatch_size or max(len(tokens), 1)))
        training, total = engine.module.training, engine.total_loss
        engine.total_loss = None  # which outputs are added to for want of a loss
        engine.reset_activation_shape()  # stages have told each other that of other microbatches
        engine.eval_batch(
            iter([(part, part) for part in parts]),
            compute_loss=False,
            reduce_output=None,
            bcast_loss=False,
            num_micro_batches=len(parts),
        )
        engine.reset_activation_shape()
        engine.module.train(training)
        engine.total_loss = total


class _Told:
    """A schedule that hands out one instruction at a time, and tells of passes before and behind."""

    def __init__(self, schedule: Any, engine: Any, listener: Listener) -> None:
        self.schedule, self.engine, self.listener = schedule, engine, listener
        self._begun = 0

    def num_pipe_buffers(self) -> int:
        """As many as the schedule needs."""
        return int(self.schedule.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[Any]]:
        for instructions in self.schedule:
            for one in instructions:
                kind = type(one).__name__
                output = self.engine.pipe_buffers["outputs"]
                if kind == "ForwardPass":
                    self.listener.forward_begins(self._begun, 0)
                    self._begun += 1
                elif kind == "BackwardPass":
                    self.listener.backward_begins(output[one.buffer_id])
                yield [one]  # the engine comes back when it has done that
                if kind == "ForwardPass":
                    self.listener.forward_ends(output[one.buffer_id])
                elif kind == "BackwardPass":
                    self.listener.backward_ends()


class Pipelined(Modules):
    """One stage of a PipelineModule, whose layers are named by their numbers in the whole model."""

    def _callable(self) -> Iterator[tuple[str, nn.Module]]:
        """Its modules, but for the loss function, which all stages have and the last one calls."""
        pp = self.mesh["pp"]
        for name, module in super()._callable():
            if name.partition(".")[0] != "loss_fn" or pp.coord == pp.size - 1:
                yield name, module
