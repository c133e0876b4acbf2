"""Taps that fit any framework: a module's input or output, or what a method returns.

Each is a few words of data; `install` injects it and returns the function that takes it out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.base import Undo, leaf, with_leaf
from megatron_flex.adapters.inert import before, behind
from megatron_flex.adapters.leaves import AnyOutput
from megatron_flex.layout import Layout
from megatron_flex.sites import TapCallback

Around = Callable[..., Any]  # called with the original callable and then its arguments
Resolve = Callable[[dict[str, Any]], Layout | None]  # a call's keywords to its layout, where it varies


@dataclass(frozen=True, eq=False)
class ModuleInput:
    """An argument of a module's call.

    Attributes:
        module: the module.
        index: the argument's place, if it is given by position.
        keyword: its name, if it is given by keyword.
    """

    module: nn.Module
    index: int = 0
    keyword: str = "hidden_states"

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` before the module runs."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if len(args) > self.index:
                found = leaf(args[self.index], None)
                return None if found is None else (with_leaf(args, self.index, fire(found)), kwargs)
            found = leaf(kwargs.get(self.keyword), None)
            return None if found is None else (args, {**kwargs, self.keyword: fire(found)})

        return before(self.module, hook, with_kwargs=True)


@dataclass(frozen=True, eq=False)
class ModuleOutput:
    """A module's output, or the first tensor of the tuple that it returns.

    Attributes:
        module: the module.
        index: the place in a tuple output.
        resolve: where the layout depends on the call's keywords.
    """

    module: nn.Module
    index: int = 0
    resolve: Resolve | None = None

    def leaf(self, index: int) -> AnyOutput:
        """The tap at another tensor of what it returns."""
        return AnyOutput(self.module, index)

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` after the module ran, or before it returns where its source was patched."""
        if self.index == 0 and points.has(self.module, "output"):
            resolve = self.resolve
            return points.place(
                self.module, "output", lambda local, **call_kwargs: fire(local, resolve(call_kwargs) if resolve else None)
            )

        def hook(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            found = leaf(output, self.index)
            if found is None:
                return None
            new = fire(found, self.resolve(kwargs) if self.resolve else None)
            return None if new is found else with_leaf(output, self.index, new)

        return behind(self.module, hook, with_kwargs=True)


@dataclass(frozen=True, eq=False)
class SourcePoint:
    """A point that a module's patched source calls by name (see `megatron_flex.points`).

    Attributes:
        module: the module.
        name: the point.
    """

    module: nn.Module
    name: str

    def install(self, fire: TapCallback) -> Undo:
        """Let the point call `fire`."""

        def at(local: Tensor, **_: Any) -> Tensor:
            return fire(local)

        return points.place(self.module, self.name, at)


@dataclass(frozen=True, eq=False)
class MethodOutput:
    """What a method of an object returns.

    Attributes:
        module: the object, a module.
        method: the method's name.
        index: the place in a tuple output.
    """

    module: nn.Module
    method: str
    index: int = 0

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` behind the method, on this one object."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            found = leaf(output, self.index)
            return output if found is None else with_leaf(output, self.index, fire(found))

        return intercept(self.module, self.method, around)


@dataclass(frozen=True, eq=False)
class MethodInput:
    """What a method of an object is given by position.

    Attributes:
        module: the object, a module.
        method: the method's name.
        index: the argument's place, `self` not counted.
    """

    module: nn.Module
    method: str
    index: int = 0

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` before the method, on this one object."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            found = leaf(args, self.index)
            return original(*(args if found is None else with_leaf(args, self.index, fire(found))), **kwargs)

        return intercept(self.module, self.method, around)


@dataclass(frozen=True, eq=False)
class UpstreamFunction:
    """What a function is given, or returns, that a module's forward calls by a name of its upstream file.

    Attributes:
        module: the module; other modules' calls of the same name are left alone.
        file: the Python module in which the name is looked up.
        name: the function's, whose first argument and whose result are tensors.
        before: whether its argument is meant; else its result.
    """

    module: nn.Module
    file: str
    name: str
    before: bool

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` about the function, while the module's forward runs."""
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
    """Stands in an object's place for one of its callables and runs arounds about the original."""

    def __init__(self, original: Callable[..., Any], owner: Any, name: str, had: bool) -> None:
        update_wrapper(self, original, updated=())  # signatures are looked at: datasets drop columns by them
        self.original, self.owner, self.name, self.had = original, owner, name, had
        self.arounds: list[Around] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy of the owner, or one from a pickle: what its class has, or what it had itself."""
        return (_same, (self.original,)) if self.had else (getattr, (self.owner, self.name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.original
        for around in self.arounds:
            call = partial(around, call)
        return call(*args, **kwargs)


def intercept(owner: Any, name: str, around: Around) -> Undo:
    """Run `around(original, *args, **kwargs)` wherever `owner.name(*args, **kwargs)` is called.

    Several may stand about one callable and be taken out in any order; with the last one `owner` has its own
    attribute again (or none of its own, if it had none).

    Args:
        owner: an object or a module.
        name: the attribute that holds the callable.
        around: what runs instead.
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
