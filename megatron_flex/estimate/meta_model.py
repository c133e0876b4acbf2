"""The real model of every pipeline stage, on meta tensors, and the sites that the real adapter finds in it.

One rank's view of a world that has just the axes that layouts name; pipeline stages are laid over it one
after the other, and of layers that are built alike only the first is asked for its sites.
"""

from __future__ import annotations

import argparse
import io
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec, module_from_spec
from math import gcd
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megatron_flex.adapters import Adapter, ParameterSite, detect
from megatron_flex.errors import FlexError
from megatron_flex.estimate.megatron_arguments import translate_megatron_errors
from megatron_flex.estimate.shape_only_layers import use_shape_only_layers
from megatron_flex.mesh import Mesh, mesh_of_sizes
from megatron_flex.progress import track
from megatron_flex.sites import Site, model_order

SiteOrParameter = TypeVar("SiteOrParameter", Site, ParameterSite)


@dataclass
class ModelDescription:
    """What all ranks together have.

    Attributes:
        mesh: of the run.
        sites: of all stages, in model order.
        parameters: likewise.
        config: Megatron's TransformerConfig.
        padded_vocabulary: the length of the logits' last dim, with its padding.
        layers: how many decoder layers each stage has.
    """

    mesh: Mesh
    config: Any
    padded_vocabulary: int = 0
    sites: list[Site] = field(default_factory=list)
    parameters: list[ParameterSite] = field(default_factory=list)
    layers: dict[int, int] = field(default_factory=dict)


@contextmanager
def silence_megatron() -> Iterator[None]:
    """Without what Megatron prints, warns and logs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def describe_model(args: argparse.Namespace) -> ModelDescription:
    """Build every stage of the model and ask the adapter.

    Raises:
        FlexError: this process has process groups already; Megatron or the adapter refuses the configuration.
    """
    with (
        _open_fake_groups(args) as groups,
        use_shape_only_layers(),
        translate_megatron_errors(),
        _set_global_arguments(args),
    ):
        from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

        make = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
        settings = make(args)
        if args.hybrid_layer_pattern is not None:
            settings.hybrid_stack_spec = settings.hybrid_stack_spec or _load_hybrid_spec()
        elif args.transformer_impl == "local":
            _use_local_attention(settings, args)
        model = ModelDescription(build_mesh(args), settings.transformer)
        collector = _SiteCollector(model)
        stages = range(args.pipeline_model_parallel_size)
        for stage in track(stages, "building the model's stages", unit="stages"):
            _impersonate_stage(stage, args.pipeline_model_parallel_size, groups)
            for chunk in range(args.virtual_pipeline_model_parallel_size or 1):
                collector.add(_build_chunk(settings, groups, args, chunk), stage, chunk)
        model.sites.sort(key=model_order)
        model.parameters.sort(key=model_order)
        return model


def build_mesh(args: argparse.Namespace) -> Mesh:
    """The axes of the run that the arguments describe, as its first rank sees them; no group is made."""
    dense = {
        "pp": args.pipeline_model_parallel_size,
        "dp": args.data_parallel_size,
        "cp": args.context_parallel_size,
        "tp": args.tensor_model_parallel_size,
    }
    inside = dense["dp"] * dense["cp"] * dense["tp"]
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    return mesh_of_sizes(dense, {"edp": inside // (ep * etp), "ep": ep, "etp": etp})


# -- one rank's world --------------------------------------------------------------------------------


@contextmanager
def _open_fake_groups(args: argparse.Namespace) -> Iterator[Any]:
    """Megatron's groups of a small world in which nothing is ever sent.

    Yields:
        The collection of groups that models are given.
    """
    if dist.is_initialized():
        raise FlexError("this process has process groups already; make an estimate in a process of its own")
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    inside = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    world = inside * experts // gcd(inside, experts)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1)
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _impersonate_stage(stage: int, stages: int, groups: Any) -> None:
    """Be a rank of that pipeline stage, for all who ask the group or Megatron's state."""
    from megatron.core import parallel_state
    from torch._C._distributed_c10d import FakeProcessGroup

    parallel_state.set_pipeline_model_parallel_world_size(stages)
    parallel_state.set_pipeline_model_parallel_rank(stage)
    if stages == 1:
        return
    group: Any = FakeProcessGroup._create_internal(stage, stages)
    # Who asks torch for a rank's place in a group is answered out of this table; this process is rank 0.
    others = [-1 - n for n in range(stages)]
    members = [0 if n == stage else others[n] for n in range(stages)]
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: n for n, rank in enumerate(members)}
    groups.pp = group


@contextmanager
def _set_global_arguments(args: argparse.Namespace) -> Iterator[None]:
    """Where Megatron keeps a run's arguments, and adapters find the vocabulary."""
    from megatron.training import global_vars

    before = global_vars._GLOBAL_ARGS
    global_vars._GLOBAL_ARGS = args
    try:
        yield
    finally:
        global_vars._GLOBAL_ARGS = before


def _build_chunk(settings: Any, groups: Any, args: argparse.Namespace, chunk: int) -> Any:
    from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
    from megatron.core.transformer.module import Float16Module

    chunks = args.virtual_pipeline_model_parallel_size
    builder = settings.get_builder_cls()(settings)
    with torch.device("meta"):
        root = builder.build_model(
            groups,
            pre_process=chunk == 0 and is_pp_first_stage(groups.pp),
            post_process=chunk == (chunks or 1) - 1 and is_pp_last_stage(groups.pp),
            vp_stage=chunk if chunks else None,
        )
    if args.fp16 or args.bf16:
        Float16Module(settings.transformer, root)  # casts the parameters, as Megatron's launcher does
    return root


def _load_hybrid_spec() -> Any:
    """Megatron's own spec of a hybrid stack, which names classes as they are when its module is run."""
    source = find_spec("megatron.core.models.hybrid.hybrid_layer_specs")
    assert source is not None, "megatron-core 0.19 has it"
    assert source.loader is not None, "it is a file"
    module = module_from_spec(source)
    source.loader.exec_module(module)
    return module.hybrid_stack_spec


def _use_local_attention(settings: Any, args: argparse.Namespace) -> None:
    """Use local attention where a run with context parallelism would have its own kind of attention."""
    if args.context_parallel_size == 1:
        return
    from megatron.training.models.gpt import default_layer_spec

    def spec(config: Any, vp_stage: int | None) -> Any:
        layer_spec = default_layer_spec(config, vp_stage)
        for layer in getattr(layer_spec, "layer_specs", None) or [layer_spec]:
            parts = layer.submodules.self_attention.submodules
            parts.core_attention = partial(_build_local_attention, parts.core_attention)
        return layer_spec

    if args.spec is None:
        settings.transformer_layer_spec = spec


def _build_local_attention(
    make: Callable[..., nn.Module], config: Any, *args: Any, **kwargs: Any
) -> nn.Module:
    """Megatron's own attention, which refuses context parallelism, has the same tensors."""
    from copy import copy

    single = copy(config)
    single.context_parallel_size = 1
    return make(single, *args, **kwargs)


# -- sites -------------------------------------------------------------------------------------------


class _SiteCollector:
    """Collects what each chunk has; layers that are built alike have alike sites."""

    def __init__(self, model: ModelDescription) -> None:
        self.model = model
        self._kinds: dict[Hashable, tuple[list[Site], list[ParameterSite]]] = {}

    def add(self, root: Any, stage: int, chunk: int) -> None:
        """Add the sites and parameters of a chunk, which loses layers by it."""
        layers = list(root.decoder.layers)
        layers_by_stage = self.model.layers
        layers_by_stage[stage] = layers_by_stage.get(stage, 0) + len(layers)
        vocabulary = getattr(root, "vocab_size", 0)
        self.model.padded_vocabulary = max(self.model.padded_vocabulary, vocabulary)
        kinds = [(layer.layer_number - 1, _layer_signature(layer)) for layer in layers]
        new: dict[Hashable, int] = {}
        for index, (_, kind) in enumerate(kinds):
            if kind not in self._kinds:
                new.setdefault(kind, index)
        root.decoder.layers = nn.ModuleList([layers[index] for index in new.values()])
        adapter = self._adapter(root, stage)
        sites, parameters = adapter.sites(), [*adapter.parameters(), *adapter.buffers()]
        for kind, index in new.items():
            front = f"decoder.layers.{kinds[index][0]}"
            self._kinds[kind] = _select_layer(sites, front), _select_layer(parameters, front)
        fixed = "decoder.layers."
        self.model.sites += [_move_to_stage(s, stage, chunk) for s in sites if not s.name.startswith(fixed)]
        self.model.parameters += [
            _move_to_stage(p, stage, chunk) for p in parameters if not p.name.startswith(fixed)
        ]
        for number, kind in kinds:
            of_sites, of_parameters = self._kinds[kind]
            front = f"{fixed}{number}"
            self.model.sites += [_move_to_stage(s, stage, chunk, front) for s in of_sites]
            self.model.parameters += [_move_to_stage(p, stage, chunk, front) for p in of_parameters]

    def _adapter(self, root: Any, stage: int) -> Adapter:
        adapter = detect([root])
        mesh = self.model.mesh
        axes = tuple(replace(a, coord=stage) if a.name == "pp" else a for a in mesh.axes)
        adapter.mesh = replace(mesh, axes=axes)
        adapter.check()
        return adapter


def _layer_signature(layer: nn.Module) -> Hashable:
    """What layers with alike sites have in common: the classes and the shapes of parameters."""
    return tuple(
        (path, type(m).__qualname__, tuple((n, tuple(p.shape)) for n, p in m.named_parameters(recurse=False)))
        for path, m in layer.named_modules()
    )


def _select_layer(sites: list[SiteOrParameter], front: str) -> list[SiteOrParameter]:
    """The sites or parameters of one layer, named by the rest of their names."""
    return [
        replace(p, name=p.name[len(front) :]) for p in sites if p.name.startswith((front + ".", front + ":"))
    ]


def _move_to_stage(site: SiteOrParameter, stage: int, chunk: int, front: str = "") -> SiteOrParameter:
    return replace(site, name=front + site.name, stage=stage, chunk=chunk)
