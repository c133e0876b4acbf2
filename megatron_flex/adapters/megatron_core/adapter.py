"""The adapter: one object for one model, and its mesh.

The mesh is read from Megatron's own process groups; none is created.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import (
    Architecture,
    Listener,
    LocalGradient,
    ParameterSite,
    Part,
    Undo,
)
from megatron_flex.adapters.megatron_core.model_sites import (
    parameters_of,
    parameters_without_layout,
    sites_of,
)
from megatron_flex.adapters.megatron_core.module_classes import (
    MODEL_CLASSES,
    global_modules,
    is_megatron,
    unwrap_model,
    wrappers_around,
)
from megatron_flex.adapters.megatron_core.parameter_gradients import (
    MegatronGradients,
    freeze_parameters,
    open_recomputed_regions,
)
from megatron_flex.adapters.megatron_core.schedules import (
    read_architecture,
    run_backward,
    run_forward,
    watch_schedules,
)
from megatron_flex.adapters.megatron_core.ssm_layers import refuse_context_parallel
from megatron_flex.adapters.megatron_core.unsupported_settings import refuse_settings, refuse_wrappers
from megatron_flex.adapters.sharded_ddp import sharded_ddp_wrappers_of
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.sites import Site

# From the outermost to the innermost, in the usual order; for display and counting only.
DENSE_GETTERS = {
    "pp": "get_pipeline_model_parallel_group",
    "dp": "get_data_parallel_group",
    "cp": "get_context_parallel_group",
    "tp": "get_tensor_model_parallel_group",
}
# The same ranks as expert layers divide them. The names in collections of groups differ.
EXPERT_GETTERS = {
    "edp": "get_expert_data_parallel_group",
    "ep": "get_expert_model_parallel_group",
    "etp": "get_expert_tensor_parallel_group",
}
COLLECTION_NAMES = {"edp": "expt_dp", "etp": "expt_tp"}
GETTERS = {**DENSE_GETTERS, **EXPERT_GETTERS}


def megatron_mesh(root: nn.Module) -> Mesh:
    """The axes of the run.

    A group is taken from the same sources as in Megatron's layers: the layers (tensor parallel), the model's
    collection of process groups, and last `parallel_state`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Mesh(tuple(map(Axis, DENSE_GETTERS)), tuple(map(Axis, EXPERT_GETTERS)))
    dense = tuple(_axis(name, _group(root, name)) for name in DENSE_GETTERS)
    return Mesh(dense, tuple(_axis(name, _group(root, name)) for name in EXPERT_GETTERS))


def _group(root: nn.Module, name: str) -> Any:
    if name == "tp":
        for module in root.modules():
            if is_megatron(module, "ColumnParallelLinear", "RowParallelLinear") and not getattr(
                module, "is_expert", False
            ):
                group = getattr(module, "tp_group", None)
                if group is not None:
                    return group
    for holder in (root, getattr(root, "decoder", None)):
        for collection in ("pg_collection", "model_comm_pgs"):
            group = getattr(getattr(holder, collection, None), COLLECTION_NAMES.get(name, name), None)
            if group is not None:
                return group
    from megatron.core import parallel_state

    return getattr(parallel_state, GETTERS[name])() if parallel_state.is_initialized() else None


def _axis(name: str, group: Any) -> Axis:
    if group is None or dist.get_world_size(group) == 1:
        return Axis(name, ranks=(dist.get_rank(),))
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), dist.get_rank(group), group, ranks)


class MegatronAdapter:
    """The adapter of a megatron-core model, given as its chunks, wrapped or not."""

    name = "megatron-core"
    logits = "output_layer:output"

    def __init__(self, chunks: list[nn.Module]) -> None:
        self.chunks, self.roots = chunks, [unwrap_model(c) for c in chunks]
        self.mesh = megatron_mesh(self.roots[0])
        self.prefix = next(f"{n}." if n else "" for n, m in chunks[0].named_modules() if m is self.roots[0])
        self._gradients = MegatronGradients(chunks, self.roots)

    def check(self) -> None:
        """Refuse what cannot be hooked: graphs replay kernels, and merged passes skip the modules."""
        config: Any = self.roots[0].config
        refuse_settings(config)
        refuse_wrappers(w for chunk in self.chunks for w in wrappers_around(chunk))
        for root in self.roots:
            refuse_context_parallel(root, config.context_parallel_size)
        if any(sharded_ddp_wrappers_of(chunk) for chunk in self.chunks):
            raise FlexError(
                "fairscale's ShardedDataParallel is around a model of Megatron's, whose gradients it reduces "
                "to one rank each; use Megatron's own DistributedDataParallel, use_distributed_optimizer=True"
            )

    def parts(self) -> list[Part]:
        """The wrappers of the chunks, and Megatron's schedules."""
        around = [Part(type(w).__name__, "it is around the model") for w in wrappers_around(self.chunks[0])]
        return [*around, Part("Megatron's schedules", "they call the chunks, or a loop of one's own does")]

    def module_names(self) -> list[str]:
        """The modules of all chunks on this rank, with global layer numbers."""
        return [name for root in self.roots for name, _ in global_modules(root)]

    def sites(self) -> list[Site]:
        """The sites of all chunks on this rank."""
        chunks = enumerate(self.roots)
        return [replace(s, chunk=i) if i else s for i, root in chunks for s in sites_of(root, self.mesh)]

    def parameters(self) -> list[ParameterSite]:
        """The parameters of all chunks on this rank that belong to modules with a known layout."""
        chunks = enumerate(self.roots)
        return [replace(p, chunk=i) if i else p for i, root in chunks for p in parameters_of(root, self.mesh)]

    def without_layout(self) -> dict[str, str]:
        """The other parameters of all chunks on this rank."""
        return {
            name: kind
            for root in self.roots
            for name, kind in parameters_without_layout(root, self.mesh).items()
        }

    def buffers(self) -> dict[str, Tensor]:
        """The routers' biases; other buffers count a rank's tokens, or are derived from the configuration."""
        found = (
            (f"{name}.expert_bias", getattr(module, "expert_bias", None))
            for root in self.roots
            for name, module in global_modules(root)
        )
        return {name: bias for name, bias in found if isinstance(bias, Tensor)}

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """None: parameters are not sharded over data parallel ranks while the model does not run."""
        return {}

    def lengths(self) -> dict[str, int]:
        """The lengths of sequence and microbatch, if they are set in `megatron.training`."""
        state = sys.modules.get("megatron.training.global_vars")
        args = getattr(state, "_GLOBAL_ARGS", None)
        found = {"s": getattr(args, "seq_length", None), "b": getattr(args, "micro_batch_size", None)}
        if getattr(args, "variable_seq_lengths", False):
            found["s"] = None
        return {name: length for name, length in found.items() if isinstance(length, int)}

    def wait_until_ready(self) -> None:
        """Wait for the parameters that the distributed optimizer gathers while the model runs."""
        self._gradients.gather_parameters()

    def gradients_reduced(self, called: bool = False) -> bool | str:
        """Whether the schedule finalizes gradients at its end."""
        return self._gradients.reduced(called)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """`main_grad` where Megatron keeps it, `grad` otherwise."""
        return self._gradients.of(parameter, reduced)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The local parameter."""
        return parameter.detach()

    def gradient_partial_axes(self, name: str) -> tuple[str, ...]:
        """None: layouts name these axes, and Megatron sums over them."""
        return ()

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write to it."""
        with torch.no_grad():
            parameter.copy_(value)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write to Megatron's gradient."""
        found = self._gradients.of(parameter, reduced).tensor
        if found is None:
            parameter.grad = torch.zeros_like(parameter)
            found = parameter.grad
        with torch.no_grad():
            found.copy_(value)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, and make DistributedDataParallel wait for no gradient."""
        return freeze_parameters(self.roots, self._gradients.wrappers)

    def enable_recomputed_gradients(self) -> Undo:
        """Make the input of the layers require a gradient, where some are recomputed."""
        return open_recomputed_regions(self.roots)

    def architecture(self) -> Architecture | None:
        """The properties of a GPT or hybrid model."""
        return read_architecture(self.roots[0])

    def run(self, tokens: Tensor, microbatch_size: int | None = None) -> None:
        """Run the model forward by Megatron's schedule, after pending work of the distributed optimizer."""
        self.wait_until_ready()
        run_forward(self.chunks, self.roots[0], self.mesh, tokens, microbatch_size)

    def run_backward(self, tokens: Tensor, labels: Tensor, counted: Tensor) -> float | None:
        """Run one forward and backward pass; see `schedules.run_backward`."""
        self.wait_until_ready()
        return run_backward(self.chunks, self.roots[0], self.mesh, tokens, labels, counted)

    def watch(self, listener: Listener) -> Undo:
        """Trace Megatron's schedules, and calls of the model outside them."""
        return watch_schedules(self.roots, self.mesh["cp"].size, listener)


def make_megatron_adapter(chunks: list[nn.Module]) -> MegatronAdapter | None:
    """An adapter, if every chunk is a Megatron model."""
    known = bool(chunks) and all(is_megatron(unwrap_model(c), *MODEL_CLASSES) for c in chunks)
    return MegatronAdapter(chunks) if known else None
