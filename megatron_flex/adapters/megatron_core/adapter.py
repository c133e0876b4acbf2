"""The adapter itself: one object for one model, in front of the rooms beside it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.base import Architecture, Listener, LocalGradient, ParameterSite, Part, Undo
from megatron_flex.adapters.megatron_core.freezing import freeze_parameters, open_recomputed_regions
from megatron_flex.adapters.megatron_core.gradients import MegatronGradients
from megatron_flex.adapters.megatron_core.groups import megatron_mesh
from megatron_flex.adapters.megatron_core.module_classes import MODEL_CLASSES, global_modules, is_megatron, unwrap_model, wrappers_around
from megatron_flex.adapters.megatron_core.parameters import parameters_of, parameters_without_layout
from megatron_flex.adapters.megatron_core.running import read_architecture, run_forward
from megatron_flex.adapters.megatron_core.schedule import watch_schedules
from megatron_flex.adapters.megatron_core.sites import sites_of
from megatron_flex.adapters.megatron_core.ssm_layers import refuse_context_parallel
from megatron_flex.errors import FlexError
from megatron_flex.sites import Site

# Settings under which which rank holds what is not settled by the mesh, and what to do instead.
HYBRID_CONTEXT = (
    "gives each batch another context parallel group, so that no layout holds for a whole run; "
    "use plain context parallelism (--context-parallel-size without this switch)"
)
WEIGHT_SHARDS = (
    "shards weights beyond tensor parallelism, and how is not known here; "
    "set it to 1 and tensor_parallel_num_weight_shards to the tensor parallel size"
)
UNSUPPORTED_SETTINGS = {
    "hybrid_context_parallel": (False, HYBRID_CONTEXT),
    "dynamic_context_parallel": (False, HYBRID_CONTEXT),  # what releases after 0.19 call it
    "gtp_weight_remat_size": (1, WEIGHT_SHARDS),
    "expert_gtp_weight_remat_size": (1, WEIGHT_SHARDS),
}


class MegatronAdapter:
    """megatron-core's view of a model, given as its chunks, wrapped or not."""

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
        graphs = getattr(config, "cuda_graph_impl", "none") or "none"
        if graphs != "none" or any(
            getattr(config, n, False) for n in ("enable_cuda_graph", "external_cuda_graph")
        ):
            raise FlexError(
                f"CUDA graphs are on (cuda_graph_impl={graphs!r}) and replay kernels without any hook; "
                "train with --cuda-graph-impl none (older: without --enable-cuda-graph)"
            )
        for root in self.roots:
            refuse_context_parallel(root, config.context_parallel_size)
        for name, (harmless, why) in UNSUPPORTED_SETTINGS.items():
            value = getattr(config, name, harmless)
            if value not in (None, harmless):
                raise FlexError(f"{name}={value} {why}")
        if getattr(config, "overlap_moe_expert_parallel_comm", False):
            raise FlexError(
                "overlap_moe_expert_parallel_comm=True runs forward and backward of different microbatches "
                "merged, past the modules that hooks stand on; turn it off"
            )

    def parts(self) -> list[Part]:
        """What is around the chunks, and Megatron's schedules."""
        around = [Part(type(w).__name__, "it is around the model") for w in wrappers_around(self.chunks[0])]
        return [*around, Part("Megatron's schedules", "they call the chunks, or a loop of one's own does")]

    def module_names(self) -> list[str]:
        """The modules of all chunks on this rank, layers counted over the whole model."""
        return [name for root in self.roots for name, _ in global_modules(root)]

    def sites(self) -> list[Site]:
        """The sites of all chunks on this rank."""
        chunks = enumerate(self.roots)
        return [replace(s, chunk=i) for i, root in chunks for s in sites_of(root, self.mesh)]

    def parameters(self) -> list[ParameterSite]:
        """The parameters of all chunks on this rank that belong to modules with a known layout."""
        chunks = enumerate(self.roots)
        return [replace(p, chunk=i) for i, root in chunks for p in parameters_of(root, self.mesh)]

    def without_layout(self) -> dict[str, str]:
        """The other parameters of all chunks on this rank."""
        return {name: kind for root in self.roots for name, kind in parameters_without_layout(root, self.mesh).items()}

    def lengths(self) -> dict[str, int]:
        """The lengths of sequence and microbatch, as far as `megatron.training` was given them."""
        state = sys.modules.get("megatron.training.global_vars")
        args = getattr(state, "_GLOBAL_ARGS", None)
        found = {"s": getattr(args, "seq_length", None), "b": getattr(args, "micro_batch_size", None)}
        if getattr(args, "variable_seq_lengths", False):
            found["s"] = None
        return {name: length for name, length in found.items() if isinstance(length, int)}

    def settle(self) -> None:
        """Wait for the parameters that the distributed optimizer gathers while the model runs."""
        self._gradients.gather_parameters()

    def gradients_reduced(self, called: bool = False) -> bool | str:
        """Whether the schedule finalizes gradients at its end."""
        return self._gradients.reduced(called)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """`main_grad` where Megatron keeps it, `grad` otherwise."""
        return self._gradients.of(parameter, reduced)

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Each rank has all of its own."""
        return parameter.detach()

    def shares(self, name: str) -> tuple[str, ...]:
        """None: layouts name them, and Megatron adds them up."""
        return ()

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into it."""
        with torch.no_grad():
            parameter.copy_(value)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write where Megatron keeps it."""
        found = self._gradients.of(parameter, reduced).tensor
        if found is None:
            parameter.grad = torch.zeros_like(parameter)
            found = parameter.grad
        with torch.no_grad():
            found.copy_(value)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off, and let DistributedDataParallel wait for no gradient."""
        return freeze_parameters(self.roots, self._gradients.wrappers)

    def open_recomputed(self) -> Undo:
        """Let what enters the layers require a gradient, where some are recomputed."""
        return open_recomputed_regions(self.roots)

    def architecture(self) -> Architecture | None:
        """Of a GPT or hybrid model."""
        return read_architecture(self.roots[0])

    def run(self, tokens: Tensor, microbatch_size: int | None = None) -> None:
        """Run the model forward by Megatron's schedule, after what the distributed optimizer left to do."""
        self.settle()
        run_forward(self.chunks, self.roots[0], self.mesh, tokens, microbatch_size)

    def watch(self, listener: Listener) -> Undo:
        """Follow Megatron's schedules, and calls of the model outside them."""
        return watch_schedules(self.roots, self.mesh["cp"].size, listener)


def make_megatron_adapter(chunks: list[nn.Module]) -> MegatronAdapter | None:
    """An adapter, if every chunk is a model of Megatron's."""
    known = bool(chunks) and all(is_megatron(unwrap_model(c), *MODEL_CLASSES) for c in chunks)
    return MegatronAdapter(chunks) if known else None
