"""Taps for any framework: the tensors in the inputs and outputs of a module, a method or a function.

A tap is a function: called with a module and `TapCallbacks`, it lets the hook point call them and returns
what removes them. `Tap` holds the function with its arguments. Copying or pickling a module copies its hooks
too, but the hooks of a session belong to the original module only: in a copy or an unpickled module they do
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.adapter_base import Undo, with_leaf
from megatron_flex.adapters.adapter_base import leaf as find_leaf
from megatron_flex.adapters.layout_rules import SpreadFunction, SpreadOrUnknown, UnknownLayout
from megatron_flex.adapters.tensor_trees import resolve_index, tensors, with_tensor
from megatron_flex.layout import Layout
from megatron_flex.sites import Tap, TapCallbacks

if TYPE_CHECKING:
    from megatron_flex.adapters.propagation.layout_propagation import LayoutPropagator

Passed = Callable[[Tensor, Tensor, SpreadOrUnknown], None]


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


@contextmanager
def session_hooks_hidden(root: nn.Module) -> Iterator[None]:
    """A module and those inside it without the hooks of sessions, for code that copies their hooks."""
    replaced: list[tuple[nn.Module, str, Any]] = []
    for module in root.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, name)
            others = {number: hook for number, hook in hooks.items() if not isinstance(hook, _SessionHook)}
            if len(others) < len(hooks):
                replaced.append((module, name, hooks))
                setattr(module, name, OrderedDict(others))
    try:
        yield
    finally:
        for module, name, hooks in replaced:
            setattr(module, name, hooks)


def any_output(module: nn.Module, callbacks: TapCallbacks, leaf: int = 0) -> Undo:
    """A tensor in the output of a module; in a patched class, before its forward returns."""
    if leaf == 0 and points.declares(module, "output"):
        return points.install(module, "output", lambda local, **_: callbacks.run(local))

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return _run_at(output, leaf, callbacks)

    return add_hook(module, hook)


def any_input(module: nn.Module, callbacks: TapCallbacks, leaf: int = 0) -> Undo:
    """A tensor in the input of a module: positional arguments first, then keyword arguments in call order."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _run_at((args, kwargs), leaf, callbacks)

    return add_hook(module, hook, pre=True, with_kwargs=True)


def _run_at(tree: Any, index: int, callbacks: TapCallbacks) -> Any:
    """Run the hooks on one tensor of a tree and return the changed tree; None if the tensor is unchanged."""
    leaves: list[Tensor] = tensors(tree)
    at = resolve_index(index, len(leaves))
    if at is None:
        callbacks.absent(len(leaves))
        return None
    new = callbacks.run(leaves[at])
    return None if new is leaves[at] else with_tensor(tree, at, new)


# -- around another tap ---------------------------------------------------------------------------------


def with_layouts(
    _: Any,
    callbacks: TapCallbacks,
    tap: Tap,
    spread_of: SpreadFunction,
    passed: Passed | None = None,
    leaf: int = 0,
) -> Undo:
    """The tap of a tensor without a declared layout: `spread_of` tells it.

    Args:
        tap: the wrapped tap.
        spread_of: returns the sharding of a local tensor.
        passed: called when hooks have run, with their tensor, the tensor they return, and its sharding.
    """
    run, unknown = callbacks.run, callbacks.unknown

    def run_with_layout(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        spread = spread_of(local)
        new = local
        try:
            if layout is not None:  # the tap knows the layout
                new = run(local, layout, route)
            elif not isinstance(spread, UnknownLayout):
                new = run(local, spread.layout(local.ndim), route)
            elif unknown is not None:
                new = unknown(local, spread.why)
        finally:
            if passed is not None:
                passed(local, new, spread)
        return new

    return tap.leaf(leaf).install(TapCallbacks(run_with_layout, callbacks.absent))


def outside_propagation(
    _: Any, callbacks: TapCallbacks, tap: Tap, propagator: LayoutPropagator, leaf: int = 0
) -> Undo:
    """The tap of a declared layout in a model whose other layouts are propagated."""

    def run(local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        return propagator.outside(local, lambda: callbacks.run(local, layout, route))

    return tap.leaf(leaf).install(TapCallbacks(run, callbacks.absent))


# -- of modules, methods and functions ------------------------------------------------------------------

Around = Callable[..., Any]  # called with the original callable, followed by the call's arguments
Resolve = Callable[[dict[str, Any]], Layout | None]  # from a call's keywords to its layout, where that varies


def module_input(
    module: nn.Module, callbacks: TapCallbacks, index: int = 0, keyword: str = "hidden_states"
) -> Undo:
    """An argument of a module's call.

    Args:
        index: the position of the argument, if the caller passes it by position.
        keyword: its name, if the caller passes it by keyword.
    """
    run = callbacks.run

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > index:
            tensor = find_leaf(args[index], None)
            return None if tensor is None else (with_leaf(args, index, run(tensor)), kwargs)
        tensor = find_leaf(kwargs.get(keyword), None)
        return None if tensor is None else (args, {**kwargs, keyword: run(tensor)})

    return add_hook(module, hook, pre=True, with_kwargs=True)


def module_output(
    module: nn.Module,
    callbacks: TapCallbacks,
    index: int = 0,
    resolve: Resolve | None = None,
    *,
    leaf: int = 0,
) -> Undo:
    """A module's output, or one element of a tuple output; in a patched class, before its forward returns.

    Args:
        index: the position in a tuple output.
        resolve: returns the layout from the call's keywords, where the layout depends on them.
        leaf: the index of another tensor of the output, counted depth first.
    """
    if leaf:
        return any_output(module, callbacks, leaf)
    run = callbacks.run
    if index == 0 and points.declares(module, "output"):
        return points.install(
            module,
            "output",
            lambda local, **call_kwargs: run(local, resolve(call_kwargs) if resolve else None),
        )

    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        tensor = output if isinstance(output, Tensor) else find_leaf(output, index)
        if tensor is None:
            return None
        new = run(tensor)
        if new is tensor:
            return None
        return new if tensor is output else with_leaf(output, index, new)

    def resolving_hook(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        tensor = find_leaf(output, index)
        if tensor is None or resolve is None:
            return None
        new = run(tensor, resolve(kwargs))
        return None if new is tensor else with_leaf(output, index, new)

    if resolve is None:
        return add_hook(module, hook)
    return add_hook(module, resolving_hook, with_kwargs=True)


def source_point(module: nn.Module, callbacks: TapCallbacks, name: str) -> Undo:
    """A named point that the patched source of a module calls (see `megatron_flex.points`)."""
    return points.install(module, name, lambda local, **_: callbacks.run(local))


def method_output(module: nn.Module, callbacks: TapCallbacks, method: str, index: int = 0) -> Undo:
    """The return value of a method of this module only; `index` is the position in a tuple."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        tensor = find_leaf(output, index)
        return output if tensor is None else with_leaf(output, index, callbacks.run(tensor))

    return intercept(module, method, around)


def method_input(module: nn.Module, callbacks: TapCallbacks, method: str, index: int = 0) -> Undo:
    """A positional argument of a method of this module only; `index` is its position, without `self`."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = find_leaf(args, index)
        return original(
            *(args if tensor is None else with_leaf(args, index, callbacks.run(tensor))), **kwargs
        )

    return intercept(module, method, around)


def upstream_function(module: nn.Module, callbacks: TapCallbacks, file: str, name: str, before: bool) -> Undo:
    """The argument or the result of a function that a module's forward calls by a global name.

    Args:
        module: the module; calls of the function from other modules are unaffected.
        file: the Python module in which the forward looks the name up.
        name: the name of the function, whose first argument and whose result are tensors.
        before: tap the argument; otherwise the result.
    """
    running, runs_forward = while_forward_runs(module)

    def call(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not running:
            return original(tensor, *args, **kwargs)
        if before:
            return original(callbacks.run(tensor), *args, **kwargs)
        return callbacks.run(original(tensor, *args, **kwargs))

    return join_undos([runs_forward, intercept(import_module(file), name, call)])


def while_forward_runs(module: nn.Module) -> tuple[list[bool], Undo]:
    """A list that is not empty while a module's forward runs, and what ends the watch."""
    running: list[bool] = []

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running.append(True)
        try:
            return original(*args, **kwargs)
        finally:
            running.pop()

    return running, intercept(module, "forward", forward)


def join_undos(undos: Sequence[Undo]) -> Undo:
    """A function that calls all of them, the last one first: it may stand on an earlier one."""

    def undo() -> None:
        for remove in reversed(undos):
            remove()

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
    attributes = vars(owner)
    chain = attributes.get(name)
    if not isinstance(chain, _InterceptChain):
        had = name in attributes
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
