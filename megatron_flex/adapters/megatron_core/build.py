"""What the sites of every kind of module are built with: the walk's state, and the parallel linears."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron_flex.adapters.megatron_core.module_classes import is_megatron
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.megatron_taps import Gemm
from megatron_flex.adapters.taps import ModuleInput, ModuleOutput
from megatron_flex.layout import Cut, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site, Tap

COLUMN_LINEARS = ("ColumnParallelLinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear")
ROW_LINEARS = ("RowParallelLinear", "TERowParallelLinear")
INSIDE_KERNEL = (
    "{kind} keeps what is between its GEMM and its collective inside Transformer Engine; build the layers "
    "with the local spec (--transformer-impl local) to have it"
)
NO_RULE = (
    "{kind} is none of Megatron's {known} and its layout is not known; build the layers with the local spec "
    "(--transformer-impl local)"
)


class ModuleMatcher:
    """Knows modules by their class and their role in the parent."""

    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()

    def fits(self, role: str, module: nn.Module, parent: nn.Module | None = None) -> bool:
        """Whether a module in that role, in that parent, is meant."""
        return (
            (not self.roles or role in self.roles)
            and (not self.classes or is_megatron(module, *self.classes))
            and (not self.inside or is_megatron(parent, *self.inside))
        )


@dataclass(frozen=True)
class Kind(ModuleMatcher):
    """A kind of module and its sites.

    Attributes:
        sites: called with the builder, the module's global path and the module.
        classes: names of Megatron's classes, of which the module's must be or derive from one; empty for any.
        roles: the last step of the path must be one of these; empty for any.
        inside: names of Megatron's classes, of which the parent must be one; empty for any.
    """

    sites: Callable[[SiteBuilder, str, Any], Iterator[Site]]
    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParameterKind(ModuleMatcher):
    """A kind of module and the layouts of the parameters that it owns itself.

    Attributes:
        layout: called with the model's layouts, the module's role in its parent, the parameter's name in the
            module and the parameter.
        classes: as for `Kind`.
        roles: as for `Kind`.
        inside: as for `Kind`.
    """

    layout: Callable[[ModelLayouts, str, str, nn.Parameter], Layout]
    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnerKind(ModuleMatcher):
    """A kind of module that tells the layouts of parameters of its children too, as only it knows the widths.

    Attributes:
        layouts: called with the model's layouts and the module.
        classes: as for `Kind`.
        roles: as for `Kind`.
    """

    layouts: Callable[[ModelLayouts, Any], Iterator[tuple[nn.Parameter, Layout]]]
    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


class SiteBuilder:
    """One chunk's configuration, and how a site of it is put together."""

    def __init__(self, root: Any, mesh: Mesh) -> None:
        self.root, self.mesh = root, mesh
        self.config: Any = root.config
        self.of = ModelLayouts(self.config, mesh, unpadded_vocabulary(root))
        self.sizes: dict[str, Any] = {
            "h": self.config.hidden_size,
            "f": self.config.ffn_hidden_size,
            "n": self.config.num_attention_heads,
            "g": self.config.num_query_groups or self.config.num_attention_heads,
            "d": self.config.kv_channels,
            "e": getattr(self.config, "num_moe_experts", None),
            "k": getattr(self.config, "moe_router_topk", None),
            "v": self.of.vocabulary or getattr(root, "vocab_size", "v"),
        }

    def site(
        self,
        name: str,
        layout: Layout,
        tap: Tap,
        hidden: str = "",
        width: int | None = None,
        fixed: str = "",
        beside: tuple[Layout, ...] = (),
    ) -> Site:
        """A site on this stage; `width` is the whole's last dim where its name does not tell."""
        names = [d.name for d in layout.dims]
        if layout.permute is not None:
            names = [names[i] for i in layout.permute]
        shape: list[int | str] = [self.sizes.get(n, n) for n in names]
        if width is not None:
            shape[-1] = width
        return Site(name, layout, tuple(shape), self.mesh["pp"].coord, hidden, fixed, tap, beside=beside)

    def both(
        self,
        path: str,
        module: Any,
        layout: Layout,
        keyword: str,
        hidden: str = "",
        beside: tuple[Layout, ...] = (),
    ) -> Iterator[Site]:
        """A module's input and output, alike in layout; `beside` is of what it returns behind that."""
        yield self.site(f"{path}:input", layout, ModuleInput(module, 0, keyword), hidden)
        yield self.site(f"{path}:output", layout, ModuleOutput(module), hidden, beside=beside)

    def column(
        self,
        path: str,
        module: Any,
        out: Layout,
        width: int | None,
        resolve: Any = None,
        no: str = "",
        within: int | None = None,
    ) -> Iterator[Site]:
        """The sites of a column-parallel linear, whose output has layout `out`.

        Args:
            path: its global path.
            module: the linear.
            out: the output's layout.
            width: the output's features, in the whole.
            resolve: where the output's layout depends on the call's keywords.
            no: why it is hidden.
            within: the input's features, if they are not the hidden size.
        """
        no = no or self.no_rule(module, COLUMN_LINEARS)
        inside = no or self.inside(module)
        entry = ModuleInput(module, 0, "x" if inside else "input_")
        yield self.site(f"{path}:input", self.of.stream(self.sequence_cut(module)), entry, no, within)
        gemm = Gemm(module, before=True)
        yield self.site(f"{path}:gemm_input", self.of.gathered(), gemm, inside, within)
        tap, features = ModuleOutput(module, 0, resolve), out.dims[-1]
        # An output that is gathered comes with a bias that is not.
        features = features if features.cuts else replace(features, cuts=(Cut("tp"),))
        yield self.site(f"{path}:output", out, tap, no, width, beside=(self.of.bias_beside(features),))

    def row(self, path: str, module: Any, name: str, width: int, no: str = "") -> Iterator[Site]:
        """The sites of a row-parallel linear, whose input has the features called `name`."""
        no = no or self.no_rule(module, ROW_LINEARS)
        inside = no or self.inside(module)
        entry = ModuleInput(module, 0, "x" if inside else "input_")
        yield self.site(f"{path}:input", self.of.features(name), entry, no, width)
        yield self.site(f"{path}:partial", self.of.partial(), Gemm(module, before=False), inside)
        stream, beside = self.of.stream(self.sequence_cut(module)), (self.of.bias_beside(),)
        yield self.site(f"{path}:output", stream, ModuleOutput(module), no, beside=beside)

    def sequence_cut(self, module: Any) -> bool:
        """Whether the tensor on a parallel linear's uncut side is cut over the sequence."""
        if is_megatron(module, "TELinear", "TELayerNormColumnParallelLinear"):
            return self.of.sequence_parallel  # as Megatron's wrapper tells Transformer Engine
        return bool(getattr(module, "sequence_parallel", False))

    def no_rule(self, module: Any, known: tuple[str, ...]) -> str:
        """Why a linear of another class is hidden: how it cuts its tensors is not known here."""
        return "" if is_megatron(module, *known) else NO_RULE.format(kind=type(module).__name__, known=known[0])

    def inside(self, module: Any) -> str:
        """Why there is nothing to be had within a linear of Transformer Engine; empty for Megatron's own."""
        own = is_megatron(module, COLUMN_LINEARS[0], ROW_LINEARS[0])
        return "" if own else INSIDE_KERNEL.format(kind=type(module).__name__)


def unpadded_vocabulary(root: nn.Module) -> int | None:
    """The vocabulary without padding, as `megatron.training` knows it; None if nothing says it.

    A model knows only the padded number.
    """
    state = sys.modules.get("megatron.training.global_vars")
    tokenizer = getattr(state, "_GLOBAL_TOKENIZER", None)
    if tokenizer is None:
        args = getattr(state, "_GLOBAL_ARGS", None)
        found = getattr(args, "vocab_size", None)
    else:
        found = getattr(tokenizer, "vocab_size", None)
    padded = getattr(root, "vocab_size", None)
    return int(found) if isinstance(found, int) and isinstance(padded, int) and found <= padded else None
