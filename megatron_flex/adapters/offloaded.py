"""Models of one process whose weights accelerate keeps elsewhere, and brings when a module runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.base import LocalGradient, Undo
from megatron_flex.adapters.parameter_storage import Kept, ModuleParameters
from megatron_flex.adapters.module_names import strip_wrapper_names, named_modules
from megatron_flex.errors import FlexError

OFFLOADED_GRADIENT = (
    "accelerate keeps its weights on the disk or in the CPU's memory and drops what it has brought, so that "
    "no gradient stays; give the model a device_map without offloading"
)


def offload_hook_of(module: nn.Module) -> Any:
    """The hook of accelerate's that brings a module's own weights; None if they are there."""
    hook = getattr(module, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None:
            return one
    return None


def is_offloaded(chunk: nn.Module) -> bool:
    """Whether any weights are elsewhere."""
    return any(offload_hook_of(module) is not None for module in chunk.modules())


class OffloadedParameters(ModuleParameters):
    """Parameters in modules, some of them on the `meta` device until their module runs."""

    name = "accelerate's offloading"
    why = "a device_map keeps some of its weights on the disk or in the CPU's memory"

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self._homes: dict[str, tuple[nn.Module, str]] = {}
        for path, module in named_modules(root):
            if offload_hook_of(module) is not None:
                for own in module._parameters:
                    self._homes[f"{path}.{own}" if path else own] = module, own
        self._names = {id(k.parameter): k.name for k in self._kept}
        self._kept = [self._keep(k) for k in self._kept]

    def _keep(self, kept: Kept) -> Kept:
        away = strip_wrapper_names(kept.name) in self._homes
        return kept._replace(hidden=OFFLOADED_GRADIENT, sharded=True) if away else kept

    def _home(self, parameter: nn.Parameter) -> tuple[nn.Module, str] | None:
        return self._homes.get(self._names[id(parameter)])

    def value(self, parameter: nn.Parameter) -> Tensor:
        """Brought for this, where it is elsewhere."""
        home = self._home(parameter)
        if home is None:
            return super().value(parameter)
        from accelerate.utils import align_module_device

        with align_module_device(home[0], torch.device("cpu")):
            brought = home[0]._parameters[home[1]]
            assert brought is not None
            return brought.detach().clone()

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write into it.

        Raises:
            FlexError: it is elsewhere.
        """
        if self._home(parameter) is not None:
            raise FlexError(
                f"{self._names[id(parameter)]} is kept on the disk or in the CPU's memory by accelerate, "
                "where it cannot be set from here; set it before dispatch_model, or do without offloading"
            )
        super().put(parameter, value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """What autograd left; nothing where weights are dropped after use."""
        return (
            LocalGradient(None) if self._home(parameter) is not None else super().gradient(parameter, reduced)
        )

    def freeze(self) -> Undo:
        """Turn `requires_grad` off; modules whose weights come and go have others then."""
        trained = [(m, n) for m in self.root.modules() for n, p in m._parameters.items() if _is_trained(p)]

        def turn(on: bool) -> None:
            for module, name in trained:
                parameter = module._parameters[name]
                if parameter is not None:
                    parameter.requires_grad_(on)

        turn(False)
        return lambda: turn(True)


def _is_trained(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad
