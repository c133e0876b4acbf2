"""The adapter of any tree of modules, composed of three parts.

Layout rules for a framework's parallel modules, the parameter storage, and the caller of the model. A new
framework usually needs one of them; `compose` detects the other two around a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from megatron_flex.adapters import data_parallel, dtensor_parameters, huggingface, sharded_ddp
from megatron_flex.adapters.adapter_base import (
    Adapter,
    Architecture,
    LayerStack,
    Listener,
    ParameterSite,
    Undo,
    make_buffer_site,
)
from megatron_flex.adapters.differentiation import activations_require_gradients
from megatron_flex.adapters.early_stop import ModuleStop, find_stack, refuse_compiled
from megatron_flex.adapters.huggingface_decoders import find_inner_points, read_huggingface_architecture
from megatron_flex.adapters.layout_rules import NoRules, Rule, Rules, Spread
from megatron_flex.adapters.model_calls import (
    CompiledCaller,
    CompiledRegion,
    ModelRunner,
    UserLoop,
    compiled_regions,
    is_compiled,
    uncompiled,
)
from megatron_flex.adapters.module_names import (
    ROOT,
    further_names,
    has_forward,
    named_modules,
    strip_wrapper_names,
    unwrap,
)
from megatron_flex.adapters.module_walk import list_buffer_owners, shared_walk
from megatron_flex.adapters.named_inputs import find_named_models
from megatron_flex.adapters.parameter_storage import ModuleParameters
from megatron_flex.adapters.prompts import Prompts
from megatron_flex.adapters.taps import any_input, any_output, join_undos, outside_propagation, with_layouts
from megatron_flex.collectives import gather_objects
from megatron_flex.errors import FlexError
from megatron_flex.layout import Dim, Layout, full_shape
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site, Tap

if TYPE_CHECKING:
    from megatron_flex.adapters.propagation import LayoutPropagator, PropagatedParameter
    from megatron_flex.adapters.propagation.layout_propagation import PropagatedNames


class ModuleAdapter(Adapter):
    """One module on each rank, whose submodules are the hook points.

    Args:
        chunk: the module as it was given, with wrappers.
        mesh: the axes of the run.
        rules: the rules of its framework's parallel modules; None where the user declares shapes.
        storage: the parameter storage; the modules themselves if None.
        runner: the caller; the user's loop if None.
        name: the framework's name.
    """

    def __init__(
        self,
        chunk: nn.Module,
        mesh: Mesh,
        rules: Rules | None = None,
        storage: ModuleParameters | None = None,
        runner: ModelRunner | None = None,
        name: str = "plain",
    ) -> None:
        self.name, self.mesh, self.root = name, mesh, unwrap(chunk)
        self._chunk = chunk
        self.rules: Rules = rules or NoRules()
        self.prefix = next(f"{n}." if n else "" for n, m in chunk.named_modules() if m is self.root)
        self._named = list(named_modules(self.root))
        self._aliases = further_names(self.root)
        self.rename(ROOT if mesh["pp"].size == 1 else f"stage{mesh['pp'].coord}")
        self._known = {m: r for n, m in self._named if (r := self.rules.find_rule(n, m)) is not None}
        self.storage: ModuleParameters = storage or ModuleParameters(self.root)
        self.runner: ModelRunner = runner or UserLoop(chunk, mesh)
        self._compiled = compiled_regions(chunk, self.root)
        self._inner = find_inner_points(self.root)
        follow = rules is not None and any(mesh[a].size > 1 for a in ("tp", "cp"))
        placing = {m: r for m, r in self._known.items() if r.has_activations}
        self.propagator = _make_propagator(self.root, placing, mesh) if follow else None
        self._names = self.propagator
        if self.propagator is None and find_named_models(self.root):
            self._names = _make_propagator(self.root, {}, mesh, self._compiled)
        # Parameters whose partial gradients are declared by a layout or a module, without tracing a call.
        owned = (f"{n}.{key}" for n, m in self._named if m in placing for key in m._parameters)
        with_layout = (k.name for k in self.storage.parameters() if k.layout is not None)
        self._gradient_layout_known = {*owned, *with_layout, *self._layouts()}
        # Parameters whose gradients a module sums over tensor parallel ranks after the backward pass.
        sums = getattr(self.rules, "sums_gradients", None)
        summing = ((n, m) for n, m in self._named if sums is not None and sums(m))
        self._summed = {f"{n}.{key}" if n else key for n, m in summing for key in m._parameters}

    def rename(self, name: str) -> None:
        """Give the outermost module a name."""
        self._root_name, self.logits = name, f"{name}:output"
        self._modules = list(self._callable())

    def _callable(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that can be called, by name."""
        name_in_use = any(n == self._root_name for n, _ in self._named)  # a part has that name
        for name, module in self._named:
            if has_forward(module) and not (name_in_use and not name):
                yield name or self._root_name, module

    def layer_stack(self) -> LayerStack:
        """The layers of a known decoder, or the module's one list of layers."""
        if self.mesh["pp"].size > 1:
            return super().layer_stack()
        refuse_compiled(self._chunk.modules(), is_compiled)
        return LayerStack(strip_wrapper_names(self._stack_path()), "")

    def stop_at(self, layer: int) -> Undo:
        return ModuleStop(self.root, self._stack_path(), layer).undo

    def differentiate(
        self, prompts: Prompts, microbatch_size: int | None, gradient: Tensor, layout: Layout
    ) -> None:
        runner = self.runner
        if not isinstance(runner, UserLoop) or self.mesh["pp"].size > 1:
            super().differentiate(prompts, microbatch_size, gradient, layout)
            return
        unfreeze = self.storage.freeze()
        try:
            with activations_require_gradients([self.root]):
                runner.run(prompts, microbatch_size, gradient)
        finally:
            unfreeze()

    def _stack_path(self) -> str:
        """The path of the layers in the module, with the names of wrappers."""
        known = self.architecture()
        if known is None:
            return find_stack(self.root)
        paths: list[str] = [path for path, _ in self.root.named_modules()]
        return paths[[strip_wrapper_names(path) for path in paths].index(known.paths.layers)]

    def module_names(self) -> list[str]:
        """All modules, also those that only hold others; the outermost has an empty name."""
        return [name for name, _ in self._named]

    def check(self) -> None:
        """Refuse code that runs without its modules, and stages with the same names. Collective over `pp`."""
        self.check_modules()
        check_names_distinct([self.names()], self.mesh)

    def check_modules(self) -> None:
        """Refuse code that runs without its modules."""
        for name, module in self.root.named_modules():
            kind = type(module).__name__
            if kind == "RecursiveScriptModule":
                raise FlexError(
                    f"{name or ROOT} is a {kind}, compiled code that runs past hooks; give the "
                    "module as it was before torch.jit.script"
                )

    def names(self) -> list[str]:
        """The names of the modules that can be called, and of parameters."""
        return [*(n for n, _ in self._modules), *(k.name for k in self.storage.parameters())]

    # -- sites ------------------------------------------------------------------------------------------

    def sites(self) -> list[Site]:
        """Input and output of every module that can be called, parents first, and the rules' inner points."""
        return [
            replace(
                site,
                tap=self._uncompiled(site.tap, module),
                aliases=self._aliases.get(module, ()),
            )
            for name, module in self._modules
            for site in self._of(name, module)
        ]

    def _uncompiled(self, tap: Tap | None, module: nn.Module) -> Tap | None:
        """The tap adapted to compiled parts; to propagate a layout, all of them run uncompiled."""
        around = [r for r in self._compiled if self.propagator is not None or r.holds(module)]
        return tap.around(uncompiled, tuple(around)) if around and tap is not None else tap

    def _of(self, name: str, module: nn.Module) -> Iterator[Site]:
        rule = self._known.get(module, Rule())
        yield self._site(f"{name}:input", Tap(any_input, module), rule, (rule.inputs,), module)
        for point in rule.points:
            tap = point.tap.around(with_layouts, partial(_constant_spread, point.spread))
            yield self._bare(f"{name}:{point.name}", tap)
        for inner in self._inner.get(module, ()):
            yield self._site(f"{name}:{inner.name}", inner.tap, Rule(hidden=inner.hidden), (None,), None)
        yield self._site(f"{name}:output", Tap(any_output, module), rule, (rule.outputs, *rule.beside), None)

    def _site(
        self, name: str, tap: Tap, rule: Rule, spreads: tuple[Spread | None, ...], gets: nn.Module | None
    ) -> Site:
        if self.propagator is not None:
            tap = self.propagator.tap(name, tap, spreads, gets)
        elif self._names is not None:
            tap = tap.around(outside_propagation, self._names)
        return self._bare(name, tap, rule.hidden)

    def _opened(self, tap: Tap) -> Tap:
        """The tap as the rules adapt it: some tensors have their own layouts."""
        opened = getattr(self.rules, "opened", None)
        return tap if opened is None else cast(Tap, opened(tap))

    def _bare(self, name: str, tap: Tap, hidden: str = "") -> Site:
        follows = self.propagator is not None
        stage, opened = self.mesh["pp"].coord, self._opened(tap)
        site = Site(name, Layout(()), (), stage, hidden, tap=opened, inferred=True, propagated=follows)
        if self._names is None or not self._names.named:
            return site
        return replace(site, names_dims=True, dim_names=make_name_source(self._names, name))

    def architecture(self) -> Architecture | None:
        """The properties of a causal language model of transformers whose family is known."""
        return read_huggingface_architecture(self.root)

    # -- parameters ------------------------------------------------------------------------------------

    def parameters(self) -> list[ParameterSite]:
        """All parameters that have a shape."""
        stage, layouts = self.mesh["pp"].coord, self._layouts()
        out = []
        for stored in self.storage.parameters():
            declared_layout = stored.layout or layouts.get(stored.name)
            layout = declared_layout or Layout(tuple(Dim() for _ in stored.shape))
            shape = full_shape(layout, stored.shape, self.mesh.sizes)
            declared = declared_layout is None and self.propagator is None  # by the user, or not at all
            site = ParameterSite(stored.name, layout, shape, stored.parameter, stage, inferred=declared)
            site = replace(site, hidden=stored.hidden, local=stored.shape, sharded=stored.sharded)
            out.append(replace(site, gradient_layout_source=self._find_propagated(stored.name)))
        return out

    def _layouts(self) -> dict[str, Layout]:
        return {
            f"{name}.{parameter}" if name else parameter: layout
            for name, module in self._named
            if module in self._known
            for parameter, layout in self._known[module].parameters.items()
        }

    def without_layout(self) -> dict[str, str]:
        """The parameters without a shape or a layout."""
        return self.storage.without_layout()

    def buffers(self) -> list[ParameterSite]:
        """Buffers saved in checkpoints; without the running statistics of norms over a rank's samples."""
        return [
            make_buffer_site(
                f"{name}.{key}" if name else key,
                buffer,
                self.mesh,
                inferred=self.propagator is None,
            )
            for name, module in self._named
            if not isinstance(module, _NormBase) or isinstance(module, nn.SyncBatchNorm)
            for key, buffer in module._buffers.items()
            if type(buffer) is Tensor and not buffer.is_meta and key not in module._non_persistent_buffers_set
        ]

    def buffer_owners(self) -> dict[str, str]:
        return list_buffer_owners(self._named)

    def _find_propagated(self, name: str) -> PropagatedParameter | None:
        """Determines the layout of a parameter's gradient, if neither a layout nor a module declares it."""
        if self.propagator is None or name in self._gradient_layout_known:
            return None
        from megatron_flex.adapters.propagation import PropagatedParameter

        return PropagatedParameter(self.propagator, name)

    def gradient_partial_axes(self, name: str) -> tuple[str, ...] | None:
        """For a parameter between parallel modules: the result of tracing a call."""
        if self.propagator is None or name in self._gradient_layout_known or name in self._summed:
            return ()
        return self.propagator.shared.get(name, ()) if self.propagator.calls else None

    def watch(self, listener: Listener) -> Undo:
        """Report steps and calls, and propagate layouts in them."""
        undos = [*(region.watch() for region in self._compiled), self.runner.watch(listener)]
        if self.propagator is not None:
            undos.append(self.propagator.watch())
        return join_undos(undos[::-1])


def check_names_distinct(local_names: list[list[str]], mesh: Mesh) -> None:
    """Refuse a name of several modules. Collective over `pp`.

    Args:
        local_names: the names of each of this rank's chunks.
        mesh: the axes of the run.

    Raises:
        FlexError: there is one.
    """
    first_places: dict[str, tuple[int, int]] = {}
    for stage, chunks in enumerate(gather_objects(local_names, mesh, ["pp"])):
        for chunk, names in enumerate(chunks):
            for name in names:
                first = first_places.setdefault(name, (stage, chunk))
                if first != (stage, chunk):
                    which = "" if first[0] != stage else f", chunks {first[1]} and {chunk},"
                    raise FlexError(
                        f"pipeline stages {first[0]} and {stage}{which} both have a {name!r}; a name must "
                        "identify one hook point: give the modules of each stage different names"
                    )


def _make_propagator(
    root: nn.Module,
    known: Mapping[nn.Module, Rule],
    mesh: Mesh,
    regions: Sequence[CompiledRegion | CompiledCaller] = (),
) -> LayoutPropagator:
    from megatron_flex.adapters.propagation import LayoutPropagator  # most models need none

    return LayoutPropagator(root, known, mesh, regions)


def make_name_source(propagator: LayoutPropagator, site: str) -> PropagatedNames:
    from megatron_flex.adapters.propagation.layout_propagation import PropagatedNames

    return PropagatedNames(propagator, (site, 0))


def _constant_spread(spread: Spread, tensor: Tensor) -> Spread:
    return spread


def find_storage(chunk: nn.Module, root: nn.Module, mesh: Mesh) -> ModuleParameters:
    """The parameter storage of a model: the outermost wrapper that shards or reduces them."""
    if owners := sharded_ddp.sharded_ddp_wrappers_of(chunk):
        sharded_ddp.check_sharded_ddp(owners, chunk, mesh)
        return sharded_ddp.ShardedDDPParameters(root, owners)
    if "deepspeed" in sys.modules:
        from megatron_flex.adapters import deepspeed

        if (zero := deepspeed.find_storage(chunk, root, mesh)) is not None:
            return zero
    if units := data_parallel.fsdp_wrappers_of(chunk):
        return data_parallel.FSDPParameters(root, units)
    if dtensor_parameters.has_dtensors(chunk):
        return dtensor_parameters.DTensorParameters(root, mesh, data_parallel.ddp_wrappers_of(chunk))
    if wrappers := data_parallel.ddp_wrappers_of(chunk):
        return data_parallel.DDPParameters(root, wrappers)
    if "accelerate" in sys.modules and huggingface.is_offloaded(chunk):
        return huggingface.OffloadedParameters(root)
    return ModuleParameters(root)


def find_runner(chunk: nn.Module, mesh: Mesh) -> ModelRunner:
    if "deepspeed" in sys.modules:
        from megatron_flex.adapters import deepspeed

        if (engine := deepspeed.find_runner(chunk, mesh)) is not None:
            return engine
    return UserLoop(chunk, mesh)


def compose(chunk: nn.Module, mesh: Mesh, rules: Rules | None = None, name: str = "plain") -> ModuleAdapter:
    """The adapter of one module with the storage and the caller detected around it.

    Args:
        chunk: the module as it was given, with wrappers.
        mesh: the axes of the run.
        rules: the rules of its framework's parallel modules; None where the user declares shapes.
        name: the framework's name.
    """
    root = unwrap(chunk)
    with shared_walk():  # which modules there are stays, whatever a wrapper does to its parameters
        storage = find_storage(chunk, root, mesh)
    return ModuleAdapter(chunk, mesh, rules, storage, find_runner(chunk, mesh), name)
