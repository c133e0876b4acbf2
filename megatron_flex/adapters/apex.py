"""The layers of `apex.transformer`: their layouts, process groups, and inner hook points.

They are Megatron's of 2022: the sequence is sharded over the first dim, and a bias may be returned beside the
output. Each linear has its GEMM function as an attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import (
    Adapter,
    AxisSizes,
    FrameworkMatch,
    Undo,
)
from megatron_flex.adapters.apex_schedule import ApexSchedule
from megatron_flex.adapters.layout_rules import FULL, Point, Rule, Spread
from megatron_flex.adapters.mesh_axes import make_axis
from megatron_flex.adapters.module_adapter import compose
from megatron_flex.adapters.module_names import all_modules
from megatron_flex.adapters.pipeline_stages import PipelineAdapter
from megatron_flex.adapters.taps import intercept, upstream_function
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Tap, TapCallbacks

COLUMN, ROW, VOCABULARY = "ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"
PARALLEL = (COLUMN, ROW, VOCABULARY)
NORMS = ("FusedLayerNorm", "FusedRMSNorm", "FastLayerNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm")
LAYERS_MODULE = "apex.transformer.tensor_parallel.layers"
SEQUENCE_PARALLEL = (
    "sequence_parallel_enabled"  # an attribute of layers and of the parameters with partial gradients
)

# From the outermost to the innermost, in the order of rank numbers.
GROUP_GETTERS = {
    "pp": "get_pipeline_model_parallel_group",
    "dp": "get_data_parallel_group",
    "tp": "get_tensor_model_parallel_group",
}

STRIDED = "stride={} gives each rank several pieces of its features; hook the modules before and after it"
LAST_DIM_CUT, FIRST_DIM_CUT = Spread(cuts=((-1, "tp"),)), Spread(cuts=((0, "tp"),))
PARTIAL, SHARED = Spread(partial=("tp",)), Spread(shared=("tp",))


def is_apex(module: Any, *names: str) -> bool:
    """Whether a module's class, or one of its bases, is apex's class of one of these names."""
    return any(c.__name__ in names and c.__module__.startswith("apex.") for c in type(module).__mro__)


def find_apex(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> FrameworkMatch | None:
    """A model with apex's parallel layers in it, or a stage of an apex pipeline."""
    modules = [m for chunk in chunks for m in all_modules(chunk)]
    kinds = {type(m): m for m in modules}
    layer = next((m for m in kinds.values() if is_apex(m, *PARALLEL)), None)
    if layer is not None:
        why = f"it holds a {type(layer).__name__} of apex's"
    elif _pipeline_size() > 1:
        why = f"apex was initialized with {_pipeline_size()} pipeline stages"
    else:
        return None
    return FrameworkMatch("apex", why, partial(_make_adapter, chunks, modules, axis_sizes))


def _pipeline_size() -> int:
    state: Any = sys.modules.get("apex.transformer.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return 1
    return int(dist.get_world_size(state.get_pipeline_model_parallel_group()))


def _make_adapter(chunks: list[nn.Module], modules: list[nn.Module], axis_sizes: AxisSizes) -> Adapter:
    mesh = apex_mesh()
    mesh.check_sizes(axis_sizes)
    parts = [compose(chunk, mesh, ApexRules(), "apex") for chunk in chunks]
    linears: list[Any] = [m for m in modules if _is_fused(m)]
    fused = frozenset(m.weight for m in linears)
    for part in parts:
        part.storage.fused = fused
    # With virtual chunks, a rank runs one stage in each round of the pipeline.
    stages = [turn * mesh["pp"].size + mesh["pp"].coord for turn in range(len(chunks))]
    schedule = ApexSchedule(chunks, stages, mesh)
    if mesh["pp"].size == len(chunks) == 1:
        parts[0].runner = schedule
        return parts[0]
    count = mesh["pp"].size * len(chunks)
    return PipelineAdapter(parts, stages, list(range(len(chunks))), count, schedule)


def _is_fused(module: Any) -> bool:
    """Whether a linear's kernel adds its weight's gradient up in `main_grad`."""
    return is_apex(module, COLUMN, ROW) and bool(getattr(module, "gradient_accumulation_fusion", False))


def apex_mesh() -> Mesh:
    """The axes of the run, from the groups of apex's layers.

    Raises:
        FlexError: the groups do not exist.
    """
    from apex.transformer import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        raise FlexError(
            "the model has apex's parallel layers, but apex's groups are not initialized; call "
            "apex.transformer.parallel_state.initialize_model_parallel first"
        )
    return Mesh(
        tuple(make_axis(name, getattr(parallel_state, getter)()) for name, getter in GROUP_GETTERS.items())
    )


class ApexRules:
    """The rules of apex's parallel layers, and of norms on a sharded sequence."""

    def find_rule(self, path: str, module: nn.Module) -> Rule | None:
        if is_apex(module, COLUMN, ROW):
            rule = _column_rule(module) if is_apex(module, COLUMN) else _row_rule(module)
            stride = getattr(module.weight, "partition_stride", 1)
            return rule if stride == 1 else replace(rule, points=(), hidden=STRIDED.format(stride))
        if is_apex(module, VOCABULARY):
            tap = Tap(
                upstream_function, module, (LAYERS_MODULE, "reduce_from_tensor_model_parallel_region", True)
            )
            return Rule(
                FULL,
                FULL,
                {"weight": _parameter_layout(module, "weight", 0)},
                (Point("partial", PARTIAL, tap),),
            )
        shares = {
            n: _parameter_layout(module, n, None)
            for n, p in module.named_parameters(recurse=False)
            if _has_shared_gradient(p)
        }
        if is_apex(module, *NORMS):
            return Rule(parameters=shares, follows=len(getattr(module, "normalized_shape", (0,))))
        return Rule(parameters=shares) if shares else None


def _column_rule(module: Any) -> Rule:
    inputs = FIRST_DIM_CUT if getattr(module, SEQUENCE_PARALLEL, False) else FULL
    points = [Point("gemm_input", SHARED, Tap(apex_gemm, module, (True,)))]
    if module.gather_output:
        points.append(Point("local", LAST_DIM_CUT, Tap(apex_gemm, module, (False,))))
    parameters = {name: _parameter_layout(module, name, 0) for name in ("weight", "bias")}
    return Rule(
        inputs,
        FULL if module.gather_output else LAST_DIM_CUT,
        parameters,
        tuple(points),
        beside=(LAST_DIM_CUT,),
    )


def _row_rule(module: Any) -> Rule:
    points = [Point("partial", PARTIAL, Tap(apex_gemm, module, (False,)))]
    if not module.input_is_parallel:
        points.insert(0, Point("gemm_input", LAST_DIM_CUT, Tap(apex_gemm, module, (True,))))
    parameters = {
        "weight": _parameter_layout(module, "weight", 1),
        "bias": _parameter_layout(module, "bias", None),
    }
    return Rule(
        LAST_DIM_CUT if module.input_is_parallel else FULL,
        FIRST_DIM_CUT if getattr(module, SEQUENCE_PARALLEL, False) else FULL,
        parameters,
        tuple(points),
        beside=(SHARED if _has_shared_gradient(module.bias) else FULL,),
    )


def _has_shared_gradient(parameter: Any) -> bool:
    """Whether each rank has only the part of a parameter's gradient from its own part of the sequence."""
    return bool(getattr(parameter, SEQUENCE_PARALLEL, False))


def _parameter_layout(module: Any, name: str, cut: int | None) -> Layout:
    """The layout of a parameter that is sharded along a dim.

    Where a linear is strided, `partition_stride` parts of it are sharded separately.
    """
    parameter = getattr(module, name)
    dims = 0 if parameter is None else parameter.ndim
    stride = getattr(parameter, "partition_stride", 1)
    strided = Dim("", (Cut("tp"),), segments=(1,) * stride)
    return Layout(
        tuple(strided if i == cut else Dim() for i in range(dims)),
        shared=("tp",) if _has_shared_gradient(parameter) else (),
    )


def apex_gemm(module: nn.Module, callbacks: TapCallbacks, before: bool) -> Undo:
    """Around the function with the GEMM that a parallel linear calls with keywords.

    Args:
        module: the linear.
        before: the input of the GEMM, gathered over the sequence where it is sharded; else its output before
            any collective.
    """

    def around(gemm: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not before:
            return cast(Tensor, callbacks.run(gemm(*args, **kwargs)))
        kwargs = _with_gathered_input(kwargs)
        kwargs["input"] = callbacks.run(kwargs["input"])
        return gemm(*args, **kwargs)

    return intercept(module, "_forward_impl", around)


def _with_gathered_input(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Run the collective on the input outside of the GEMM, with apex's own functions.

    Inside, it is fused with the GEMM, so that the tensor between the two never exists.
    """
    from apex.transformer.tensor_parallel import mappings

    kwargs = dict(kwargs)
    if kwargs.get(SEQUENCE_PARALLEL):
        kwargs["input"] = mappings.gather_from_sequence_parallel_region(kwargs["input"])
        kwargs[SEQUENCE_PARALLEL] = False
    elif kwargs.get("async_grad_allreduce"):
        kwargs["input"] = mappings.copy_to_tensor_model_parallel_region(kwargs["input"])
        kwargs["async_grad_allreduce"] = False
    return kwargs
