"""Modules beside Megatron's own in a model: value and reward heads, and wrappers' modules.

No layout is declared for them. Their sites' layouts are propagated through torch's functions, from the
embeddings, stacks of layers and parallel linears of Megatron's around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from megatron_flex.adapters.adapter_base import ParameterSite, Undo
from megatron_flex.adapters.layout_rules import FULL, Rule, Spread
from megatron_flex.adapters.megatron_core.adapted_linears import unadapted
from megatron_flex.adapters.megatron_core.dense_layers import DENSE_PARAMETERS
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.model_parts import EMBEDDING, END, POSITIONS, ModelPart
from megatron_flex.adapters.megatron_core.model_sites import PARTS_WITH_SITES
from megatron_flex.adapters.megatron_core.module_classes import (
    COLUMN_LINEARS,
    ROW_LINEARS,
    is_megatron,
    is_megatrons_own,
    is_megatrons_part,
    is_wrapper,
)
from megatron_flex.adapters.megatron_core.site_builder import KindTable
from megatron_flex.adapters.module_adapter import ModuleAdapter
from megatron_flex.adapters.module_names import named_modules
from megatron_flex.adapters.taps import outside_propagation
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site

NOT_TRACED = "its tensors have sites of their own, and its output's layout is not propagated"
STACKS = ("TransformerBlock", "HybridStack", "MambaStack")
VOCABULARY = "VocabParallelEmbedding"
PARALLEL = (*COLUMN_LINEARS, *ROW_LINEARS, VOCABULARY)
# Children of Megatron's models that are of torch's classes.
TORCH_CHILDREN = ("conv1", "ln_pre", "ln_post", "position_embeddings", "binary_head")
CALLED_DIRECTLY = "ModalitySubmodules"  # Mimo calls the `forward` of these, which calls no hook
LAST_DIM, FIRST_DIM = Spread(cuts=((-1, "tp"),)), Spread(cuts=((0, "tp"),))


class AuxiliaryModules:
    """The modules of one chunk that are not Megatron's.

    Args:
        root: the chunk's module inside its wrappers.
        parts: Megatron's models in it.
    """

    def __init__(self, root: nn.Module, parts: list[ModelPart]) -> None:
        self.root, self.parts = root, parts
        self._adapter: ModuleAdapter | None = None
        self._mesh: Mesh | None = None

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by their paths; not the root, which each pipeline stage has."""
        return dict(self._walk())

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        parts = {part.module for part in self.parts}
        pending: list[tuple[str, nn.Module, bool]] = [("", self.root, self.root in parts)]
        while pending:
            path, module, inside = pending.pop()
            for name, child in module.named_children():
                while is_wrapper(child):
                    child = child.get_submodule("module")
                at = f"{path}.{name}" if path else name
                if child in parts:
                    pending.append((at, child, True))
                elif not inside or not _is_known(name, child):
                    if not is_megatron(child, CALLED_DIRECTLY):
                        yield at, child
                    pending.append((at, child, False))

    @cached_property
    def _names(self) -> frozenset[str]:
        of_modules = (
            (path, name) for path, m in self.modules.items() for name, _ in m.named_parameters(recurse=False)
        )
        # The root's, if it only holds Megatron's models.
        of_root = (
            [] if any(not part.path for part in self.parts) else self.root.named_parameters(recurse=False)
        )
        return frozenset([*(f"{path}.{name}" for path, name in of_modules), *(name for name, _ in of_root)])

    def has(self, name: str) -> bool:
        """Whether a parameter belongs to one of the modules."""
        return name in self._names

    def sites(self, mesh: Mesh) -> list[Site]:
        """Input and output of each of them that can be called."""
        if not self.modules:
            return []
        paths = {inner: outer for outer, inner in self._inner_names.items()}
        with_paths = ((paths.get(s.module), s) for s in self.adapter(mesh).sites())
        return [
            replace(s, name=f"{path}:{s.point}", order=self._order(path))
            for path, s in with_paths
            if path is not None
        ]

    def traced(self, sites: list[Site], mesh: Mesh) -> list[Site]:
        """Sites of Megatron's modules, with taps that keep what hooks do there out of traces."""
        propagator = self.adapter(mesh).propagator if self.modules else None
        if propagator is None:
            return sites
        return [
            s if s.tap is None else replace(s, tap=s.tap.around(outside_propagation, propagator))
            for s in sites
        ]

    def parameters(self, mesh: Mesh) -> list[ParameterSite]:
        if not self._names:
            return []
        inner = {self._inner_name(name): name for name in self._names}
        with_names = ((inner.get(p.name), p) for p in self.adapter(mesh).parameters())
        return [
            replace(p, name=name, order=self._order(name), layout=_over_context(p.layout, mesh))
            for name, p in with_names
            if name is not None
        ]

    @cached_property
    def _inner_names(self) -> dict[str, str]:
        """The names of the modules in the root, with Megatron's wrappers inside of it."""
        names_in_root = {module: name for name, module in named_modules(self.root)}
        return {
            path: names_in_root[module] for path, module in self.modules.items() if module in names_in_root
        }

    def _inner_name(self, parameter: str) -> str:
        path, _, name = parameter.rpartition(".")
        return f"{self._inner_names[path]}.{name}" if path else name

    def _order(self, name: str) -> tuple[int, int]:
        """Behind the part that comes before it in the module that holds both."""
        children = [path for path, _ in self.root.named_children()]
        position = children.index(name.partition(".")[0]) if name.partition(".")[0] in children else -1
        first = -1
        for part in self.parts:
            if not part.path or children.index(part.path.partition(".")[0]) <= position:
                first = part.number
        return (first * POSITIONS + END + 1, 0) if first >= 0 else (EMBEDDING - 1, 0)

    def gradient_partial_axes(self, name: str, mesh: Mesh) -> tuple[str, ...] | None:
        """See `Adapter.gradient_partial_axes`."""
        return self.adapter(mesh).gradient_partial_axes(self._inner_name(name))

    def watch(self, mesh: Mesh) -> Undo:
        """Propagate layouts in calls of the chunk, until the returned function is called."""
        propagator = self.adapter(mesh).propagator if self._names or self.modules else None
        return (lambda: None) if propagator is None else propagator.watch()

    def adapter(self, mesh: Mesh) -> ModuleAdapter:
        """The adapter of the chunk as a module of which Megatron's parts have rules."""
        if self._adapter is None or self._mesh is not mesh:
            self._adapter = ModuleAdapter(
                self.root, mesh, HolderRules(self.parts, mesh), name="megatron-core"
            )
            self._mesh = mesh
        return self._adapter


def _is_known(name: str, child: nn.Module) -> bool:
    """Whether a child of one of Megatron's models is a part whose sites and parameters are declared."""
    derived = name in PARTS_WITH_SITES and is_megatrons_part(unadapted(child))
    return is_megatrons_own(child) or derived or name in TORCH_CHILDREN


def _over_context(layout: Layout, mesh: Mesh) -> Layout:
    """Context parallel ranks see different tokens, so that each has a partial gradient."""
    return replace(layout, shared=(*layout.shared, "cp")) if mesh["cp"].size > 1 else layout


class HolderRules:
    """The rules for a chunk: how tensors between Megatron's modules are sharded, and parameters of others.

    Args:
        parts: Megatron's models in it.
        mesh: the axes of the run.
    """

    def __init__(self, parts: list[ModelPart], mesh: Mesh) -> None:
        self.mesh = mesh
        self._layouts = ModelLayouts(parts[0].module.config, mesh)
        self._rules = dict(self._rules_of(parts))
        self._kinds = KindTable(DENSE_PARAMETERS)

    def _rules_of(self, parts: list[ModelPart]) -> Iterator[tuple[nn.Module, Rule]]:
        """The rules of the children of each part, whose insides are not traced."""
        for part in parts:
            of = ModelLayouts(part.module.config, self.mesh)
            for name, child in part.module.named_children():
                known = name not in TORCH_CHILDREN and _is_known(name, child)
                if is_megatron(child, *STACKS):
                    yield child, self._stream(of.sequence_parallel)
                elif is_megatron(child, "LanguageModelEmbedding"):
                    scattered = bool(getattr(child, "scatter_to_sequence_parallel", True))
                    yield child, self._stream(scattered and of.sequence_parallel)
                elif known and not is_megatron(child, *COLUMN_LINEARS[:1]):
                    yield child, Rule(hidden=NOT_TRACED)
                elif known and part.is_language_model:
                    yield child, Rule(hidden=NOT_TRACED)  # each call decides whether it gathers the logits

    def _stream(self, cut: bool) -> Rule:
        """The rule of a module that returns `[s, b, h]`; no rule has the order of context parallelism."""
        if self.mesh["cp"].size > 1:
            return Rule(hidden=NOT_TRACED)
        return Rule(outputs=FIRST_DIM if cut else FULL)

    def find_rule(self, path: str, module: nn.Module) -> Rule | None:
        if (declared := self._rules.get(module)) is not None:
            return declared
        parameters = self._parameters(path, module)
        layer: Any = module
        cut = FIRST_DIM if getattr(module, "sequence_parallel", False) and self.mesh["tp"].size > 1 else FULL
        if is_megatron(module, *COLUMN_LINEARS):
            gathered = bool(getattr(layer, "gather_output", False))
            return Rule(cut, FULL if gathered else LAST_DIM, parameters, beside=(LAST_DIM,))
        if is_megatron(module, *ROW_LINEARS):
            entering = LAST_DIM if getattr(layer, "input_is_parallel", True) else FULL
            return Rule(entering, cut, parameters)
        return Rule(parameters=parameters) if parameters else None

    def _parameters(self, path: str, module: nn.Module) -> Mapping[str, Any]:
        """The layouts of a module's own parameters, as far as its class or Megatron's marks tell them.

        Megatron sums the gradients of parameters that are marked `sequence_parallel` over tensor parallel
        ranks; those of others are partial if a traced call shows it.
        """
        params = dict(module.named_parameters(recurse=False))
        role = path.rpartition(".")[2]
        if is_megatron(module, *PARALLEL):
            kind = self._kinds.find(role, module)
            return (
                {} if kind is None else {n: kind.layout(self._layouts, role, n, p) for n, p in params.items()}
            )
        marked = {n: p for n, p in params.items() if getattr(p, "sequence_parallel", False)}
        return {n: self._layouts.replicated(p.ndim, shared=True) for n, p in marked.items()}
