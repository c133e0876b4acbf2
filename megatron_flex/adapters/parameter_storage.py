"""Who keeps a model's parameters and gradients, and how they come to be whole over data parallel ranks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from megatron_flex.adapters.base import LocalGradient, Undo
from megatron_flex.adapters.module_names import named_parameters
from megatron_flex.layout import Layout

SAY_REDUCED = (
    "say reduced=True if all data parallel ranks have the same gradients, reduced=False if each has its own"
)


class Kept(NamedTuple):
    """A parameter as it would be without data parallel sharding.

    Attributes:
        name: global name, without what wrappers put into it.
        parameter: what stands for it on this rank.
        shape: its local shape, cut over tensor parallel ranks only.
        hidden: why its gradient cannot be hooked while it comes; empty if it can.
        layout: how tensor parallel ranks cut it, if who keeps it knows; None if rules do.
        sharded: whether `parameter` is only a part of what `value` gives, or is kept in a form of its own.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    hidden: str = ""
    layout: Layout | None = None
    sharded: bool = False


class Keeping(Protocol):
    """Where parameters and gradients are. Whatever takes a parameter is called alike on all `dp` ranks.

    Attributes:
        name: whose way of keeping it is, `FSDP2`.
        why: what in the model shows it, in words.
    """

    name: str
    why: str

    def parameters(self) -> list[Kept]:
        """All that have a shape."""

    def without_layout(self) -> dict[str, str]:
        """Names of the others, and what they are."""

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The parameter whole over data parallel ranks, not to be written to."""

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set it, to what `value` would return then."""

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Its gradient, of the same shape."""

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set that."""

    def reduced(self) -> bool | str | None:
        """Whether gradients are reduced over data parallel ranks now.

        If only a person knows, why, and when to say what; or None.
        """

    def settle(self) -> None:
        """Wait for whatever is still done to parameters."""

    def freeze(self) -> Undo:
        """Let no parameter get a gradient until the returned function is called."""


class ModuleParameters:
    """Each rank has all of its parameters in its modules, and nothing reduces their gradients."""

    name = "the modules themselves"
    why = "nothing that shards or reduces parameters is around or in it"

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        named = list(named_parameters(root))
        self._lazy = {n: type(p).__name__ for n, p in named if is_lazy(p)}
        self._kept = [Kept(n, p, tuple(p.shape)) for n, p in named if not is_lazy(p)]

    def parameters(self) -> list[Kept]:
        """All but those of lazy modules that have not run."""
        return self._kept

    def without_layout(self) -> dict[str, str]:
        """Those of lazy modules."""
        return self._lazy

    def value(self, parameter: nn.Parameter) -> Tensor:
        """It is whole."""
        return parameter.detach()

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into it."""
        with torch.no_grad():
            parameter.copy_(value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """What autograd left."""
        return LocalGradient(parameter.grad)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write where autograd does."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            parameter.grad.copy_(value)

    def reduced(self) -> bool | str | None:
        """Never known to be without a wrapper: each replica is asked for its own, which may be reduced."""
        return False

    def settle(self) -> None:
        """Nothing is on its way."""

    def freeze(self) -> Undo:
        """Turn `requires_grad` off."""
        trained = [p for p in self.root.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)

        def undo() -> None:
            for parameter in trained:
                parameter.requires_grad_(True)

        return undo
