"""Fairscale's model parallel layers: their layouts, process groups, and inner hook points.

Their forwards call four functions by name: copy to, scatter to, reduce from and gather from the model
parallel region. A tap inside replaces these names while its own layer runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_flex import points
from megatron_flex.adapters import pytorch, sharded_ddp
from megatron_flex.adapters.adapter_base import AxisSizes, FrameworkMatch, Listener, Undo
from megatron_flex.adapters.layout_rules import FULL, Point, Rule, Spread
from megatron_flex.adapters.mesh_axes import make_axis
from megatron_flex.adapters.model_calls import UserLoop
from megatron_flex.adapters.module_adapter import ModuleAdapter, compose
from megatron_flex.adapters.module_names import (
    SHARDED_DDP,
    all_modules,
    is_fairscale,
    is_fairscale_class,
    unwrap,
)
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.adapters.parameter_storage import ParameterStorage
from megatron_flex.adapters.pytorch import mesh_around
from megatron_flex.adapters.taps import intercept, join_undos, source_point, upstream_function
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Tap

COLUMN, ROW = "ColumnParallelLinear", "RowParallelLinear"
EMBEDDING, VOCABULARY = "ParallelEmbedding", "VocabParallelEmbedding"
PARALLEL = (COLUMN, ROW, EMBEDDING, VOCABULARY)

# From the outermost to the innermost, in the order of rank numbers.
GROUP_GETTERS = {
    "dp": "get_data_parallel_group",
    "pp": "get_pipeline_parallel_group",
    "tp": "get_model_parallel_group",
}

# The inner points, by the functions that they wrap.
POINT_NAMES = {
    "copy_to": "gemm_input",
    "scatter_to": "gemm_input",
    "reduce_from": "partial",
    "gather_from": "local",
}

LAST_DIM_CUT = Spread(cuts=((-1, "tp"),))
PARTIAL = Spread(partial=("tp",))
SHARED = Spread(shared=("tp",))

_CUT_DIM, _FULL_DIM = Dim("", (Cut("tp"),)), Dim()
ROWS_CUT, COLUMNS_CUT, ENTRIES_CUT = (
    Layout((_CUT_DIM, _FULL_DIM)),
    Layout((_FULL_DIM, _CUT_DIM)),
    Layout((_CUT_DIM,)),
)


def find_fairscale(
    chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any
) -> FrameworkMatch | None:
    """A model with fairscale's parallel layers in it, or a stage of a fairscale pipeline."""
    modules = [m for chunk in chunks for m in all_modules(chunk)]
    layers = [
        m
        for c in chunks
        for m in walk_modules(c).of_classes(lambda kind: is_fairscale_class(kind, *PARALLEL))
    ]
    layer = next(iter(layers), None)
    if len(chunks) == 1 and is_fairscale(unwrap(chunks[0]), "Pipe"):
        why = "it is a Pipe of fairscale's"
    elif layer is not None:
        why = f"it holds a {type(layer).__name__} of fairscale's"
    elif _pipeline_size() > 1:
        why = f"fairscale was initialized with {_pipeline_size()} pipeline stages"
    elif len(chunks) == 1 and (wrappers := sharded_ddp.sharded_ddp_wrappers_of(chunks[0])):
        return _find_sharded_ddp(wrappers, chunks[0], axis_sizes, process_group)
    else:
        return None
    make = partial(_make_adapter, chunks, modules, axis_sizes, process_group)
    return FrameworkMatch("fairscale", why, make, alone=layer is not None)


def _find_sharded_ddp(
    wrappers: list[Any], chunk: nn.Module, axis_sizes: AxisSizes, process_group: Any
) -> FrameworkMatch:
    """A model without fairscale's layers, or of another framework, in its ShardedDataParallel."""
    why = f"{'it is' if wrappers[0] is chunk else 'parts of it are'} in fairscale's {SHARDED_DDP}"

    def make() -> ModuleAdapter:
        return compose(chunk, mesh_around(wrappers, axis_sizes, process_group), name="fairscale")

    return FrameworkMatch("fairscale", why, make, around=True)


def _pipeline_size() -> int:
    initialize: Any = sys.modules.get("fairscale.nn.model_parallel.initialize")
    if initialize is None or not initialize.model_parallel_is_initialized():
        return 1
    return int(dist.get_world_size(initialize.get_pipeline_parallel_group()))


def _make_adapter(
    chunks: list[nn.Module], modules: list[nn.Module], axis_sizes: AxisSizes, process_group: Any
) -> ModuleAdapter:
    if len(chunks) != 1:
        raise FlexError(
            f"{len(chunks)} chunks of a fairscale model; fairscale has one on each rank: give that"
        )
    parallel = any(is_fairscale(m, *PARALLEL) for m in modules) or _pipeline_size() > 1
    mesh = fairscale_mesh() if parallel else pytorch.make_mesh(axis_sizes, process_group)
    mesh.check_sizes(axis_sizes)
    for module in modules:
        _check_layer_size(module, mesh["tp"].size)
    adapter = compose(chunks[0], mesh, FairscaleRules() if parallel else None, "fairscale")
    if is_fairscale(adapter.root, "Pipe"):
        _check_pipe(adapter.root, adapter.storage)
        adapter.runner = PipeCalls(adapter.root, mesh)
    return adapter


def fairscale_mesh() -> Mesh:
    """The axes of the run, from the groups of fairscale's layers.

    Raises:
        FlexError: the groups do not exist.
    """
    from fairscale.nn.model_parallel import initialize

    if not initialize.model_parallel_is_initialized():
        raise FlexError(
            "the model has fairscale's parallel layers, but fairscale's groups are not initialized; call "
            "fairscale.nn.model_parallel.initialize_model_parallel first"
        )
    return Mesh(
        tuple(make_axis(name, getattr(initialize, getter)()) for name, getter in GROUP_GETTERS.items())
    )


def _check_layer_size(module: Any, size: int) -> None:
    """Refuse a layer that was built for another number of ranks than there are now."""
    if is_fairscale(module, COLUMN):
        full, part = module.out_features, module.output_size_per_partition
    elif is_fairscale(module, ROW):
        full, part = module.in_features, module.input_size_per_partition
    elif is_fairscale(module, EMBEDDING):
        full, part = module.embedding_dim, module.embedding_dim_per_partition
    elif is_fairscale(module, VOCABULARY):
        full, part = module.num_embeddings, module.num_embeddings_per_partition
    else:
        return
    if part * size != full:
        raise FlexError(
            f"a {type(module).__name__} holds {part} of {full} entries, which {size} model parallel ranks "
            "do not make up; fairscale was initialized again since it was built: build the model again"
        )


def _check_pipe(pipe: Any, storage: ParameterStorage) -> None:
    """Refuse a wrapper that reduces after the first of several backward passes of recomputed chunks."""
    if (
        isinstance(storage, sharded_ddp.ShardedDDPParameters)
        and pipe.chunks > 1
        and pipe.checkpoint != "never"
    ):
        raise FlexError(
            f"a Pipe(checkpoint={pipe.checkpoint!r}) of {pipe.chunks} chunks differentiates each microbatch "
            f"by itself, and {SHARDED_DDP} reduces the gradients of the first alone; set checkpoint='never'"
        )


class FairscaleRules:
    """The rules of fairscale's parallel layers.

    A strided layer's weight is in the order of the ranks, as its own `get_master_weight` has it: fairscale
    does not store a layer's stride, and uses it only to initialize.
    """

    def find_rule(self, path: str, module: nn.Module) -> Rule | None:
        layer: Any = module
        if is_fairscale(module, COLUMN):
            gathered = layer.gather_output
            points = [Point("gemm_input", SHARED, _inner_tap(module, "copy_to"))]
            if gathered:
                points.append(Point("local", LAST_DIM_CUT, _inner_tap(module, "gather_from")))
            outputs = FULL if gathered else LAST_DIM_CUT
            return Rule(FULL, outputs, {"weight": ROWS_CUT, "bias": ENTRIES_CUT}, tuple(points))
        if is_fairscale(module, ROW):
            points = [Point("partial", PARTIAL, _inner_tap(module, "reduce_from"))]
            if not layer.input_is_parallel:
                points.insert(0, Point("gemm_input", LAST_DIM_CUT, _inner_tap(module, "scatter_to")))
            inputs = LAST_DIM_CUT if layer.input_is_parallel else FULL
            return Rule(inputs, FULL, {"weight": COLUMNS_CUT}, tuple(points))
        if is_fairscale(module, VOCABULARY):
            point = Point("partial", PARTIAL, _inner_tap(module, "reduce_from"))
            return Rule(FULL, FULL, {"weight": ROWS_CUT}, (point,))
        if is_fairscale(module, EMBEDDING):
            point = Point("local", LAST_DIM_CUT, _inner_tap(module, "gather_from"))
            return Rule(FULL, FULL, {"weight": COLUMNS_CUT}, (point,))
        return None


def _inner_tap(module: nn.Module, function: str) -> Tap:
    """The tap at one of the four functions, or at the point in patched source.

    A tensor that enters the region is taken after the function; one that leaves it, before. The reduction is
    in place.
    """
    if points.declares(module, POINT_NAMES[function]):
        return Tap(source_point, module, (POINT_NAMES[function],))
    file, leaves = "fairscale.nn.model_parallel.layers", function in ("reduce_from", "gather_from")
    return Tap(upstream_function, module, (file, f"{function}_model_parallel_region", leaves))


class PipeCalls(UserLoop):
    """A Pipe: each call is split into microbatches, which worker threads run through its partitions."""

    name = "Pipe"
    why = "it is in a Pipe of fairscale's, which splits a call into microbatches"

    def watch(self, listener: Listener) -> Undo:
        """Report each call, and in it the microbatch of each run of a partition, recomputed or not."""
        from fairscale.nn.pipe import pipeline

        pipe: Any = self.root
        at = threading.local()
        alone = threading.Lock()  # the clock handles one microbatch at a time

        def named(original: Callable[..., Any], name: str, *args: Any) -> Any:
            at.microbatch = int(name.removeprefix("chunk").partition("-")[0])
            return original(name, *args)

        def part(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with alone:
                listener.forward_begins(at.microbatch, 0)
                return original(*args, **kwargs)

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            listener.forward_begins(0, 0)  # the Pipe's own output belongs to the full call

        undos = [super().watch(listener), intercept(pipeline, "record_function", named)]
        undos += [intercept(partition, "_call_impl", part) for partition in pipe.partitions]
        undos.append(intercept(pipe.pipeline, "run", run))
        return join_undos(undos)
