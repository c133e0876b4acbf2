"""Taps inside Megatron's forward paths: around the GEMM of a parallel linear, and after bias-dropout-add."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.adapter_base import Undo
from megatron_flex.adapters.taps import (
    add_hook,
    intercept,
    join_undos,
    module_output,
    session_hooks_hidden,
    source_point,
    while_forward_runs,
)
from megatron_flex.layout import Layout
from megatron_flex.sites import Site, Tap, TapCallbacks

GEMM_ATTRIBUTE = "_forward_impl"
REDUCTIONS = ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")


def outside(_: nn.Module, callbacks: TapCallbacks, tap: Tap, running: nn.Module) -> Undo:
    """The tap of a tensor, silent while the module `running` runs."""
    inside: list[bool] = []

    def run(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        return local if inside else cast(Tensor, callbacks.run(local, layout, route))

    return join_undos(
        [
            add_hook(running, lambda *_: inside.append(True), pre=True),
            add_hook(running, lambda *_: inside.clear(), always_call=True),
            tap.install(callbacks._replace(run=run)),
        ]
    )


def not_copied(module: nn.Module, callbacks: TapCallbacks, tap: Tap, leaf: int = 0) -> Undo:
    """The tap of a module that copies its hooks to operations of Transformer Engine at its first call.

    Megatron warns of each hook that it copies, calls the copies without tensors, and keeps them: longer than
    the session does.
    """

    def around(copy_hooks: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with session_hooks_hidden(module):
            return copy_hooks(*args, **kwargs)

    unwatch = intercept(module, "_register_hooks_on_fused_impl", around)
    return join_undos([unwatch, tap.leaf(leaf).install(callbacks)])


def norm_branch_input(module: nn.Module, callbacks: TapCallbacks) -> Undo:
    """The input of a norm that returns its input too, as the residual stream: the norm's branch alone.

    A layer's residual stream passes beside its other norms. So an edit changes what is normalised, and a
    gradient is that of the normalisation; the residual stream keeps the tensor that entered.
    """
    entered: list[Tensor | None] = [None]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (stream,) = args or kwargs.values()
        branch = callbacks.run(stream)
        entered[0] = None if branch is stream else stream
        return None if branch is stream else ((branch,), {})

    def after(_: nn.Module, __: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        stream, entered[0] = entered[0], None
        return None if stream is None else (output[0], stream)

    return join_undos([add_hook(module, before, pre=True, with_kwargs=True), add_hook(module, after)])


def packed_layout(layout: Layout) -> Layout:
    """The layout of a tensor without its batch dim, as packed sequences (`qkv_format="thd"`) have it."""
    return replace(layout, dims=tuple(d for d in layout.dims if d.name != "b"))


def packed_sequences(_: nn.Module, callbacks: TapCallbacks, tap: Tap, packed: Layout, leaf: int = 0) -> Undo:
    """The tap of a tensor that may lack its batch dim, which packed sequences have with length one.

    The number of dims shows whether it was dropped; `packed` is its layout then.
    """
    if leaf:
        return tap.leaf(leaf).install(callbacks)

    def run(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        if layout is None and local.dim() == len(packed.dims):
            layout = packed
        return cast(Tensor, callbacks.run(local, layout, route))

    return tap.install(callbacks._replace(run=run))


def without_batch_dim(site: Site) -> Site:
    """A site whose tensors have no batch dim where sequences are packed."""
    tap = None if site.tap is None else site.tap.around(packed_sequences, packed_layout(site.layout))
    return replace(site, tap=tap, unbatched=True)


def core_attention_output(module: nn.Module, callbacks: TapCallbacks, packed: Layout, count: int) -> Undo:
    """The output of core attention: `[s, b, n*d]`, and for packed sequences `[t, n*d]`.

    Some classes return `[t, n, d]` then, which Megatron accepts too; hooks get the heads concatenated.

    Args:
        packed: the layout of packed sequences.
        count: attention heads on this rank.
    """

    def run(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        if local.dim() == 2:
            return cast(Tensor, callbacks.run(local, packed, route))
        if layout is None or local.dim() != 3 or local.shape[1] != count:
            return cast(Tensor, callbacks.run(local, None, route))
        flat = local.flatten(1)
        new: Tensor = callbacks.run(flat, packed, route)
        return local if new is flat else new.view(local.shape)

    def resolve(call_kwargs: dict[str, Any]) -> Layout | None:
        return packed if is_packed(call_kwargs) else None

    return module_output(module, callbacks._replace(run=run), 0, resolve)


def is_packed(kwargs: dict[str, Any]) -> bool:
    """Whether a module is called on packed sequences."""
    return getattr(kwargs.get("packed_seq_params"), "qkv_format", None) == "thd"


def bias_dropout_add(module: nn.Module, callbacks: TapCallbacks, name: str) -> Undo:
    """The output of a layer's bias-dropout-add: the residual stream after a sublayer.

    Args:
        name: the layer's attribute; called as `name(training, fused)(x_with_bias, residual, p)`.
    """

    def around(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Tensor]:
        add = make(*args, **kwargs)
        return lambda *a, **k: callbacks.run(add(*a, **k))

    return intercept(module, name, around)


def gemm(module: nn.Module, callbacks: TapCallbacks, before: bool) -> Undo:
    """Inside a parallel linear's `_forward_impl`, which both classes call with keywords.

    A patched class has the points in its source already.

    Args:
        module: a `ColumnParallelLinear` or `RowParallelLinear`.
        before: the input of the GEMM, gathered over the sequence where it is sharded; else its output before
            the reduction.
    """
    for name in ("gemm_input",) if before else ("partial", "local"):
        if points.declares(module, name):
            return source_point(module, callbacks, name)

    def around(multiply: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if before:
            kwargs = _with_gathered_input(kwargs, module)
            kwargs["input"] = callbacks.run(kwargs["input"])
            return multiply(*args, **kwargs)
        return cast(Tensor, callbacks.run(multiply(*args, **kwargs)))

    return _intercept_gemm(module, around)


def embedding_partial(module: nn.Module, callbacks: TapCallbacks) -> Undo:
    """The lookup of a `VocabParallelEmbedding` in its own part of the vocabulary, before the reduction.

    Its forward calls the reductions by name in Megatron's module `layers`, as other modules do.
    """
    if points.declares(module, "partial"):
        return source_point(module, callbacks, "partial")
    from megatron.core.tensor_parallel import layers

    running, undo = while_forward_runs(module)

    def reduce(original: Callable[..., Any], partial: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(callbacks.run(partial) if running else partial, *args, **kwargs)

    return join_undos([undo, *(intercept(layers, name, reduce) for name in REDUCTIONS)])


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
        gemm = vars(self.module).get(GEMM_ATTRIBUTE)  # before 0.14 each forward sets it again on the instance
        return (gemm or self.upstream._forward_impl.__get__(self.module))(*args, **kwargs)


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
