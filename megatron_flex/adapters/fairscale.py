"""Fairscale's model parallel layers: how they cut tensors, the groups they work in, and what is inside them.

Their forwards are plain code that calls four functions by name: copy to, scatter to, reduce from and gather
from the model parallel region. A tap inside stands about these names, while its own layer runs.
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
from megatron_flex.adapters import plain
from megatron_flex.adapters.base import Listener, Undo
from megatron_flex.adapters.composing import compose
from megatron_flex.adapters.driving import UserLoop
from megatron_flex.adapters.modules import Modules
from megatron_flex.adapters.module_names import unwrap
from megatron_flex.adapters.ranks import axis_of
from megatron_flex.adapters.adapter_registry import Found, AxisSizes
from megatron_flex.adapters.rules import Point, Rule
from megatron_flex.adapters.spread import WHOLE, Spread
from megatron_flex.adapters.taps import UpstreamFunction, SourcePoint, intercept
from megatron_flex.errors import FlexError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Tap

COLUMN, ROW = "ColumnParallelLinear", "RowParallelLinear"
EMBEDDING, VOCABULARY = "ParallelEmbedding", "VocabParallelEmbedding"
PARALLEL = (COLUMN, ROW, EMBEDDING, VOCABULARY)
NO_RULE = {  # what a model may not have in it, and why
    "MOELayer": (
        "whose experts are others on each rank, and no rule tells how they lie there; give the part of the "
        "model without it"
    ),
    "FullyShardedDataParallel": (
        "which does not run without a GPU (`KeyError: 'all_gather'` in its forward: it makes streams only "
        "there), and whose parameters nothing here puts together; use torch's FullyShardedDataParallel or "
        "fully_shard"
    ),
}

# From the outermost to the innermost: ranks are numbered so.
GROUP_GETTERS = {
    "dp": "get_data_parallel_group",
    "pp": "get_pipeline_parallel_group",
    "tp": "get_model_parallel_group",
}

# The points inside, by the functions that they are at.
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
ROWS_CUT, COLUMNS_CUT, ENTRIES_CUT = Layout((_CUT_DIM, _FULL_DIM)), Layout((_FULL_DIM, _CUT_DIM)), Layout((_CUT_DIM,))


def is_a(module: Any, *names: str) -> bool:
    """Whether a module's class, or one that it derives from, is fairscale's class of one of these names."""
    return any(c.__name__ in names and c.__module__.startswith("fairscale.") for c in type(module).__mro__)


def find_fairscale(chunks: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Found | None:
    """A model with fairscale's parallel layers in it, or a stage of a pipeline that fairscale made."""
    modules = [m for chunk in chunks for m in chunk.modules()]
    layer = next((m for m in modules if is_a(m, *PARALLEL, *NO_RULE)), None)
    if len(chunks) == 1 and is_a(unwrap(chunks[0]), "Pipe"):
        why = "it is a Pipe of fairscale's"
    elif layer is not None:
        why = f"it holds a {type(layer).__name__} of fairscale's"
    elif _pipeline_size() > 1:
        why = f"fairscale was initialized with {_pipeline_size()} pipeline stages"
    else:
        return None
    make = partial(_make_adapter, chunks, modules, axis_sizes, process_group)
    return Found("fairscale", why, make, alone=layer is not None)


def _pipeline_size() -> int:
    initialize: Any = sys.modules.get("fairscale.nn.model_parallel.initialize")
    if initialize is None or not initialize.model_parallel_is_initialized():
        return 1
    return int(dist.get_world_size(initialize.get_pipeline_parallel_group()))


def _make_adapter(chunks: list[nn.Module], modules: list[nn.Module], axis_sizes: AxisSizes, process_group: Any) -> Modules:
    if len(chunks) != 1:
        raise FlexError(
            f"{len(chunks)} chunks of a fairscale model; fairscale has one on each rank: give that"
        )
    for module in modules:
        for name, why in NO_RULE.items():
            if is_a(module, name):
                raise FlexError(f"the model holds a {name} of fairscale's, {why}")
    parallel = any(is_a(m, *PARALLEL) for m in modules) or _pipeline_size() > 1
    mesh = fairscale_mesh() if parallel else plain.mesh_of(axis_sizes, process_group)
    mesh.check_sizes(axis_sizes)
    for module in modules:
        _check_layer_size(module, mesh["tp"].size)
    adapter = compose(chunks[0], mesh, FairscaleRules() if parallel else None, "fairscale")
    if is_a(adapter.root, "Pipe"):
        adapter.driving = PipeCalls(adapter.root, mesh)
    return adapter


def fairscale_mesh() -> Mesh:
    """The axes of the run, of the groups that fairscale's layers use.

    Raises:
        FlexError: there are none.
    """
    from fairscale.nn.model_parallel import initialize

    if not initialize.model_parallel_is_initialized():
        raise FlexError(
            "the model has fairscale's parallel layers, but fairscale's groups are not there; call "
            "fairscale.nn.model_parallel.initialize_model_parallel before"
        )
    return Mesh(tuple(axis_of(name, getattr(initialize, getter)()) for name, getter in GROUP_GETTERS.items()))


def _check_layer_size(module: Any, size: int) -> None:
    """Refuse a layer that was built for another number of ranks than there are now."""
    if is_a(module, COLUMN):
        full, part = module.out_features, module.output_size_per_partition
    elif is_a(module, ROW):
        full, part = module.in_features, module.input_size_per_partition
    elif is_a(module, EMBEDDING):
        full, part = module.embedding_dim, module.embedding_dim_per_partition
    elif is_a(module, VOCABULARY):
        full, part = module.num_embeddings, module.num_embeddings_per_partition
    else:
        return
    if part * size != full:
        raise FlexError(
            f"a {type(module).__name__} holds {part} of {full} entries, which {size} model parallel ranks "
            "do not make up; fairscale was initialized anew since it was built: build the model again"
        )


class FairscaleRules:
    """The rules of fairscale's parallel layers.

    A strided layer's weight is told in the order of the ranks, as its own `get_master_weight` does: fairscale
    keeps a layer's stride nowhere, and uses it only to initialize.
    """

    def of(self, path: str, module: nn.Module) -> Rule | None:
        """What is known of one of them."""
        layer: Any = module
        if is_a(module, COLUMN):
            gathered = layer.gather_output
            points = [Point("gemm_input", SHARED, _inner_tap(module, "copy_to"))]
            if gathered:
                points.append(Point("local", LAST_DIM_CUT, _inner_tap(module, "gather_from")))
            outputs = WHOLE if gathered else LAST_DIM_CUT
            return Rule(WHOLE, outputs, {"weight": ROWS_CUT, "bias": ENTRIES_CUT}, tuple(points))
        if is_a(module, ROW):
            points = [Point("partial", PARTIAL, _inner_tap(module, "reduce_from"))]
            if not layer.input_is_parallel:
                points.insert(0, Point("gemm_input", LAST_DIM_CUT, _inner_tap(module, "scatter_to")))
            inputs = LAST_DIM_CUT if layer.input_is_parallel else WHOLE
            return Rule(inputs, WHOLE, {"weight": COLUMNS_CUT}, tuple(points))
        if is_a(module, VOCABULARY):
            point = Point("partial", PARTIAL, _inner_tap(module, "reduce_from"))
            return Rule(WHOLE, WHOLE, {"weight": ROWS_CUT}, (point,))
        if is_a(module, EMBEDDING):
            point = Point("local", LAST_DIM_CUT, _inner_tap(module, "gather_from"))
            return Rule(WHOLE, WHOLE, {"weight": COLUMNS_CUT}, (point,))
        return None


def _inner_tap(module: nn.Module, function: str) -> Tap:
    """The tap at one of the four functions, or at the point that patched source has there.

    What enters the region is taken behind the function, as the rank computes with it; what leaves it, before.
    The reduction writes its sum into the tensor that it gets.
    """
    if points.has(module, POINT_NAMES[function]):
        return SourcePoint(module, POINT_NAMES[function])
    file, leaves = "fairscale.nn.model_parallel.layers", function in ("reduce_from", "gather_from")
    return UpstreamFunction(module, file, f"{function}_model_parallel_region", before=leaves)


class PipeCalls(UserLoop):
    """A Pipe: each call of it is cut into microbatches, which worker threads pass through its partitions."""

    name = "Pipe"
    why = "it is in a Pipe of fairscale's, which splits a call into microbatches"

    def watch(self, listener: Listener) -> Undo:
        """Tell each call, and in it the microbatch of each run of a partition, recomputed or not."""
        from fairscale.nn.pipe import pipeline

        pipe: Any = self.root
        at = threading.local()
        alone = threading.Lock()  # the clock knows one microbatch at a time

        def named(original: Callable[..., Any], name: str, *args: Any) -> Any:
            at.microbatch = int(name.removeprefix("chunk").partition("-")[0])
            return original(name, *args)

        def part(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with alone:
                listener.forward_begins(at.microbatch, 0)
                return original(*args, **kwargs)

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            listener.forward_begins(0, 0)  # what the Pipe itself returns is of the whole call

        undos = [super().watch(listener), intercept(pipeline, "record_function", named)]
        undos += [intercept(one, "_call_impl", part) for one in pipe.partitions]
        undos.append(intercept(pipe.pipeline, "run", run))

        def undo() -> None:
            for one in reversed(undos):
                one()

        return undo
