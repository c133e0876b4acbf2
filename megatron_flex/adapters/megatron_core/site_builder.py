"""The building blocks of sites for every kind of module: kinds, builder, parallel linears, fused parts.

Fused tensors are split: queries, keys and values of one projection, gate and up of a gated MLP. Megatron's
wrappers of Transformer Engine have parallel linears that are sharded like Megatron's own, and norms inside
linears and duplicated linears besides. They are identified by the wrappers' class names; attributes on
parameters are not used, as Transformer Engine marks every weight that is not row-parallel as sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import (
    ParameterSite,
    Undo,
    leaf,
    training_argument,
    training_global,
    with_leaf,
)
from megatron_flex.adapters.megatron_core.adapted_linears import (
    adapted_sites,
    adapter_around,
    base_linear,
    normed_beside,
    unadapted,
)
from megatron_flex.adapters.megatron_core.megatron_taps import gemm, group_argument
from megatron_flex.adapters.megatron_core.model_layouts import ModelLayouts
from megatron_flex.adapters.megatron_core.module_classes import (
    COLUMN_LINEARS,
    LINEAR_WITH_NORM,
    ROW_LINEARS,
    is_identity,
    is_megatron,
)
from megatron_flex.adapters.taps import add_hook, any_output, module_input, module_output
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.mesh import Mesh
from megatron_flex.sites import Site, Tap, TapCallbacks

INSIDE_KERNEL = (
    "{kind} keeps what is between its GEMM and its collective inside Transformer Engine; build the layers "
    "with the local spec (--transformer-impl local) to have it"
)
NO_RULE = (
    "{kind} is not one of Megatron's {known} and its layout is not known; build the layers with the local "
    "spec (--transformer-impl local)"
)


class ModuleMatcher:
    """Matches modules by their class and their role in the parent."""

    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()

    def fits(self, role: str, module: nn.Module, parent: nn.Module | None = None) -> bool:
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
        roles: the last component of the path must be one of these; empty for any.
        inside: names of Megatron's classes, of which the parent must be one; empty for any.
    """

    sites: Callable[[SiteBuilder, str, Any], Iterator[Site]]
    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParameterKind(ModuleMatcher):
    """A kind of module and the layouts of the parameters that it owns.

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
    """A kind of module that also declares the layouts of its children's parameters, whose widths it knows.

    Attributes:
        layouts: called with the model's layouts and the module.
        classes: as for `Kind`.
        roles: as for `Kind`.
    """

    layouts: Callable[[ModelLayouts, Any], Iterator[tuple[nn.Parameter, Layout]]]
    classes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


KindT = TypeVar("KindT", bound=ModuleMatcher)
SiteT = TypeVar("SiteT", Site, ParameterSite)


class KindTable(Generic[KindT]):
    """Kinds of modules in order, and which of them each class of modules turned out to be.

    Args:
        kinds: the first that fits a module counts.
    """

    def __init__(self, kinds: Sequence[KindT]) -> None:
        self.kinds = tuple(kinds)
        self._roles = {role for kind in self.kinds for role in kind.roles}
        self._cache: dict[tuple[str, type, type], KindT | None] = {}

    def find(self, role: str, module: nn.Module, parent: nn.Module | None = None) -> KindT | None:
        """The kind of a module in that role, in that parent; classes and roles alone determine it."""
        key = role if role in self._roles else "", type(module), type(parent)
        if key not in self._cache:
            fitting = (kind for kind in self.kinds if kind.fits(role, module, parent))
            self._cache[key] = next(fitting, None)
        return self._cache[key]


class SiteForm(Generic[SiteT]):
    """What the sites of all experts at one hook point have in common, or their parameters of one name.

    A model may have a hundred thousand of them. The constructor of a frozen dataclass sets attributes one
    by one. A form sets them together, and leaves those with default values to the class.

    Args:
        kind: `Site` or `ParameterSite`.
        common: attributes that they have in common.
    """

    def __init__(self, kind: type[SiteT], **common: Any) -> None:
        self._kind: type[SiteT] = kind
        self._common = common

    def make(self, **attributes: Any) -> SiteT:
        """One of this form.

        Args:
            attributes: its other attributes; the form and the class's default values must have the rest.
        """
        out: SiteT = object.__new__(self._kind)
        object.__setattr__(out, "__dict__", self._common | attributes)  # the class is frozen
        return out


class SiteBuilder:
    """One model's configuration, and functions that build its sites.

    Args:
        root: the model, of which a chunk may have a part.
        mesh: the axes of the run.
        config: the configuration of a stack in it; the model's own if None.
    """

    def __init__(self, root: Any, mesh: Mesh, config: Any = None) -> None:
        self.root, self.mesh = root, mesh
        self.config: Any = root.config if config is None else config
        # Vision towers have no such attributes: they are on one stage.
        self.is_first_stage = bool(getattr(root, "pre_process", True))
        self.is_last_stage = bool(getattr(root, "post_process", True))
        self.stage = mesh["pp"].coord
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
        read_only_reason: str = "",
        beside: tuple[Layout, ...] = (),
    ) -> Site:
        """A site on this stage; `width` is the full tensor's last dim, if its name does not give it."""
        shape = self.shape(layout, width)
        return Site(name, layout, shape, self.stage, hidden, read_only_reason, tap, further_layouts=beside)

    def shape(self, layout: Layout, width: int | None = None) -> tuple[int | str, ...]:
        """The full tensor's shape; `width` is its last dim, if its name does not give it."""
        names = [d.name for d in layout.dims]
        if layout.permute is not None:
            names = [names[i] for i in layout.permute]
        shape: list[int | str] = [self.sizes.get(n, n) for n in names]
        if width is not None:
            shape[-1] = width
        return tuple(shape)

    def both(
        self,
        path: str,
        module: Any,
        layout: Layout,
        keyword: str,
        hidden: str = "",
        beside: tuple[Layout, ...] = (),
    ) -> Iterator[Site]:
        """A module's input and output, with the same layout; `beside` is for further outputs."""
        yield self.site(f"{path}:input", layout, Tap(module_input, module, (0, keyword)), hidden)
        yield self.site(f"{path}:output", layout, Tap(module_output, module), hidden, beside=beside)

    def column(
        self,
        path: str,
        module: Any,
        out: Layout,
        width: int | None,
        resolve: Any = None,
        hidden: str = "",
        input_width: int | None = None,
        between: tuple[Layout, ...] = (),
        reduced_before: bool = False,
    ) -> Iterator[Site]:
        """The sites of a column-parallel linear, whose output has layout `out`.

        Args:
            path: its global path.
            module: the linear.
            out: the output's layout.
            width: the output's features, in the full tensor.
            resolve: where the output's layout depends on the call's keywords.
            hidden: why it is hidden.
            input_width: the input's features, if they are not the hidden size.
            between: the layouts of tensors that it returns between its output and its bias.
            reduced_before: whether what gathered its input reduces the gradient of the input.
        """
        hidden = hidden or self.no_rule(module, COLUMN_LINEARS)
        base = base_linear(module)  # once: a large model has many linears
        inside = (
            hidden
            or ("" if base is None else adapter_around(path, module, "gemm_input"))
            or self.inside(module)
        )
        entry = Tap(module_input, module, (0, "x" if inside else "input_"))
        entering = self.of.stream(self.sequence_cut(module))
        if reduced_before and not self.sequence_cut(module):
            entering = self.of.gathered()
        yield self.site(f"{path}:input", entering, entry, hidden, input_width)
        gathered = Tap(gemm, module, (True,))
        yield self.site(f"{path}:gemm_input", self.of.gathered(), gathered, inside, input_width)
        features = out.dims[-1]
        # With something between, output and bias are in nested tuples.
        tap = Tap(any_output, module) if between else Tap(module_output, module, (0, resolve))
        # An output that is gathered has a bias that is not.
        features = features if features.cuts else replace(features, cuts=(Cut("tp"),))
        beside = self.of.bias_beside(features)
        yield self.site(f"{path}:output", out, tap, hidden, width, beside=(*between, beside))

        if base is None:
            return

        def column(at: str, linear: Any) -> Iterator[Site]:
            yield from self.column(
                at, linear, out, width, resolve, hidden, input_width, normed_beside(self, linear)
            )

        yield from adapted_sites(self, path, module, column, (entering, out), (input_width, width), hidden)

    def row(
        self, path: str, module: Any, name: str, width: int, hidden: str = "", out: int | None = None
    ) -> Iterator[Site]:
        """The sites of a row-parallel linear, whose input has the features called `name`.

        Its output has `out` features in the full tensor, or the hidden size if None.
        """
        hidden = hidden or self.no_rule(module, ROW_LINEARS)
        base = base_linear(module)  # once: a large model has many linears
        inside = (
            hidden or ("" if base is None else adapter_around(path, module, "partial")) or self.inside(module)
        )
        entry, entering = Tap(module_input, module, (0, "x" if inside else "input_")), self.of.features(name)
        yield self.site(f"{path}:input", entering, entry, hidden, width)
        yield self.site(f"{path}:partial", self.of.partial(), Tap(gemm, module, (False,)), inside, out)
        stream, beside = self.of.stream(self.sequence_cut(module)), (self.of.bias_beside(),)
        yield self.site(f"{path}:output", stream, Tap(module_output, module), hidden, out, beside=beside)

        if base is None:
            return

        def row(at: str, linear: Any) -> Iterator[Site]:
            yield from self.row(at, linear, name, width, hidden, out)

        yield from adapted_sites(self, path, module, row, (entering, stream), (width, out), hidden)

    def sequence_cut(self, module: Any) -> bool:
        """Whether the tensor on a parallel linear's unsharded side is sharded over the sequence."""
        module = unadapted(module)
        if is_megatron(module, "TELinear", "TELayerNormColumnParallelLinear"):
            return self.of.sequence_parallel  # as Megatron's wrapper configures Transformer Engine
        return bool(getattr(module, "sequence_parallel", False))

    def no_rule(self, module: Any, known: tuple[str, ...]) -> str:
        """Why a linear of another class is hidden: its sharding is unknown."""
        if is_megatron(unadapted(module), *known):
            return ""
        return NO_RULE.format(kind=type(module).__name__, known=known[0])

    def inside(self, module: Any) -> str:
        """Why tensors inside a Transformer Engine linear are not available; empty for Megatron's own."""
        is_local_linear = is_megatron(module, COLUMN_LINEARS[0], ROW_LINEARS[0])
        return "" if is_local_linear else INSIDE_KERNEL.format(kind=type(module).__name__)


def unpadded_vocabulary(root: nn.Module) -> int | None:
    """The vocabulary without padding, as `megatron.training` knows it; None if it is unknown.

    A model knows only the padded number.
    """
    size = training_argument("vocab_size")
    if (tokenizer := training_global("_GLOBAL_TOKENIZER")) is not None:
        size = getattr(tokenizer, "vocab_size", None)
    padded = getattr(root, "vocab_size", None)
    return int(size) if isinstance(size, int) and isinstance(padded, int) and size <= padded else None


@dataclass(frozen=True)
class Packing:
    """The packing of a last dim: `groups` repetitions of parts of relative `widths`.

    Attributes:
        groups: how often the parts repeat.
        widths: the parts' widths within a group, in units that follow from the tensor's length.
        heads: a unit is a head, and a part has the shape `[..., heads, unit]`; else it stays flat.
    """

    groups: int
    widths: tuple[int, ...]
    heads: bool = False

    def split(self, packed: Tensor) -> list[Tensor]:
        """The parts of `packed`, views or copies."""
        unit = packed.shape[-1] // (self.groups * sum(self.widths))
        rows = packed.unflatten(-1, (self.groups, -1)).split([w * unit for w in self.widths], -1)
        flat = [row.flatten(-2) for row in rows]
        return [part.unflatten(-1, (-1, unit)) for part in flat] if self.heads else flat

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate the parts, contiguous."""
        flat = [part.flatten(-2) for part in parts] if self.heads else parts
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in flat], -1).flatten(-2)


def fused_part(
    module: nn.Module, callbacks: TapCallbacks, index: int, packing: Packing, gathered: bool = False
) -> Undo:
    """One part of a linear's fused output, split from it and, if a hook changed it, written back.

    Several parts of one output may be tapped: each tap gets the output of the ones before it.

    Args:
        module: the linear.
        index: which part.
        packing: the packing of the parts in the local output, or in the full output if `gathered`.
        gathered: a rank's slice of the output ends within a part, so that the parts exist only in the full
            output. The tap gathers the output as upstream does right after the projection.
    """

    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        local = leaf(output, 0)
        if local is None:
            return None
        packed = _gather_last_dim(module, local) if gathered else local
        parts = packing.split(packed)
        part = parts[index].contiguous()
        new = callbacks.run(part)
        if new is part:
            return None
        parts[index] = new
        joined = packing.join(parts)
        return with_leaf(output, 0, _narrow_last_dim(module, joined, local) if gathered else joined)

    return add_hook(module, hook)


def _find_tensor_group(linear: nn.Module) -> Any:
    for name in ("tp_group", "_tp_group"):
        group = getattr(unadapted(linear), name, None)
        if group is not None:
            return group
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _gather_last_dim(linear: nn.Module, local: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import mappings

    gather = mappings.all_gather_last_dim_from_tensor_parallel_region
    full: Tensor = gather(local, **group_argument(gather, _find_tensor_group(linear)))
    return full


def _narrow_last_dim(linear: nn.Module, full: Tensor, local: Tensor) -> Tensor:
    width = local.shape[-1]
    rank = torch.distributed.get_rank(_find_tensor_group(linear))
    return full.narrow(-1, rank * width, width).contiguous()


def qkv(b: SiteBuilder, path: str, linear: Any, hidden: str, gated: bool) -> Iterator[Site]:
    """The parts of `linear_qkv:output`: before the norms of queries and keys, before rotary embedding.

    Its columns are, for each group of heads, `[q... | gate... | k | v]`.
    """
    groups, split = b.sizes["g"], b.sizes["g"] < b.of.tp
    heads = b.sizes["n"] // groups
    names = ("q", "gate", "k", "v") if gated else ("q", "k", "v")
    widths = (heads, heads, 1, 1) if gated else (heads, 1, 1)
    packing = Packing(groups if split else groups // b.of.tp, widths, heads=True)
    for index, name in enumerate(names):
        is_key_or_value = name in ("k", "v")
        layout = b.of.groups() if is_key_or_value else b.of.heads()
        if split:
            layout = _gathered_layout(layout)
        yield b.site(f"{path}:{name}", layout, Tap(fused_part, linear, (index, packing, split)), hidden)


def heads_of(b: SiteBuilder, path: str, linear: Any, names: tuple[str, ...], hidden: str) -> Iterator[Site]:
    """The parts of a linear's output whose columns are, for each head, the parts one after the other."""
    packing = Packing(b.sizes["n"] // b.of.tp, (1,) * len(names), heads=True)
    for index, name in enumerate(names):
        yield b.site(f"{path}:{name}", b.of.heads(), Tap(fused_part, linear, (index, packing)), hidden)


def gate_up(b: SiteBuilder, path: str, linear: Any, hidden: str, width: int) -> Iterator[Site]:
    """The halves of a gated MLP's `linear_fc1:output`, without the bias, which is added after the linear.

    Each has `width` features in the full tensor.
    """
    for index, name in enumerate(("gate", "up")):
        tap = Tap(fused_part, linear, (index, Packing(1, (1, 1))))
        yield b.site(f"{path}:{name}", b.of.features("f"), tap, hidden, width)


def _gathered_layout(layout: Layout) -> Layout:
    """The layout of a part of a fused tensor that every rank gathers before it uses its own slice."""
    sequence, batch, heads, size = layout.dims
    return Layout((sequence, batch, Dim(heads.name), size), shared=("tp",))


NORM_INSIDE = (
    "the norm is inside {kind} after it, whose input is the tensor before the norm; build the layers with "
    "the local spec (--transformer-impl local) to have its output"
)


def is_duplicated(linear: Any) -> bool:
    """Whether a linear is replicated on all tensor parallel ranks."""
    linear = unadapted(linear)
    return is_megatron(linear, "TELinear") and not is_megatron(linear, *COLUMN_LINEARS, *ROW_LINEARS)


def norm_inside(
    b: SiteBuilder, path: str, norm: Any, linear: Any, layout: Layout, width: int | None = None
) -> Iterator[Site]:
    """The sites of a norm that the spec leaves out because the next linear contains the norm.

    The module in the norm's position is an identity, and `linear:input` is the same tensor.
    """
    inner = unadapted(linear)
    if isinstance(norm, nn.Module) and is_identity(norm) and is_megatron(inner, LINEAR_WITH_NORM):
        yield b.site(f"{path}:input", layout, Tap(module_input, norm, (0, "x")), width=width)
        hidden = NORM_INSIDE.format(kind=type(inner).__name__)
        yield b.site(f"{path}:output", layout, Tap(module_output, norm), hidden, width)


def used_on_local_tokens(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    """The layout of a replicated parameter that is applied to the residual stream.

    With sequence parallelism each rank has only some of the tokens, so that its gradient is partial.
    """
    return of.replicated(parameter.ndim, shared=of.sequence_parallel)


def used_on_local_heads(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    """The layout of a replicated parameter that each rank applies to its heads: its gradient is partial."""
    return of.replicated(parameter.ndim, shared=True)


def used_on_full_tensor(of: ModelLayouts, role: str, name: str, parameter: nn.Parameter) -> Layout:
    """The layout of a replicated parameter that all ranks apply to equal tensors: equal gradients."""
    return of.replicated(parameter.ndim, shared=False)


TRANSFORMER_ENGINE_PARAMETERS = (
    ParameterKind(used_on_local_tokens, ("TELinear",)),
)  # kinds of parallel linears precede this one
