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
    """The storage of parameters and gradients. All `dp` ranks call its methods alike.

    Attributes:
        name: the name of the storage, such as `FSDP2`.
        why: the evidence in the model, as text.
    """

    name: str
    why: str

    def parameters(self) -> list[StoredParameter]:
        """All parameters that have a shape."""

    def without_layout(self) -> dict[str, str]:
        """Names of the others, and their kinds."""

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """For each parameter sharded over data parallel ranks: this rank's shard, with its index first."""

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The parameter gathered over data parallel ranks. Read only."""

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set it to a tensor as `value` returns it."""

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Its gradient, of the same shape."""

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set its gradient."""

    def reduced(self) -> bool | str | None:
        """Whether gradients are reduced over data parallel ranks now.

        If only the user knows: why, as text; or None.
        """

    def wait_until_ready(self) -> None:
        """Wait for pending changes of parameters."""

    def watch_gradient_norm(self, listener: NormListener) -> Undo:
        """As `Adapter.watch_gradient_norm`."""

    def freeze(self) -> Undo:
        """Freeze all parameters until the returned function is called."""


class ModuleParameters:
    """Each rank has all of its parameters in its modules, and nothing reduces their gradients."""

    name = "the modules themselves"
    why = "no wrapper shards or reduces the parameters"

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        named = list(named_parameters(root))
        self._lazy = {n: type(p).__name__ for n, p in named if is_lazy(p)}
        self._kept = [StoredParameter(n, p, tuple(p.shape)) for n, p in named if not is_lazy(p)]

    def parameters(self) -> list[StoredParameter]:
        """All but those of lazy modules that have not run."""
        return self._kept

    def without_layout(self) -> dict[str, str]:
        """Those of lazy modules."""
        return self._lazy

    def shards(self) -> dict[str, tuple[tuple[int, ...], Tensor]]:
        """None: no parameter is sharded."""
        return {}

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The parameter itself."""
        return parameter.detach()

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write to it."""
        with torch.no_grad():
            parameter.copy_(value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Autograd's gradient."""
        return LocalGradient(parameter.grad)

    def put_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write to autograd's gradient."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            parameter.grad.copy_(value)

    def reduced(self) -> bool | str | None:
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
