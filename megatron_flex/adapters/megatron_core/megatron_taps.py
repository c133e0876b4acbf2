"""Taps inside Megatron's forward paths: around the GEMM of a parallel linear, and after bias-dropout-add."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.adapter_base import Undo
from megatron_flex.adapters.taps import ModuleInput, ModuleOutput, SourcePoint, add_hook, intercept
from megatron_flex.layout import Layout
from megatron_flex.sites import LeafTap, Site, Tap, TapCallback

GEMM_ATTRIBUTE = "_forward_impl"
REDUCTIONS = ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")


@dataclass(frozen=True, eq=False)
class OutsideTap:
    """Wraps a tap; silent while some module runs.

    Attributes:
        tap: the wrapped tap.
        running: the module during whose forward pass the tap calls no hook; None for none.
    """

    tap: ModuleInput | ModuleOutput | EmbeddingPartial
    running: nn.Module | None

    @property
    def module(self) -> nn.Module:
        """The module of the wrapped tap."""
        return self.tap.module

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` through the wrapped tap."""
        if self.running is None:
            return self.tap.install(fire)
        inside: list[bool] = []

        def outside(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
            return local if inside else fire(local, layout, route)

        undos = [
            add_hook(self.running, lambda *_: inside.append(True), pre=True),
            add_hook(self.running, lambda *_: inside.clear(), always_call=True),
            self.tap.install(outside),
        ]

        def undo() -> None:
            for one in undos:
                one()

        return undo


@dataclass(frozen=True, eq=False)
class PackedSequenceTap:
    """Wraps a tap where Megatron drops the batch dim of packed sequences (`qkv_format="thd"`).

    The batch dim of packed sequences has length one. The number of dims shows whether it was dropped.

    Attributes:
        tap: the wrapped tap.
        layout: the layout of the tensor with its batch dim.
    """

    tap: Tap
    layout: Layout
    packed: Layout = field(init=False)

    def __post_init__(self) -> None:
        dims = tuple(d for d in self.layout.dims if d.name != "b")
        object.__setattr__(self, "packed", replace(self.layout, dims=dims))

    @property
    def module(self) -> nn.Module:
        """The module of the wrapped tap."""
        return cast(nn.Module, cast(Any, self.tap).module)  # every tap of Megatron's has one

    def leaf(self, index: int) -> Tap:
        """The wrapped tap for another tensor of the module's output."""
        return cast(LeafTap, self.tap).leaf(index)

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` through the wrapped tap."""

        def at(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
            if layout is None and local.dim() == len(self.packed.dims):
                layout = self.packed
            return fire(local, layout, route)

        return self.tap.install(at)


def without_batch_dim(site: Site) -> Site:
    """A site whose tensors have no batch dim where sequences are packed."""
    tap = None if site.tap is None else PackedSequenceTap(site.tap, site.layout)
    return replace(site, tap=tap, unbatched=True)


@dataclass(frozen=True, eq=False)
class CoreAttentionOutput:
    """The output of core attention: `[s, b, n*d]`, and for packed sequences `[t, n*d]`.

    Some classes return `[t, n, d]` then, which Megatron accepts too; hooks get the heads concatenated.

    Attributes:
        module: the core attention.
        layout: the layout of `[s, b, n*d]`.
        count: attention heads on this rank.
    """

    module: nn.Module
    layout: Layout
    count: int

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` after the module's forward."""
        packed = PackedSequenceTap(self, self.layout).packed

        def at(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
            if local.dim() == 2:
                return fire(local, packed, route)
            if layout is None or local.dim() != 3 or local.shape[1] != self.count:
                return fire(local, None, route)
            flat = local.flatten(1)
            new = fire(flat, packed, route)
            return local if new is flat else new.view(local.shape)

        return ModuleOutput(
            self.module, 0, lambda call_kwargs: packed if is_packed(call_kwargs) else None
        ).install(at)


def is_packed(kwargs: dict[str, Any]) -> bool:
    """Whether a module is called on packed sequences."""
    return getattr(kwargs.get("packed_seq_params"), "qkv_format", None) == "thd"


@dataclass(frozen=True, eq=False)
class BiasDropoutAdd:
    """The output of a layer's bias-dropout-add: the residual stream after a sublayer.

    Attributes:
        module: the layer.
        name: its attribute; called as `name(training, fused)(x_with_bias, residual, p)`.
    """

    module: nn.Module
    name: str

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` after the function that each call creates."""

        def around(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Tensor]:
            add = make(*args, **kwargs)
            return lambda *a, **k: fire(add(*a, **k))

        return intercept(self.module, self.name, around)


@dataclass(frozen=True, eq=False)
class Gemm:
    """Inside a parallel linear's forward: the input of its GEMM, or its output before the reduction.

    Attributes:
        module: a `ColumnParallelLinear` or `RowParallelLinear`.
        before: the input, gathered over the sequence where it is sharded; else the output.
    """

    module: nn.Module
    before: bool

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` around `_forward_impl`, which both classes call with keywords.

        A patched class has the points in its source already.
        """
        before = self.before
        for name in ("gemm_input",) if before else ("partial", "local"):
            if points.has(self.module, name):
                return SourcePoint(self.module, name).install(fire)

        def around(gemm: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            if before:
                kwargs = _with_gathered_input(kwargs, self.module)
                kwargs["input"] = fire(kwargs["input"])
                return gemm(*args, **kwargs)
            return fire(gemm(*args, **kwargs))

        return _intercept_gemm(self.module, around)


@dataclass(frozen=True, eq=False)
class EmbeddingPartial:
    """The lookup of a `VocabParallelEmbedding` in its own part of the vocabulary, before the reduction.

    Attributes:
        module: the embedding, on more than one tensor parallel rank.
    """

    module: nn.Module

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` in the reductions that its forward calls by name in Megatron's module `layers`."""
        if points.has(self.module, "partial"):
            return SourcePoint(self.module, "partial").install(fire)
        from megatron.core.tensor_parallel import layers

        running: list[bool] = []  # the same names are called by other modules

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            running.append(True)
            try:
                return original(*args, **kwargs)
            finally:
                running.pop()

        def reduce(original: Callable[..., Any], partial: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(fire(partial) if running else partial, *args, **kwargs)

        undone = [intercept(self.module, "forward", forward)]
        undone += [intercept(layers, name, reduce) for name in REDUCTIONS]

        def undo() -> None:
            for out in undone:
                out()

        return undo


def _with_gathered_input(kwargs: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Run the collective on the GEMM's input outside of it, so that the tensor exists between the two.

    The GEMM gathers its input, or reduces its input's gradient, itself, to overlap them with computation.
    Upstream's own functions do the same outside; forward and gradients are unchanged.
    """
    from megatron.core.tensor_parallel import mappings

    kwargs = dict(kwargs)
    group = getattr(module, "tp_group", None)
    if kwargs.get("sequence_parallel"):
        gather = mappings.gather_from_sequence_parallel_region
        kwargs["input"] = gather(kwargs["input"], **group_argument(gather, group))
        kwargs["sequence_parallel"] = False
    elif kwargs.get("allreduce_dgrad"):
        copy = mappings.copy_to_tensor_model_parallel_region
        kwargs["input"] = copy(kwargs["input"], **group_argument(copy, group))
        kwargs["allreduce_dgrad"] = False
    return kwargs


def group_argument(function: Callable[..., Any], group: Any) -> dict[str, Any]:
    """`group=`, in the versions whose collectives take one."""
    return {"group": group} if group is not None and "group" in inspect.signature(function).parameters else {}


class _GemmHolder:
    """Holds a tapped linear's `_forward_impl` as an attribute that `intercept` can replace."""

    def __init__(self, module: nn.Module, upstream: Any) -> None:
        self.module, self.upstream = module, upstream
        self.users = 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self.module).get(GEMM_ATTRIBUTE)  # before 0.14 each forward sets it again on the instance
        return (own or self.upstream._forward_impl.__get__(self.module))(*args, **kwargs)


def _tapped_class(upstream: Any) -> type:
    """A subclass with our `_forward_impl`, even if an instance sets its own.

    Setting the attribute on the instance has no effect where each forward sets it again.
    """

    def get(module: nn.Module) -> Callable[..., Any]:
        return cast(Callable[..., Any], vars(module)["_flex_impl"].call)

    def set_(module: nn.Module, value: Callable[..., Any]) -> None:
        vars(module)[GEMM_ATTRIBUTE] = value

    members = {
        GEMM_ATTRIBUTE: property(get, set_),
        "__module__": upstream.__module__,
        "__qualname__": upstream.__qualname__,
    }
    return type(upstream.__name__, (upstream,), members)


def _intercept_gemm(module: nn.Module, around: Callable[..., Any]) -> Undo:
    impl = vars(module).get("_flex_impl")
    if impl is None:
        upstream = type(module)
        impl = _GemmHolder(module, upstream)
        vars(module)["_flex_impl"] = impl
        module.__class__ = _tapped_class(upstream)
    impl.users += 1
    restore = intercept(impl, "call", around)

    def undo() -> None:
        restore()
        impl.users -= 1
        if impl.users == 0:
            module.__class__ = impl.upstream
            del vars(module)["_flex_impl"]

    return undo
