"""The adapter: one object for one model, or for a module that holds several of Megatron's, and its mesh.

The mesh is read from Megatron's own process groups; none is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import (
    Adapter,
    Architecture,
    LayerStack,
    Listener,
    ParameterSite,
    Part,
    Undo,
    make_buffer_site,
    training_argument,
)
from megatron_flex.adapters.differentiation import activations_require_gradients
from megatron_flex.adapters.early_stop import pass_by, refuse_compiled
from megatron_flex.adapters.megatron_core.auxiliary_modules import AuxiliaryModules
from megatron_flex.adapters.megatron_core.backward_pass import BackwardResult, run_backward
from megatron_flex.adapters.megatron_core.forward_run import (
    OutputGradient,
    count_sequence_parts,
    run_forward,
)
from megatron_flex.adapters.megatron_core.model_architecture import DECODERS, read_architecture
from megatron_flex.adapters.megatron_core.model_parts import (
    ModelPart,
    main_part,
    parts_of,
    refuse_other_groups,
)
from megatron_flex.adapters.megatron_core.model_sites import (
    parameters_of,
    parameters_without_layout,
    sites_of,
)
from megatron_flex.adapters.megatron_core.module_classes import (
    global_modules,
    is_megatron,
    is_megatron_class,
    unwrap_model,
    wrappers_around,
)
from megatron_flex.adapters.megatron_core.parameter_gradients import (
    MegatronParameters,
    open_recomputed_regions,
)
from megatron_flex.adapters.megatron_core.schedules import read_loss_scale, watch_schedules
from megatron_flex.adapters.megatron_core.ssm_layers import refuse_context_parallel
from megatron_flex.adapters.megatron_core.unsupported_settings import refuse_settings, refuse_wrappers
from megatron_flex.adapters.model_calls import is_compiled
from megatron_flex.adapters.module_walk import list_buffer_owners, walk_modules
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.sharded_ddp import sharded_ddp_wrappers_of
from megatron_flex.adapters.taps import join_undos
from megatron_flex.errors import FlexError
from megatron_flex.gpt_names import GPT_FINAL_NORM, HYBRID_FINAL_NORM
from megatron_flex.layout import Layout
from megatron_flex.mesh import Axis, Mesh
from megatron_flex.sites import Site

# From the outermost to the innermost, in the usual order; for display and counting only.
LAYER = "TransformerLayer"
ROUTER_BIASES = ("expert_bias", "qb_beta")  # updated once a step from the tokens of all ranks
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
    dense = tuple(_axis(name, _find_group(root, name)) for name in DENSE_GETTERS)
    return Mesh(dense, tuple(_axis(name, _find_group(root, name)) for name in EXPERT_GETTERS))


def _find_group(root: nn.Module, name: str) -> Any:
    """The process group of an axis: the one that the modules were made with; else the global one."""
    if name == "tp":
        for module in walk_modules(root).of_classes(_is_parallel_linear):
            group = None if getattr(module, "is_expert", False) else getattr(module, "tp_group", None)
            if group is not None:
                return group
    models = [root, *(part.module for part in parts_of(root))]
    for holder in (*models, *(getattr(model, "decoder", None) for model in models)):
        for collection in ("pg_collection", "model_comm_pgs"):
            group = getattr(getattr(holder, collection, None), COLLECTION_NAMES.get(name, name), None)
            if group is not None:
                return group
    from megatron.core import parallel_state

    return getattr(parallel_state, GETTERS[name])() if parallel_state.is_initialized() else None


def _is_parallel_linear(kind: type) -> bool:
    return is_megatron_class(kind, "ColumnParallelLinear", "RowParallelLinear")


def _axis(name: str, group: Any) -> Axis:
    if group is None or dist.get_world_size(group) == 1:
        return Axis(name, ranks=(dist.get_rank(),))
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(name, len(ranks), dist.get_rank(group), group, ranks)


class MegatronRunner:
    """Megatron's schedules over the chunks, or the user's own loop.

    Args:
        chunks: this rank's chunks, wrapped or not.
        roots: the modules inside their wrappers.
        mesh: the axes of the run.
        storage: what holds the parameters, which a run waits for.
    """

    name = "Megatron's schedules"
    why = "they call the chunks, or your own loop does"

    def __init__(
        self, chunks: list[nn.Module], roots: list[nn.Module], mesh: Mesh, storage: MegatronParameters
    ) -> None:
        self._chunks, self._roots, self._mesh, self._storage = chunks, roots, mesh, storage

    @property
    def length_multiple(self) -> int:
        """Of the parts that context and sequence parallelism divide a sequence into."""
        return count_sequence_parts(self._roots[0], self._mesh)

    def watch(self, listener: Listener) -> Undo:
        """Trace Megatron's schedules, and calls of the model outside them."""
        return watch_schedules(self._roots, self._mesh["cp"].size, listener)

    def run(self, prompts: Prompts, microbatch_size: int | None) -> None:
        """Run the model forward by Megatron's schedule, after pending work of the distributed optimizer."""
        self._storage.wait_until_ready()
        run_forward(self._chunks, self._roots, self._mesh, prompts, microbatch_size)

    def run_backward(self, tokens: Tensor, labels: Tensor, counted: Tensor) -> BackwardResult:
        """Run one forward and backward pass; see `backward_pass.run_backward`."""
        self._storage.wait_until_ready()
        model = self._chunks, self._roots[0], self._mesh, self._storage
        return run_backward(*model, tokens, labels, counted)


class MegatronAdapter(Adapter):
    """The adapter of a megatron-core model, given as its chunks, wrapped or not.

    Attributes:
        roots: of each chunk, the module inside its wrappers: a model of Megatron's, or one that holds some.
        model_parts: of each chunk, Megatron's models in it.
        auxiliary: of each chunk, the modules besides them.
    """

    name = "megatron-core"
    storage: MegatronParameters

    def __init__(self, chunks: list[nn.Module]) -> None:
        self.chunks, self.roots = chunks, [unwrap_model(c) for c in chunks]
        self.model_parts = [parts_of(root) for root in self.roots]
        main = main_part(self.roots[0])
        head = "lm_head." if is_megatron(main.module, "T5Model") else ""
        self.logits = f"{main.prefix}{head}output_layer:output"
        self.mesh = megatron_mesh(self.roots[0])
        self.prefix = next(f"{n}." if n else "" for n, m in chunks[0].named_modules() if m is self.roots[0])
        self.storage = MegatronParameters(chunks, self.roots)
        self.runner = MegatronRunner(chunks, self.roots, self.mesh, self.storage)
        pairs = zip(self.roots, self.model_parts, strict=True)
        self.auxiliary = [AuxiliaryModules(root, parts) for root, parts in pairs]

    @property
    def why(self) -> str:
        """The evidence that the model is Megatron's, as text."""
        kinds = dict.fromkeys(type(part.module).__name__ for parts in self.model_parts for part in parts)
        is_one = not self.model_parts[0][0].path
        return f"it {'is' if is_one else 'holds'} a {' and a '.join(kinds)} of Megatron's"

    def check_is_one_model(self, what: str) -> None:
        """Refuse a module that holds Megatron's models.

        Args:
            what: the purpose for which the model's names must be those of one model, as text.

        Raises:
            FlexError: it holds some.
        """
        part = self.model_parts[0][0]
        if part.path:
            raise FlexError(
                f"{what} is for one model of Megatron's, and {type(self.roots[0]).__name__} holds a "
                f"{type(part.module).__name__} as {part.path!r}; give FlexModel that"
            )

    def _by_chunk(self) -> Iterator[tuple[int, nn.Module, list[ModelPart], AuxiliaryModules]]:
        yield from zip(count(), self.roots, self.model_parts, self.auxiliary)

    def check(self) -> None:
        """Refuse what cannot be hooked: graphs replay kernels, and merged passes skip the modules."""
        for parts in self.model_parts:
            for part in parts:
                refuse_settings(part.module.config)
                refuse_context_parallel(part.module, part.module.config.context_parallel_size)
            refuse_other_groups(parts, self.mesh)
        refuse_wrappers(w for chunk in self.chunks for w in wrappers_around(chunk))
        if any(sharded_ddp_wrappers_of(chunk) for chunk in self.chunks):
            raise FlexError(
                "fairscale's ShardedDataParallel is around a model of Megatron's, whose gradients it reduces "
                "to one rank each; use Megatron's own DistributedDataParallel, use_distributed_optimizer=True"
            )

    def parts(self) -> list[Part]:
        """The wrappers of the chunks, and Megatron's schedules."""
        around = [Part(type(w).__name__, "it is around the model") for w in wrappers_around(self.chunks[0])]
        return [*around, Part(self.runner.name, self.runner.why)]

    def module_names(self) -> list[str]:
        """The modules of all chunks on this rank, with global layer numbers."""
        return [name for root in self.roots for name, _ in global_modules(root)]

    def sites(self) -> list[Site]:
        """The sites of all chunks on this rank."""
        sites: list[Site] = []
        for chunk, _, parts, auxiliary in self._by_chunk():
            chunk_sites = [s for part in parts for s in part.named(sites_of(part.module, self.mesh))]
            chunk_sites = [*auxiliary.traced(chunk_sites, self.mesh), *auxiliary.sites(self.mesh)]
            sites += [replace(s, chunk=chunk) for s in chunk_sites] if chunk else chunk_sites
        return sites

    def parameters(self) -> list[ParameterSite]:
        """The parameters of all chunks on this rank that belong to modules with a known layout."""
        parameters: list[ParameterSite] = []
        for chunk, _, parts, auxiliary in self._by_chunk():
            chunk_parameters = [
                p for part in parts for p in part.named(parameters_of(part.module, self.mesh))
            ]
            chunk_parameters += auxiliary.parameters(self.mesh)
            parameters += [replace(p, chunk=chunk) for p in chunk_parameters] if chunk else chunk_parameters
        return parameters

    def without_layout(self) -> dict[str, str]:
        """The other parameters of all chunks on this rank."""
        return {
            f"{part.prefix}{name}": kind
            for _, _, parts, auxiliary in self._by_chunk()
            for part in parts
            for name, kind in parameters_without_layout(part.module, self.mesh).items()
            if not auxiliary.has(f"{part.prefix}{name}")
        }

    def buffers(self) -> list[ParameterSite]:
        """The routers' biases; other buffers count a rank's tokens, or are derived from the configuration."""
        return [
            replace(make_buffer_site(f"{name}.{attribute}", bias, self.mesh), chunk=chunk)
            for chunk, root in enumerate(self.roots)
            for name, module in global_modules(root)
            if module._buffers
            for attribute in ROUTER_BIASES
            if (bias := module._buffers.get(attribute)) is not None
        ]

    def buffer_owners(self) -> dict[str, str]:
        """The buffers of all chunks on this rank, with global layer numbers."""
        return list_buffer_owners([named for root in self.roots for named in global_modules(root)])

    def lengths(self) -> dict[str, int]:
        """The lengths of sequence and microbatch, if they are set in `megatron.training`."""
        lengths = {"s": training_argument("seq_length"), "b": training_argument("micro_batch_size")}
        if training_argument("variable_seq_lengths"):
            lengths["s"] = None
        return {name: length for name, length in lengths.items() if isinstance(length, int)}

    def gradient_partial_axes(self, name: str) -> tuple[str, ...] | None:
        """Empty for the model itself, whose layouts name these axes; else what a traced call showed."""
        auxiliary = next((f for f in self.auxiliary if f.has(name)), None)
        return () if auxiliary is None else auxiliary.gradient_partial_axes(name, self.mesh)

    def enable_recomputed_gradients(self) -> Undo:
        """Make the input of the layers require a gradient, where some are recomputed."""
        return open_recomputed_regions(self.roots)

    def architecture(self) -> Architecture | None:
        """The properties of a GPT or hybrid model."""
        return read_architecture(self.roots[0])

    def differentiate(
        self, prompts: Prompts, microbatch_size: int | None, gradient: Tensor, layout: Layout
    ) -> None:
        self.storage.wait_until_ready()
        model = self.chunks, self.roots, self.mesh
        with self.storage.activations_only(), activations_require_gradients(self.roots):
            run_forward(*model, prompts, microbatch_size, OutputGradient(gradient, layout))

    def layer_stack(self) -> LayerStack:
        """The decoder's layers, over all stages."""
        root: Any = self.roots[0]
        if not is_megatron(root, *DECODERS):
            return super().layer_stack()
        if getattr(root.config, "mtp_num_layers", None):
            raise FlexError(
                f"stop_at_layer: the layers of mtp_num_layers={root.config.mtp_num_layers} take their input "
                "from the last layer; run this model without stop_at_layer"
            )
        refuse_compiled((module for chunk in self.chunks for module in chunk.modules()), is_compiled)
        return LayerStack("decoder.layers", "embedding:output")

    def stop_at(self, layer: int) -> Undo:
        """Pass by layers, the final norm and the output layer, on the stages that have them."""
        undos: list[Undo] = []
        for path, module in (named for root in self.roots for named in global_modules(root)):
            stack, _, number = path.rpartition(".")
            if stack == "decoder.layers" and int(number) >= layer:
                undos.append(pass_by(module, _layer_result if is_megatron(module, LAYER) else _stream))
            elif path in (GPT_FINAL_NORM, HYBRID_FINAL_NORM):
                undos.append(pass_by(module, _stream))
            elif path == "output_layer":
                undos.append(pass_by(module, _linear_result))
        return join_undos(undos)

    def loss_scale(self) -> float:
        """The scale of Megatron's gradient scaler, by which its schedule multiplies a loss."""
        return read_loss_scale(self.roots)

    def watch(self, listener: Listener) -> Undo:
        """Trace Megatron's schedules, calls of the model outside them, and layouts of further modules."""
        undos = [self.runner.watch(listener), *(auxiliary.watch(self.mesh) for auxiliary in self.auxiliary)]
        return join_undos(undos[::-1])


def _stream(stream: Tensor) -> Tensor:
    return stream


def _layer_result(stream: Tensor) -> tuple[Tensor, None]:
    """Of a TransformerLayer, with the context of cross attention."""
    return stream, None


def _linear_result(stream: Tensor) -> tuple[Tensor, None]:
    """Of a parallel linear, with the bias that its caller adds."""
    return stream, None


def make_megatron_adapter(chunks: list[nn.Module]) -> MegatronAdapter | None:
    """An adapter, if every chunk is a Megatron model or holds one."""
    known = bool(chunks) and all(parts_of(unwrap_model(c)) for c in chunks)
    return MegatronAdapter(chunks) if known else None
