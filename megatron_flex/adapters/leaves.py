"""Taps at any tensor that a module gets or returns, however deep in tuples, mappings and dataclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

from torch import Tensor, nn

from megatron_flex import points
from megatron_flex.adapters.base import Undo
from megatron_flex.adapters.inert import before, behind
from megatron_flex.adapters.spread import SpreadFunction, SpreadOrUnknown, Unknown
from megatron_flex.adapters.tensor_trees import resolve_index, tensors, with_tensor
from megatron_flex.layout import Layout
from megatron_flex.sites import TapCallback


@dataclass(frozen=True, eq=False)
class AnyOutput:
    """A tensor of what a module returns.

    Attributes:
        module: the module.
        index: which of them, counted depth first; a negative one from the end.
    """

    module: nn.Module
    index: int = 0

    def leaf(self, index: int) -> AnyOutput:
        """The tap at another tensor of the same call."""
        return replace(self, index=index)

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` after the module ran, or before it returns where its source was patched."""
        if self.index == 0 and points.has(self.module, "output"):
            return points.place(self.module, "output", lambda local, **_: fire(local))

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            return _fire_at(output, self.index, fire)

        return behind(self.module, hook)


@dataclass(frozen=True, eq=False)
class AnyInput:
    """A tensor of what a module gets: those given by position first, then those by keyword as they are given.

    Attributes:
        module: the module.
        index: which of them, counted depth first; a negative one from the end.
    """

    module: nn.Module
    index: int = 0

    def leaf(self, index: int) -> AnyInput:
        """The tap at another tensor of the same call."""
        return replace(self, index=index)

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` before the module runs."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return _fire_at((args, kwargs), self.index, fire)

        return before(self.module, hook, with_kwargs=True)


class WrappingTap:
    """What taps have in common that stand about another one, their `tap`."""

    tap: Any

    @property
    def module(self) -> nn.Module | None:
        """The module that the other tap stands at."""
        return getattr(self.tap, "module", None)

    @property
    def gradient(self) -> Any:
        """What tells the layout of its gradient."""
        return getattr(self.tap, "gradient", None)

    def leaf(self, index: int) -> Self:
        """The tap at another tensor of the same call."""
        return cast(Self, replace(cast(Any, self), tap=self.tap.leaf(index)))


@dataclass(frozen=True, eq=False)
class RuleTap:
    """Another tap, with what a rule tells of each tensor that passes.

    Attributes:
        tap: the other tap.
        tell: how a tensor lies on the ranks.
    """

    tap: Any
    tell: SpreadFunction

    @property
    def module(self) -> nn.Module | None:
        """The module that the other tap stands at."""
        return getattr(self.tap, "module", None)

    def leaf(self, index: int) -> RuleTap:
        """The tap at another tensor of the same call."""
        return replace(self, tap=self.tap.leaf(index))

    def passed(self, local: Tensor, new: Tensor, spread: SpreadOrUnknown) -> None:
        """Hooks have made another tensor of one: nothing depends on that here."""

    def install(self, fire: TapCallback) -> Undo:
        """Inject `fire` by way of the other tap."""
        return cast(Undo, self.tap.install(LayoutFire(fire, self)))


class SpreadSource(Protocol):
    """Who knows how tensors lie on the ranks that pass a tap."""

    @property
    def tell(self) -> SpreadFunction:
        """How one does."""

    def passed(self, local: Tensor, new: Tensor, spread: SpreadOrUnknown) -> None:
        """Hooks have made another tensor of it."""


class LayoutFire:
    """What a tap calls that does not know layouts: asks who does, and goes on to the hooks."""

    def __init__(self, fire: TapCallback, teller: SpreadSource) -> None:
        self.fire, self.teller = fire, teller
        self.absent = getattr(fire, "absent", None)

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Any = None) -> Tensor:
        """Pass a tensor on in the layout that is told of it, if the tap tells none."""
        spread = self.teller.tell(local)
        unknown = cast(Callable[[Tensor, str], Tensor] | None, getattr(self.fire, "unknown", None))
        new = local
        try:
            if layout is not None:  # the tap knows it
                new = self.fire(local, layout, route)
            elif not isinstance(spread, Unknown):
                new = self.fire(local, spread.layout(local.ndim), route)
            elif unknown is not None:
                new = unknown(local, spread.why)
        finally:
            self.teller.passed(local, new, spread)
        return new


def _fire_at(tree: Any, index: int, fire: TapCallback) -> Any:
    """The tree with what `fire` makes of one of its tensors; None if it stays as it is."""
    found: list[Tensor] = tensors(tree)
    at = resolve_index(index, len(found))
    if at is None:
        absent = cast(Callable[[int], None] | None, getattr(fire, "absent", None))
        if absent is not None:
            absent(len(found))
        return None
    new = fire(found[at])
    return None if new is found[at] else with_tensor(tree, at, new)
