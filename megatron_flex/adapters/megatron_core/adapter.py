"""The adapter itself: one object for one model, in front of the rooms beside it."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_flex.adapters.base import Listener, ParameterSite, Undo
from megatron_flex.adapters.megatron_core.groups import mesh_of
from megatron_flex.adapters.megatron_core.kinds import ROOTS, is_a, unwrap
from megatron_flex.adapters.megatron_core.parameters import parameters_of
from megatron_flex.adapters.megatron_core.schedule import watch
from megatron_flex.adapters.megatron_core.sites import sites_of
from megatron_flex.errors import FlexError
from megatron_flex.sites import Site

# Settings under which which rank holds what is not settled by the mesh, and what to do instead.
HYBRID_CONTEXT = (
    "gives each batch another context parallel group, so that no layout holds for a whole run; "
    "use plain context parallelism (--context-parallel-size without this switch)"
)
REMATERIALIZED = (
    "shards weights beyond tensor parallelism, and how is not known here; "
    "set it to 1 and tensor_parallel_num_weight_shards to the tensor parallel size"
)
UNSTEADY = {
    "hybrid_context_parallel": (False, HYBRID_CONTEXT),
    "dynamic_context_parallel": (False, HYBRID_CONTEXT),  # what releases after 0.19 call it
    "gtp_weight_remat_size": (1, REMATERIALIZED),
    "expert_gtp_weight_remat_size": (1, REMATERIALIZED),
}


class MegatronCore:
    """megatron-core's view of a model, given as its unwrapped chunks."""

    name = "megatron-core"

    def __init__(self, roots: list[nn.Module]) -> None:
        self.roots = roots
        self.mesh = mesh_of(roots[0])

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
        for name, (harmless, why) in UNSTEADY.items():
            value = getattr(config, name, harmless)
            if value not in (None, harmless):
                raise FlexError(f"{name}={value} {why}")
        if getattr(config, "overlap_moe_expert_parallel_comm", False):
            raise FlexError(
                "overlap_moe_expert_parallel_comm=True runs forward and backward of different microbatches "
                "merged, past the modules that hooks stand on; turn it off"
            )

    def sites(self) -> list[Site]:
        """The sites of all chunks on this rank."""
        return [s for root in self.roots for s in sites_of(root, self.mesh)]

    def parameters(self) -> list[ParameterSite]:
        """The parameters of all chunks on this rank that belong to modules with a known layout."""
        return [p for root in self.roots for p in parameters_of(root, self.mesh)]

    def watch(self, listener: Listener) -> Undo:
        """Follow Megatron's schedules, and calls of the model outside them."""
        return watch(self.roots, self.mesh["cp"].size, listener)


def detect(chunks: list[nn.Module]) -> MegatronCore | None:
    """An adapter, if every chunk is a model of Megatron's."""
    roots = [unwrap(c) for c in chunks]
    return MegatronCore(roots) if roots and all(is_a(r, *ROOTS) for r in roots) else None
