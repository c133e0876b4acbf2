"""Parts of a model that torch.compile made: while a hook stands in one, it runs as it was before.

Compiled code keeps the hooks that were there when it was traced, and takes no notice of later ones. So the
parts in which hooks stand are called uncompiled, and the others, and all of them without hooks, as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from megatron_flex.adapters.base import Undo
from megatron_flex.adapters.leaves import WrappingTap
from megatron_flex.adapters.taps import intercept
from megatron_flex.sites import TapCallback

COMPILED_ATTRIBUTE = "_orig_mod"  # what torch.compile's wrapper calls the module inside it


class CompiledRegion:
    """A module that is called compiled.

    Attributes:
        owner: the wrapper that `torch.compile` returned, or the module that `compile()` was called on.
        entrance: its attribute that a call goes through.
        hooks: how many stand inside.
    """

    def __init__(self, owner: nn.Module) -> None:
        inner: nn.Module | None = owner._modules.get(COMPILED_ATTRIBUTE)
        self.owner, self.inner = owner, owner if inner is None else inner
        self.entrance = "_compiled_call_impl" if inner is None else "forward"
        self.hooks = 0

    def enter(self) -> None:
        """A hook comes to stand inside."""
        self.hooks += 1

    def leave(self) -> None:
        """It goes."""
        self.hooks -= 1

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is called from within it."""
        return any(m is module for m in self.owner.modules())

    def watch(self) -> Undo:
        """Stand before it, until that is undone."""
        return intercept(self.owner, self.entrance, self._call)

    def _call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.hooks:
            return compiled(*args, **kwargs)
        before: Callable[..., Any] = self.inner._call_impl if self.inner is self.owner else self.inner
        return before(*args, **kwargs)


class CompiledCaller:
    """Code that was compiled with a call of the model in it, and sees hooks only if that looks new."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.hooks = root, 0
        self._undo: Undo | None = None

    def enter(self) -> None:
        """A hook comes to stand in the model, whose `forward` is another from now on."""
        self.hooks += 1
        if self._undo is None:
            self._undo = intercept(self.root, "forward", _call_unchanged)

    def leave(self) -> None:
        """It goes; with the last one the model looks as it did."""
        self.hooks -= 1
        if not self.hooks and self._undo is not None:
            self._undo()
            self._undo = None

    def holds(self, module: nn.Module) -> bool:
        """All of the model's."""
        return True

    def watch(self) -> Undo:
        """Nothing to stand before."""
        return lambda: None


def _call_unchanged(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def exclude_from_compilation(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is never compiled into what calls it."""
    compiler: Any = sys.modules.get("torch._dynamo")
    return function if compiler is None else cast(Callable[..., Any], compiler.disable(function))


def is_compiled(module: nn.Module) -> bool:
    """Whether calling it runs compiled code."""
    return COMPILED_ATTRIBUTE in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def compiled_regions(chunk: nn.Module, root: nn.Module) -> list[CompiledRegion | CompiledCaller]:
    """The compiled modules of a model, parents first, and whatever else calls it."""
    callers: list[CompiledRegion | CompiledCaller] = [CompiledCaller(root)] if "torch._dynamo" in sys.modules else []
    return callers + [CompiledRegion(m) for m in chunk.modules() if is_compiled(m)]


def entrance_of(chunk: nn.Module, root: nn.Module) -> tuple[nn.Module, str]:
    """The object and its attribute that each call of a model goes through, outside of what is compiled.

    Args:
        chunk: the model as it was given.
        root: what is inside the wrappers around all of it.
    """
    around = next(
        (m for m in chunk.modules() if is_compiled(m) and any(i is root for i in m.modules())), None
    )
    if around is None:
        return root, "_call_impl"
    region = CompiledRegion(around)
    return region.owner, region.entrance


@dataclass(frozen=True, eq=False)
class UncompiledTap(WrappingTap):
    """Another tap, that has the compiled parts around its module run as they were."""

    tap: Any
    regions: tuple[CompiledRegion | CompiledCaller, ...]

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` by way of the other tap."""
        undo: Undo = self.tap.install(fire)
        for region in self.regions:
            region.enter()

        def take_out() -> None:
            undo()
            for region in self.regions:
                region.leave()

        return take_out
