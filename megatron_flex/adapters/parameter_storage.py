"""The storage of a model's parameters and gradients, and how they are gathered over data parallel ranks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from megatron_flex.adapters.adapter_base import LocalGradient, NormListener, Undo
from megatron_flex.adapters.gradient_norms import watch_torch_clipping
from megatron_flex.adapters.module_names import named_parameters
from megatron_flex.layout import Layout

REDUCED_REMEDY = (
    "pass reduced=True if all data parallel ranks have the same gradients, reduced=False if each has its own"
)


class StoredParameter(NamedTuple):
    """A parameter without its data parallel sharding.

    Attributes:
        name: global name, without the components that wrappers add.
        parameter: the tensor that represents it on this rank.
        shape: its local shape, sharded over tensor parallel ranks only.
        hidden: why its gradient cannot be hooked during the backward pass; empty if it can.
        layout: its tensor parallel layout, if the storage knows it; None if rules do.
        sharded: whether `parameter` is only a part of the result of `value`, or has a different form.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    hidden: str = ""
    layout: Layout | None = None
    sharded: bool = False


class ParameterStorage(Protocol):
    """The storage of parameters and gradients. All `dp` ranks of a stage call its methods alike.

    Attributes:
        name: the name of the storage, such as `FSDP2`.
        why: the evidence in the model, as text.
    """

    name: str
    why: str

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """For each parameter sharded over data parallel ranks: this rank's shard, with its index first."""

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A parameter as its layout describes it: gathered over data parallel ranks. Read only."""

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set it to a tensor as `value` returns it."""

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Its gradient, of the same shape, reduced or not yet.

        Raises:
            FlexError: the requested gradient does not exist at this time.
        """

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Set its gradient."""

    def reduced(self, called: bool = False) -> bool | str:
        """Whether gradients are reduced over data (and so over tensor) parallel ranks when a step is over.

        Args:
            called: whether the model ran outside the framework's schedule.

        Returns:
            As text: why that is unknown, and that the user must state it, if only the author of the loop
            knows.
        """

    def wait_until_ready(self) -> None:
        """Wait until the framework has finished with the parameters. Every rank calls it."""

    def watch_gradient_norm(self, listener: NormListener) -> Undo:
        """Notify `listener` of the norms of all gradients that the framework computes."""

    def freeze(self) -> Undo:
        """Freeze all parameters, under the framework's wrappers too, until the function is called.

        Raises:
            FlexError: a wrapper would wait for gradients that never come.
        """


class ModuleParameters:
    """Each rank has all of its parameters in its modules, and nothing reduces their gradients.

    Attributes:
        fused: the parameters whose gradients a fused kernel adds up in `main_grad`, for which autograd has
            none; None if no kernel does so.
    """

    name = "the modules themselves"
    why = "no wrapper shards or reduces the parameters"
    fused: frozenset[nn.Parameter] | None = None

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        named = list(named_parameters(root))
        self._unknown = {n: type(p).__name__ for n, p in named if is_lazy(p)}
        self._kept = [StoredParameter(n, p, tuple(p.shape)) for n, p in named if not is_lazy(p)]

    def parameters(self) -> list[StoredParameter]:
        """All but those of lazy modules that have not run, and those that no layout describes."""
        return self._kept

    def without_layout(self) -> dict[str, str]:
        """Those of lazy modules, and any that no layout describes."""
        return self._unknown

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """None: no parameter is sharded."""
        return {}

    def value(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Autograd's gradient, or the fused kernel's."""
        main = self._main_gradient(parameter)
        return LocalGradient(parameter.grad if main is None else main)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor, reduced: bool) -> None:
        """Write there."""
        target = self._main_gradient(parameter)
        if target is None:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target = parameter.grad
        with torch.no_grad():
            target.copy_(value)

    def _main_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The tensor beside autograd's, if it holds the gradient."""
        if self.fused is None or not (parameter in self.fused or parameter.grad is None):
            return None
        main: Tensor | None = getattr(parameter, "main_grad", None)
        return main

    def reduced(self, called: bool = False) -> bool | str:
        """Unknown without a wrapper: each replica has its own gradient, which may be reduced."""
        return False

    def wait_until_ready(self) -> None:
        """Nothing is pending."""

    def watch_gradient_norm(self, listener: NormListener) -> Undo:
        """Trace `torch.nn.utils.clip_grad_norm_`."""
        return watch_torch_clipping([self.root], listener)

    def freeze(self) -> Undo:
        """Turn `requires_grad` off."""
        trained = [p for p in self.root.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)

        def undo() -> None:
            for parameter in trained:
                parameter.requires_grad_(True)

        return undo
