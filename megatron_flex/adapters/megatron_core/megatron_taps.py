"""Taps inside Megatron's forward paths: about the GEMM of a parallel linear, and behind bias-dropout-add."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.base import Undo
from megatron_flex.adapters.inert import before, behind
from megatron_flex.adapters.taps import ModuleInput, ModuleOutput, SourcePoint, intercept
from megatron_flex.layout import Layout
from megatron_flex.sites import TapCallback

GEMM_ATTRIBUTE = "_forward_impl"
REDUCTIONS = ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")


@dataclass(frozen=True, eq=False)
class OutsideTap:
    """Another tap, silent while some module runs.

    Attributes:
        tap: the other tap.
        running: the module inside of whose forward pass nothing fires; None for none.
    """

    tap: ModuleInput | ModuleOutput | EmbeddingPartial
    running: nn.Module | None

    @property
    def module(self) -> nn.Module:
        """The module that the other tap stands at."""
        return self.tap.module

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` by way of the other tap."""
        if self.running is None:
            return self.tap.install(fire)
        inside: list[bool] = []

        def outside(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
            return local if inside else fire(local, layout, route)

        undos = [
            before(self.running, lambda *_: inside.append(True)),
            behind(self.running, lambda *_: inside.clear(), always_call=True),
            self.tap.install(outside),
        ]

        def undo() -> None:
            for one in undos:
                one()

        return undo


@dataclass(frozen=True, eq=False)
class BiasDropoutAdd:
    """What a layer's bias-dropout-add returns: the residual stream behind a sublayer.

    Attributes:
        module: the layer.
        name: which of its attributes; called as `name(training, fused)(x_with_bias, residual, p)`.
    """

    module: nn.Module
    name: str

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` behind the function that each call makes."""

        def around(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Tensor]:
            add = make(*args, **kwargs)
            return lambda *a, **k: fire(add(*a, **k))

        return intercept(self.module, self.name, around)


@dataclass(frozen=True, eq=False)
class Gemm:
    """Inside a parallel linear's forward: what enters its GEMM, or what leaves it before the reduction.

    Attributes:
        module: a `ColumnParallelLinear` or `RowParallelLinear`.
        before: the input, gathered over the sequence where it is cut; else the output.
    """

    module: nn.Module
    before: bool

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` around `_forward_impl`, which both classes call with keywords.

        Where the class was patched its source has the points already.
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
    """What a `VocabParallelEmbedding` looked up in its own part of the vocabulary, before the reduction.

    Attributes:
        module: the embedding, on more than one tensor parallel rank.
    """

    module: nn.Module

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` into the reductions that its forward calls by name in Megatron's module `layers`."""
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
    """Do the collective on the GEMM's input outside of it, so that the tensor exists between the two.

    The GEMM gathers its input, or sums its input's gradient, itself, to overlap them with computing.
    Upstream's own functions do the same outside; forward and gradients stay what they were.
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
    """Holds a tapped linear's `_forward_impl` as an attribute that `intercept` can stand about."""

    def __init__(self, module: nn.Module, upstream: Any) -> None:
        self.module, self.upstream = module, upstream
        self.users = 0

    def call(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self.module).get(GEMM_ATTRIBUTE)  # before 0.14 each forward sets it anew on the instance
        return (own or self.upstream._forward_impl.__get__(self.module))(*args, **kwargs)


def _tapped_class(upstream: Any) -> type:
    """A subclass whose `_forward_impl` is ours, whatever an instance sets.

    Setting the attribute on the instance does nothing where each forward sets it again, without a word.
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
