"""Full parameters, read and set by global name, and trainable modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_flex.handles import Handle
from megatron_flex.runtime import Session, full_parameters
from megatron_flex.runtime.full_parameters import ParameterRequest


class ParameterAccess:
    """Gathers and sets the parameters of a model. Collective. `FlexModel` documents each method.

    Args:
        session: the session of the model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, name: str, shape: Sequence[int | None] | None, want: ParameterRequest) -> Tensor | None:
        """Return the full tensor of one parameter, or of its gradient."""
        return full_parameters.gather_parameter(self._session.parameter_index, name, want, shape)

    def set(self, name: str, value: Tensor | None, want: ParameterRequest, optimizer: Any) -> None:
        """Set all shards of one parameter, or of its gradient, from a full tensor."""
        self._session.check_open()
        full_parameters.set_parameter(self._session.parameter_index, name, value, want, optimizer)

    def named(self, want: ParameterRequest) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the full tensors of all parameters, or of their gradients, in model order."""
        return full_parameters.gather_all_parameters(self._session.parameter_index, want)

    def without_layout(self) -> dict[str, str]:
        """Return the parameters that no layout describes, with the classes of their modules."""
        return dict(self._session.parameter_index.unknown)


class TrainableModuleRegistration:
    """Registers trainable modules in a session, and freezes the model. `FlexModel` documents each method.

    Args:
        session: the session of the model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def modules(self) -> nn.ModuleDict:
        """The registered modules, by name."""
        return self._session.trainable.modules

    def register(self, name: str, module: nn.Module) -> Handle:
        """Register a module. Collective."""
        self._session.register_trainable(name, module)
        return Handle(
            partial(self.remove, name), f"trainable module {name!r}", partial(self._has, name, module)
        )

    def _has(self, name: str, module: nn.Module) -> bool:
        return self._session.open and name in self.modules and self.modules[name] is module

    def remove(self, name: str) -> None:
        """Remove a module. Collective."""
        self._session.remove_trainable(name)

    def freeze(self) -> None:
        """Stop computing gradients of the model's parameters."""
        self._session.check_open()
        self._session.trainable.freeze()

    def unfreeze(self) -> None:
        """Restore `requires_grad` of each parameter."""
        self._session.trainable.unfreeze()
