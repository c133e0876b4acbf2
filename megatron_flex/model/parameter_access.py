"""The state dict of a model, its full parameters by global name, and its trainable modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from megatron_flex.handles import Handle
from megatron_flex.runtime import Session, full_parameters
from megatron_flex.runtime.full_parameters import ParameterIndex, ParameterRequest


class ModelState:
    """Saves and loads the chunks of a model and its trainable modules as one state dict.

    Args:
        chunks: the modules of this rank.
        trainable: the trainable modules.
    """

    def __init__(self, chunks: nn.ModuleList, trainable: nn.ModuleDict) -> None:
        one = len(chunks) == 1
        named = [("" if one else f"model{n}.", chunk) for n, chunk in enumerate(chunks)]
        self._parts: list[tuple[str, nn.Module]] = [*named, ("trainable_modules.", trainable)]

    def save(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the state dict of all modules; `args` and `options` as for `nn.Module.state_dict`."""
        options = dict(options)
        prefix, out = options.pop("prefix", ""), options.pop("destination", None)
        for head, module in self._parts:
            out = module.state_dict(*args, destination=out, prefix=prefix + head, **options)
        return out

    def load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> _IncompatibleKeys:
        """Load each module; arguments and result as for `nn.Module.load_state_dict`.

        Raises:
            RuntimeError: names or shapes do not match.
        """
        missing: list[str] = []
        over: list[str] = []
        left = dict(state_dict)
        for head, module in reversed(self._parts):  # last the chunk whose prefix may be empty
            own = {n.removeprefix(head): left.pop(n) for n in list(left) if n.startswith(head)}
            # `load_state_dict` of Megatron's DDP and Float16Module has no `assign` and returns None.
            found = module.load_state_dict(own, strict=strict, **({"assign": True} if assign else {}))
            missing += [head + n for n in found.missing_keys] if found else []
            over += [head + n for n in found.unexpected_keys] if found else []
        if strict and left:
            raise RuntimeError(f"{next(iter(left))!r} is of none of the chunks; names begin with model0.")
        return _IncompatibleKeys(missing, [*over, *left])


class ParameterAccess:
    """Gathers and sets the parameters of a model. Collective. `FlexModel` documents each method.

    Args:
        session: the session of the model.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, name: str, shape: Sequence[int | None] | None, want: ParameterRequest) -> Tensor | None:
        """Return the full tensor of one parameter or buffer, or of a gradient."""
        return full_parameters.gather_parameter(self._index(name), name, want, shape)

    def set(self, name: str, value: Tensor | None, want: ParameterRequest, optimizer: Any) -> None:
        """Set all shards of one parameter or buffer, or of a gradient, from a full tensor."""
        self._session.check_open()
        full_parameters.set_parameter(self._index(name), name, value, want, optimizer)

    def _index(self, name: str) -> ParameterIndex:
        session = self._session
        return session.buffer_index if name in session.buffer_index.sites else session.parameter_index

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
