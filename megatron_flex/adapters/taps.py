"""Taps for any framework: the tensors in the inputs and outputs of a module, a method or a function.

A tap is a small immutable description of a hook point. `install` registers a callback at the hook point and
returns the function that removes the callback. Copying or pickling a module copies its hooks too, but the
hooks of a session belong to the original module only: in a copy or an unpickled module they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from importlib import import_module
from types import MethodType
from typing import Any, Protocol, Self, cast

from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.adapter_base import Undo, leaf, with_leaf
from megatron_flex.adapters.layout_rules import SpreadFunction, SpreadOrUnknown, UnknownLayout
from megatron_flex.adapters.tensor_trees import resolve_index, tensors, with_tensor
from megatron_flex.layout import Layout
from megatron_flex.sites import TapCallback


def do_nothing(*_: Any, **__: Any) -> None:
    """The replacement of a session's hook in a copied or unpickled module."""


class _SessionHook(partial[Any]):
    """A hook of a session, called without a frame of its own; a copy or pickle of it is `do_nothing`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_hook, ()


def _load_hook() -> Callable[..., None]:
    return do_nothing


def add_hook(module: nn.Module, hook: Callable[..., Any], *, pre: bool = False, **options: Any) -> Undo:
    """Register a forward hook.

    Args:
        module: the module.
        hook: a hook for `register_forward_hook`, or for `register_forward_pre_hook` if `pre` is true.
        pre: call the hook before the module's forward instead of after it.
        options: further keyword arguments of that method, such as `with_kwargs`.

    Returns:
        A function that removes the hook.
    """
    add = module.register_forward_pre_hook if pre else module.register_forward_hook
    return add(_SessionHook(hook), **options).remove


@dataclass(frozen=True, eq=False)
class AnyOutput:
    """A tensor in the output of a module.

    Attributes:
        module: the module.
        index: the index of the tensor, counted depth first; a negative index counts from the end.
    """

    module: nn.Module
    index: int = 0

    def leaf(self, index: int) -> AnyOutput:
        """The tap for another tensor of the same call."""
        return replace(self, index=index)

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` after the module's forward, or, in a patched class, before its forward returns."""
        if self.index == 0 and points.has(self.module, "output"):
            return points.place(self.module, "output", lambda local, **_: fire(local))

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            return _fire_at(output, self.index, fire)

        return add_hook(self.module, hook)


@dataclass(frozen=True, eq=False)
class AnyInput:
    """A tensor in the input of a module: positional arguments first, then keyword arguments in call order.

    Attributes:
        module: the module.
        index: the index of the tensor, counted depth first; a negative index counts from the end.
    """

    module: nn.Module
    index: int = 0

    def leaf(self, index: int) -> AnyInput:
        """The tap for another tensor of the same call."""
        return replace(self, index=index)

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` before the module's forward."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _fire_at((args, kwargs), self.index, fire)

        return add_hook(self.module, hook, pre=True, with_kwargs=True)


class WrappingTap:
    """Common members of taps that wrap another tap, `tap`."""

    tap: Any

    @property
    def module(self) -> nn.Module | None:
        """The module of the wrapped tap."""
        return getattr(self.tap, "module", None)

    @property
    def gradient_source(self) -> Any:
        """The wrapped tap's `gradient_source`, which returns the uses of the current tensor; or None."""
        return getattr(self.tap, "gradient_source", None)

    def leaf(self, index: int) -> Self:
        """The tap for another tensor of the same call."""
        return cast(Self, replace(cast(Any, self), tap=self.tap.leaf(index)))


@dataclass(frozen=True, eq=False)
class RuleTap:
    """Wraps a tap; a rule infers the sharding of each of its tensors.

    Attributes:
        tap: the wrapped tap.
        spread_of: returns the sharding of a local tensor.
    """

    tap: Any
    spread_of: SpreadFunction

    @property
    def module(self) -> nn.Module | None:
        """The module of the wrapped tap."""
        return getattr(self.tap, "module", None)

    def leaf(self, index: int) -> RuleTap:
        """The tap for another tensor of the same call."""
        return replace(self, tap=self.tap.leaf(index))

    def passed(self, local: Tensor, new: Tensor, spread: SpreadOrUnknown) -> None:
        """Hooks have replaced a tensor. The rule does not depend on that."""

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` through the wrapped tap."""
        return cast(Undo, self.tap.install(LayoutFire(fire, self)))


class HookTracer(Protocol):
    """Traces a model's calls, but not its hooks."""

    def outside(self, local: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """The result of `run`, hooks on a tensor, which is sharded as the tensor is."""


@dataclass(frozen=True, eq=False)
class UntracedTap(WrappingTap):
    """Wraps a tap of a declared layout in a model whose other layouts are propagated."""

    tap: Any
    tracer: HookTracer

    def install(self, fire: TapCallback) -> Undo:
        """Install `fire` through the wrapped tap."""
        return cast(Undo, self.tap.install(_UntracedFire(fire, self.tracer)))


class _UntracedFire:
    """The callback of an `UntracedTap`."""

    def __init__(self, fire: TapCallback, tracer: HookTracer) -> None:
        self.fire, self.tracer = fire, tracer
        self.absent = getattr(fire, "absent", None)

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        """Call the hooks."""
        return self.tracer.outside(local, lambda: self.fire(local, layout, route))


class SpreadSource(Protocol):
    """Knows the sharding of the tensors at a tap."""

    @property
    def spread_of(self) -> SpreadFunction:
        """Returns the sharding of a local tensor."""

    def passed(self, local: Tensor, new: Tensor, spread: SpreadOrUnknown) -> None:
        """Hooks have replaced the tensor `local` by `new`."""


class LayoutFire:
    """The callback of a tap without layouts: looks up the tensor's layout and calls the hooks with it."""

    def __init__(self, fire: TapCallback, teller: SpreadSource) -> None:
        self.fire, self.teller = fire, teller
        self.absent = getattr(fire, "absent", None)

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        """Call the hooks with `layout`, or, if that is None, with the layout from the spread source."""
        spread = self.teller.spread_of(local)
        unknown = cast(Callable[[Tensor, str], Tensor] | None, getattr(self.fire, "unknown", None))
        new = local
        try:
            if layout is not None:  # the tap knows the layout
                new = self.fire(local, layout, route)
            elif not isinstance(spread, UnknownLayout):
                new = self.fire(local, spread.layout(local.ndim), route)
            elif unknown is not None:
                new = unknown(local, spread.why)
        finally:
            self.teller.passed(local, new, spread)
        return new


def _fire_at(tree: Any, index: int, fire: TapCallback) -> Any:
    """Call `fire` on one tensor of a tree and return the changed tree; None if the tensor is unchanged."""
    found: list[Tensor] = tensors(tree)
    at = resolve_index(index, len(found))
    if at is None:
        absent = cast(Callable[[int], None] | None, getattr(fire, "absent", None))
        if absent is not None:
            absent(len(found))
        return None
    new = fire(found[at])
    return None if new is found[at] else with_tensor(tree, at, new)


Around = Callable[..., Any]  # called with the original callable, followed by the call's arguments
Resolve = Callable[[dict[str, Any]], Layout | None]  # from a call's keywords to its layout, where that varies


@dataclass(eq=False, slots=True)  # not frozen, as a model may have a hundred thousand of them
class ModuleInput:
    """An argument of a module's call.

    Attributes:
        module: the module.
        index: the position of the argument, if the caller passes it by position.
        keyword: its name, if the caller passes it by keyword.
    """

    module: nn.Module
    index: int = 0
    keyword: str = "hidden_states"

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` before the module's forward."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if len(args) > self.index:
                found = leaf(args[self.index], None)
                return None if found is None else (with_leaf(args, self.index, fire(found)), kwargs)
            found = leaf(kwargs.get(self.keyword), None)
            return None if found is None else (args, {**kwargs, self.keyword: fire(found)})

        return add_hook(self.module, hook, pre=True, with_kwargs=True)


@dataclass(eq=False, slots=True)  # not frozen, as a model may have a hundred thousand of them
class ModuleOutput:
    """A module's output, or one element of a tuple output.

    Attributes:
        module: the module.
        index: the position in a tuple output.
        resolve: returns the layout from the call's keywords, where the layout depends on them.
    """

    module: nn.Module
    index: int = 0
    resolve: Resolve | None = None

    def leaf(self, index: int) -> AnyOutput:
        """The tap for another tensor of the output."""
        return AnyOutput(self.module, index)

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` after the module's forward, or, in a patched class, before its forward returns."""
        index, resolve = self.index, self.resolve
        if index == 0 and points.has(self.module, "output"):
            return points.place(
                self.module,
                "output",
                lambda local, **call_kwargs: fire(local, resolve(call_kwargs) if resolve else None),
            )

        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
            found = output if isinstance(output, Tensor) else leaf(output, index)
            if found is None:
                return None
            new = fire(found)
            if new is found:
                return None
            return new if found is output else with_leaf(output, index, new)

        def resolving_hook(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            found = leaf(output, index)
            if found is None or resolve is None:
                return None
            new = fire(found, resolve(kwargs))
            return None if new is found else with_leaf(output, index, new)

        if resolve is None:
            return add_hook(self.module, hook)
        return add_hook(self.module, resolving_hook, with_kwargs=True)


@dataclass(frozen=True, eq=False)
class SourcePoint:
    """A named point that the patched source of a module calls (see `megatron_flex.points`).

    Attributes:
        module: the module.
        name: the name of the point.
    """

    module: nn.Module
    name: str

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` at the point."""

        def at(local: Tensor, **_: Any) -> Tensor:
            return fire(local)

        return points.place(self.module, self.name, at)


@dataclass(frozen=True, eq=False)
class MethodOutput:
    """The return value of a method of a module.

    Attributes:
        module: the module.
        method: the method's name.
        index: the position in a tuple output.
    """

    module: nn.Module
    method: str
    index: int = 0

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` after the method, on this module only."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            found = leaf(output, self.index)
            return output if found is None else with_leaf(output, self.index, fire(found))

        return intercept(self.module, self.method, around)


@dataclass(frozen=True, eq=False)
class MethodInput:
    """A positional argument of a method of a module.

    Attributes:
        module: the module.
        method: the method's name.
        index: the position of the argument, without `self`.
    """

    module: nn.Module
    method: str
    index: int = 0

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` before the method, on this module only."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = leaf(args, self.index)
            return original(*(args if found is None else with_leaf(args, self.index, fire(found))), **kwargs)

        return intercept(self.module, self.method, around)


@dataclass(frozen=True, eq=False)
class UpstreamFunction:
    """The argument or the result of a function that a module's forward calls by a global name.

    Attributes:
        module: the module; calls of the function from other modules are unaffected.
        file: the Python module in which the forward looks the name up.
        name: the name of the function, whose first argument and whose result are tensors.
        before: tap the argument; otherwise the result.
    """

    module: nn.Module
    file: str
    name: str
    before: bool

    def install(self, fire: TapCallback) -> Undo:
        """Call `fire` before or after the function, while the module's forward runs."""
        running: list[bool] = []

        def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            running.append(True)
            try:
                return original(*args, **kwargs)
            finally:
                running.pop()

        def call(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not running:
                return original(tensor, *args, **kwargs)
            if self.before:
                return original(fire(tensor), *args, **kwargs)
            return fire(original(tensor, *args, **kwargs))

        undos = [
            intercept(self.module, "forward", forward),
            intercept(import_module(self.file), self.name, call),
        ]

        def undo() -> None:
            for one in undos:
                one()

        return undo


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _InterceptChain:
    """Replaces a callable attribute of an object and calls the wrappers around the original."""

    def __init__(self, original: Callable[..., Any], owner: Any, name: str, had: bool) -> None:
        # Keeps the signature, which other code inspects: `datasets` drops columns by it.
        update_wrapper(self, original, updated=())
        self.original, self.owner, self.name, self.had = original, owner, name, had
        self.arounds: list[Around] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or unpickled owner gets its class's attribute, or the owner's original attribute."""
        return (_same, (self.original,)) if self.had else (getattr, (self.owner, self.name))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind to the instance, as a function in a class does."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.original
        for around in self.arounds:
            call = partial(around, call)
        return call(*args, **kwargs)


def intercept(owner: Any, name: str, around: Around) -> Undo:
    """Run `around(original, *args, **kwargs)` wherever `owner.name(*args, **kwargs)` is called.

    A callable may have several wrappers, which can be removed in any order. Removing the last one restores
    the attribute of `owner`, or deletes the attribute if `owner` had none of its own.

    Args:
        owner: an object or a module.
        name: the attribute that holds the callable.
        around: the wrapper; it receives the original callable first.

    Returns:
        A function that removes this wrapper.
    """
    own = vars(owner)
    chain = own.get(name)
    if not isinstance(chain, _InterceptChain):
        had = name in own
        chain = _InterceptChain(getattr(owner, name), owner, name, had)
        vars(chain)["restore"] = (
            partial(setattr, owner, name, chain.original) if had else partial(delattr, owner, name)
        )
        setattr(owner, name, chain)
    chain.arounds.append(around)

    def undo() -> None:
        if around in chain.arounds:
            chain.arounds.remove(around)
            if not chain.arounds:
                vars(chain)["restore"]()

    return undo
