"""One walk of a model's modules, shared by all that look for something in the model.

Attaching asks a dozen questions of a model that may have a hundred thousand modules: which wrappers are
around it, which hooks and DTensors are in it, what its modules are called. Most answers depend on classes,
of which a model has few, or on modules with something unusual, which the walk lists.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ParamSpec, TypeVar, cast

from torch import nn

P = ParamSpec("P")
T = TypeVar("T")
_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("shared", default=None)


@contextmanager
def shared_walk() -> Iterator[None]:
    """Inside, `find_once` finds each thing once; what it has found must not change there.

    Python's collector of cycles rests meanwhile: what is found stays, and the collector would look at all of
    it again and again.
    """
    if _shared.get() is not None:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)
        if collects:
            gc.enable()


def find_once(find: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """The result of a call, which is kept while a `shared_walk` lasts; the arguments must be hashable."""
    shared = _shared.get()
    if shared is None:
        return find(*args, **keywords)
    key = find, args, tuple(keywords.items())
    if key not in shared:
        shared[key] = find(*args, **keywords)
    return cast(T, shared[key])


class ModuleWalk:
    """The modules of a model, wrappers too.

    Attributes:
        modules: as `root.modules()` lists them.
    """

    def __init__(self, root: nn.Module) -> None:
        visited: dict[nn.Module, None] = {}
        pending = [root]
        while pending:
            module = pending.pop()
            if module not in visited:
                visited[module] = None
                if children := module._modules:  # most modules hold none
                    pending += [m for m in children.values() if m is not None][::-1]
        self.modules = list(visited)

    @cached_property
    def classes(self) -> dict[type[nn.Module], nn.Module]:
        """The classes of the modules, each with the first module of that class."""
        return {type(m): m for m in reversed(self.modules)}

    @cached_property
    def hooked(self) -> list[nn.Module]:
        """The modules with forward hooks."""
        return [m for m in self.modules if m._forward_pre_hooks or m._forward_hooks]

    @cached_property
    def with_own_forward(self) -> list[nn.Module]:
        """The modules whose `forward` is not that of their class."""
        return [m for m in self.modules if "forward" in m.__dict__]

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        # Python's own hash of a tensor is a function of torch's, which is slower than its id
        by_id = {id(p): p for m in self.modules for p in m._parameters.values() if p is not None}
        return list(by_id.values())

    @cached_property
    def attribute_classes(self) -> set[type]:
        """The classes of all attributes of all modules."""
        classes: set[type] = set()
        for module in self.modules:
            classes.update(map(type, module.__dict__.values()))
        return classes

    def of_classes(self, fits: Callable[[type[nn.Module]], bool]) -> list[nn.Module]:
        """The modules of the classes that fit, the outermost first."""
        fitting = {kind for kind in self.classes if fits(kind)}
        return [m for m in self.modules if type(m) in fitting] if fitting else []


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """A module's own parameters with their names in it, as `named_parameters(recurse=False)` has them."""
    parameters = [(name, p) for name, p in module._parameters.items() if p is not None]
    return parameters if len(parameters) < 2 else list(module.named_parameters(recurse=False))


def walk_modules(root: nn.Module) -> ModuleWalk:
    """The modules of a model, walked once inside a `shared_walk`."""
    return find_once(ModuleWalk, root)


def list_buffer_owners(named: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """The buffers of modules given with their names, and the class of the module that owns each."""
    return {
        f"{path}.{name}" if path else name: type(module).__name__
        for path, module in named
        if module._buffers  # of most modules there are none
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
