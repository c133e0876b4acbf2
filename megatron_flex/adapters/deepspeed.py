"""DeepSpeed's engines: ZeRO stores parameters and gradients, and the pipeline engine runs a schedule.

Undocumented properties of DeepSpeed that this relies on are listed in `tests/contract/test_deepspeed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import Listener, LocalGradient, NormListener, StepReport, Undo
from megatron_flex.adapters.gradient_norms import watch_engine_steps
from megatron_flex.adapters.mesh_axes import make_axis
from megatron_flex.adapters.model_calls import ModelRunner, UserLoop
from megatron_flex.adapters.module_names import is_deepspeed, strip_wrapper_names
from megatron_flex.adapters.parameter_storage import ModuleParameters, StoredParameter
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.taps import intercept
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh

DEEPSPEED_ENGINE, PIPELINE_ENGINE, INFERENCE_ENGINE = "DeepSpeedEngine", "PipelineEngine", "InferenceEngine"
ZERO_12, ZERO_3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
# A method of the engine, the greatest value that means "off", and the feature it reports.
WITHOUT_A_RULE = {
    "autotp_size": (1, "AutoTP (tensor_parallel.autotp_size)"),
    "mics_shard_size": (0, "MiCS (mics_shard_size)"),
    "zero_hpz_partition_size": (1, "ZeRO++'s secondary partitions (zero_hpz_partition_size)"),
    "zero_quantized_weights": (0, "ZeRO++'s quantized weights (zero_quantized_weights)"),
    "zero_quantized_nontrainable_weights": (
        0,
        "quantized frozen weights (zero_quantized_nontrainable_weights)",
    ),
    "zero_quantized_gradients": (0, "ZeRO++'s quantized gradients (zero_quantized_gradients)"),
    "is_deepcompile_enabled": (0, "DeepCompile (compile.deepcompile)"),
    "is_compiled": (0, "engine.compile(), whose code runs past hooks,"),
    "has_moe_layers": (0, "deepspeed.moe"),
    "sequence_parallel_size": (1, "sequence parallelism"),
    "zenflow": (0, "ZenFlow (zero_optimization.zenflow)"),
}

HOOK_AS_IT_COMES = 'hook it as it comes (hook_type="tensor")'
OFFLOADED_OPTIMIZER = f"its gradient is in offload_optimizer's memory, perhaps in part; {HOOK_AS_IT_COMES}"
NOT_ASSEMBLED = (
    "ZeRO puts gradients together in the backward pass of the last of {steps} microbatches, and "
    "engine.step() takes them away; ask in between"
)
NO_MASTER = "a {kind} steps a copy of it, out of reach; use ZeRO (zero_optimization.stage 1 to 3)"
NOT_REDUCED = (
    f"a {{kind}} does not tell whether its gradient is reduced; {HOOK_AS_IT_COMES}, or keep gradients in the "
    "parameters' dtype (data_types.grad_accum_dtype)"
)
NOT_FROZEN = (
    "a {kind} waits for gradients that would never come; leave the parameters as they are and do not call "
    "the optimizer's step, or set requires_grad before deepspeed.initialize()"
)


# -- detection ------------------------------------------------------------------------------------------


def deepspeed_mesh(engine: Any) -> Mesh:
    """The axes of an engine's run: of its pipeline's grid, or of its data parallel group and `mpu`."""
    if is_deepspeed(engine, PIPELINE_ENGINE):
        groups = engine.grid.pp_proc_group, engine.grid.dp_proc_group, engine.grid.slice_proc_group
    else:
        asks = ("get_tensor_model_parallel_group", "get_model_parallel_group")
        cut = next((getattr(engine.mpu, n) for n in asks if hasattr(engine.mpu, n)), None)
        groups = None, engine.seq_data_parallel_group, None if cut is None else cut()
    return Mesh(tuple(map(make_axis, ("pp", "dp", "tp"), groups)))


def check_engine(engine: Any) -> None:
    """Refuse what no rule covers. The configuration is the same on all ranks, and so is the error."""
    if (kind := type(engine).__name__) in (INFERENCE_ENGINE, "DeepSpeedHybridEngine"):
        raise FlexError(
            f"a {kind} replaces modules by kernels, which is not supported; hook the model before you wrap it"
        )
    for question, (least, what) in WITHOUT_A_RULE.items():
        answer = getattr(engine, question, None)
        if int((answer() if callable(answer) else answer) or 0) > least:
            raise FlexError(f"{what} is on, which is not supported; turn it off to hook this model")
    if is_deepspeed(engine, PIPELINE_ENGINE):
        _check_tied_layers(engine.module)


def _check_tied_layers(model: Any) -> None:
    """Refuse layers that are one module on several stages; known on all ranks without communication."""
    stages: dict[str, set[int]] = {}
    for stage, (start, stop) in enumerate(pairwise(model.parts)):
        for spec in model._layer_specs[start:stop]:
            if type(spec).__name__ == "TiedLayerSpec":
                stages.setdefault(spec.key, set()).add(stage)
    if apart := {key: sorted(on_stages) for key, on_stages in stages.items() if len(on_stages) > 1}:
        raise FlexError(
            f"tied layers are on several pipeline stages, {apart}, which is not supported; give each "
            "stage a layer of its own, or partition so that one stage has both"
        )


# -- parameter storage ----------------------------------------------------------------------------------


def find_storage(chunk: nn.Module, root: nn.Module, mesh: Mesh) -> ZeroParameters | None:
    """The engine's ZeRO, or its plain optimizer; None if there is no engine.

    Raises:
        FlexError: ZeRO shards the parameters, but the model was given without its engine; or the engine
            uses a feature without a rule.
    """
    if not is_deepspeed(chunk, DEEPSPEED_ENGINE):
        for name, parameter in root.named_parameters():
            if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
                raise FlexError(f"ZeRO keeps {name}; give the engine that deepspeed.initialize() returned")
        return None
    check_engine(chunk)
    engine: Any = chunk
    ranks, dp = dist.get_process_group_ranks(engine.seq_data_parallel_group), mesh["dp"]
    if len(ranks) != dp.size or (dp.size > 1 and set(ranks) != set(dp.ranks)):
        raise FlexError(
            f"DeepSpeed's data parallel ranks are {sorted(ranks)}, but {mesh.describe()} was found; give "
            "deepspeed.initialize() the framework's mpu"
        )
    return ZeroParameters(engine, root)


class ZeroParameters(ModuleParameters):
    """ZeRO-1 and 2 shard gradients, ZeRO-3 parameters too; ZeRO-0 nothing.

    A ZeRO-3 parameter is flattened and sharded equally, and is gathered only while its module runs.
    """

    name = "DeepSpeed"
    why = "its engine reduces gradients, and ZeRO shards state over the ranks"

    def __init__(self, engine: Any, root: nn.Module) -> None:
        named: list[tuple[str, Any]] = list(root.named_parameters())
        self.root, self.engine, self.optimizer, self._unknown = root, engine, engine.optimizer, {}
        shapes = [tuple(getattr(p, "ds_shape", p.shape)) for _, p in named]
        parts = zip(named, shapes, strict=True)
        self._kept = [
            StoredParameter(strip_wrapper_names(n), p, shape, sharded=hasattr(p, "ds_id"))
            for (n, p), shape in parts
        ]
        self.kind = type(self.optimizer).__name__
        groups = getattr(self.optimizer, "bit16_groups", [])
        self._group = {id(p): number for number, group in enumerate(groups) for p in group}
        self.none = self.optimizer is None or isinstance(self.optimizer, torch.optim.Optimizer)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The full parameter, if necessary gathered in DeepSpeed's own context and copied there."""
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter]):
            return parameter.detach().clone()

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write to the full parameter where it exists, and to this rank's part of the optimizer's copy."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if hasattr(parameter, "ds_id"):
            with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(value)
            if hasattr(parameter, "_z3_optimizer"):
                safe_set_local_fp32_param(parameter, _flat_shard(parameter, value))
            return
        if not (hasattr(parameter, "_hp_mapping") or self.none) and parameter.requires_grad:
            raise FlexError(NO_MASTER.format(kind=self.kind))
        super().set_value(parameter, value)
        safe_set_full_fp32_param(parameter, value.detach().float())

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """The mean over data parallel ranks, gathered from their parts."""
        from deepspeed.utils import safe_get_full_grad

        return LocalGradient(safe_get_full_grad(parameter) if self._exists(parameter) else None)

    def reduced(self, called: bool = False) -> bool:
        return True  # an available gradient is the mean over data parallel ranks

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write to the part of this rank."""
        from deepspeed.utils import safe_set_full_grad, safe_set_local_grad

        if not self._exists(parameter):
            raise FlexError(NOT_ASSEMBLED.format(steps=self.engine.gradient_accumulation_steps()))
        if self.none:
            super().put_gradient(parameter, value, reduced)
        elif hasattr(parameter, "ds_id"):
            safe_set_local_grad(parameter, _flat_shard(parameter, value))
        else:
            safe_set_full_grad(parameter, value)

    def _exists(self, parameter: nn.Parameter) -> bool:
        """Whether it has a gradient now; the same on all ranks, because reading it is collective."""
        if not parameter.requires_grad:
            return False
        if any(getattr(self.optimizer, n, False) for n in ("cpu_offload", "offload_optimizer")):
            raise FlexError(OFFLOADED_OPTIMIZER)
        if hasattr(parameter, "ds_id"):  # the accumulated gradient; ZeRO-3 reduces it each time
            gradients = getattr(self.optimizer, "averaged_gradients", {})
            return any(g is not None for g in gradients.values())
        if not self.none:
            if self.kind != ZERO_12:
                raise FlexError(NOT_REDUCED.format(kind=self.kind))
            if id(parameter) not in self._group:
                raise FlexError("the optimizer was not given it, so that nothing reduces its gradient")
            if self.optimizer.averaged_gradients.get(self._group[id(parameter)]) is not None:
                return True
        if not self.engine.is_gradient_accumulation_boundary() and not is_deepspeed(
            self.engine, PIPELINE_ENGINE
        ):
            raise FlexError(NOT_ASSEMBLED.format(steps=self.engine.gradient_accumulation_steps()))
        return self.none

    def watch_gradient_norm(self, listener: NormListener) -> Undo:
        """Trace the engine's updates."""
        return watch_engine_steps(self.engine, listener)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, where nothing depends on gradients."""
        if is_deepspeed(self.engine, PIPELINE_ENGINE) or not (self.none or self.kind == ZERO_3):
            raise FlexError(NOT_FROZEN.format(kind=f"{type(self.engine).__name__} with a {self.kind}"))
        return super().freeze()


def _flat_shard(parameter: Any, value: Tensor) -> Tensor:
    """This rank's part of a full tensor, flattened and padded with zeros."""
    length, rank = parameter.ds_tensor.numel(), dist.get_rank(parameter.ds_process_group)
    shard = value.detach().reshape(-1).float()[rank * length : (rank + 1) * length]
    return nn.functional.pad(shard, (0, length - len(shard)))


# -- callers of the model -------------------------------------------------------------------------------


def find_runner(chunk: nn.Module, mesh: Mesh) -> ModelRunner | None:
    """The caller of an engine; None if there is none."""
    if is_deepspeed(chunk, PIPELINE_ENGINE):
        return EngineSchedule(chunk)
    if is_deepspeed(chunk, DEEPSPEED_ENGINE):
        return UserLoop(chunk.get_submodule("module"), mesh, partial(_gradient_factor, chunk))
    return None


def _gradient_factor(engine: Any) -> float:
    """The factor between the gradients and those of a microbatch's own loss."""
    return float(engine._get_optimizer_loss_scale() or 1.0) / float(engine.gradient_accumulation_steps())


class EngineSchedule:
    """A pipeline engine, run by `train_batch` or `eval_batch`; pass n on a stage is of microbatch n."""

    name = "PipelineEngine"
    length_multiple = 1
    why = "its engine runs a schedule over the stages"

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def watch(self, listener: Listener) -> Undo:
        """Report each schedule, and the passes in it."""

        def around(execute: Callable[[Any], None], schedule: Any) -> None:
            factor = partial(_gradient_factor, self.engine)
            with StepReport(listener, self.engine.global_steps, factor, schedule.micro_batches):
                execute(_InstructionStream(schedule, self.engine, listener))

        return intercept(self.engine, "_exec_schedule", around)

    def run(self, prompts: Prompts, microbatch_size: int | None) -> None:
        """Evaluate it on tokens, in the form of its first layer's input; microbatches along the first dim."""
        prompts.check_tokens_alone(self.name)
        engine, parts = self.engine, [part.tokens for part in prompts.split(microbatch_size)]
        training, total = engine.module.training, engine.total_loss
        engine.total_loss = None  # outputs are added to it if there is no loss
        engine.reset_activation_shape()  # stages have exchanged the shape of other microbatches
        quiet: Any = {"compute_loss": False, "reduce_output": None, "bcast_loss": False}
        engine.eval_batch(iter([(part, part) for part in parts]), num_micro_batches=len(parts), **quiet)
        engine.reset_activation_shape()
        engine.module.train(training)
        engine.total_loss = total


@dataclass
class _InstructionStream:
    """A schedule that yields one instruction at a time, and reports passes before and after."""

    schedule: Any
    engine: Any
    listener: Listener

    def num_pipe_buffers(self) -> int:
        """As many as the schedule needs."""
        return int(self.schedule.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[Any]]:
        begun, outputs = count(), self.engine.pipe_buffers["outputs"]
        for instruction in chain.from_iterable(self.schedule):
            kind = type(instruction).__name__
            if kind == "ForwardPass":
                self.listener.forward_begins(next(begun), 0)
            elif kind == "BackwardPass":
                self.listener.backward_begins(outputs[instruction.buffer_id])
            yield [instruction]  # the engine resumes here when it has executed that
            if kind == "ForwardPass":
                self.listener.forward_ends(outputs[instruction.buffer_id])
            elif kind == "BackwardPass":
                self.listener.backward_ends()
