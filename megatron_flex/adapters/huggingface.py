"""Hugging Face: transformers' tensor parallel styles (`tp_plan="auto"`), and weights that accelerate
offloads.

A style wraps a module's forward and converts its inputs to DTensors; parameters are DTensors. A hook at
the module gets local tensors, which are sharded as the style declares. Offloaded weights belong to models
of one process, and are loaded when a module runs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import LocalGradient, Undo
from megatron_flex.adapters.layout_rules import FULL, Rule, Spread
from megatron_flex.adapters.module_names import named_modules, strip_wrapper_names
from megatron_flex.adapters.module_walk import walk_modules
from megatron_flex.adapters.parameter_storage import ModuleParameters, StoredParameter
from megatron_flex.errors import FlexError

TRANSFORMERS_PACKAGE = "transformers.distributed"
PROPAGATED_STYLES = (  # they shard nothing: the input passes unchanged
    "TensorParallelLayer",
    "ReplicatedWithGradAllReduce",
    "LocalParamsParallel",
    "PackedRowwiseParallel",
)
FULL_TENSOR_STYLES = ("EmbeddingParallel", "MoeExpertsParallel")  # each rank gets and returns the full tensor


def transformers_style_of(module: nn.Module) -> tuple[Any, Any] | None:
    """The style of a module's forward and the DeviceMesh of the style; None if there is none."""
    forward = vars(module).get("forward")
    code = getattr(forward, "__code__", None)
    if (
        forward is None
        or code is None
        or f"{TRANSFORMERS_PACKAGE}.tensor_parallel" not in sys.modules
        or forward.__closure__ is None
    ):
        return None
    closure = dict(zip(code.co_freevars, (c.cell_contents for c in forward.__closure__), strict=True))
    style, device_mesh = closure.get("self"), closure.get("mesh")
    if style is None or device_mesh is None or not hasattr(style, "install_forward"):
        return None
    return style, device_mesh


def sums_gradients(module: nn.Module) -> bool:
    """Whether a style sums the gradients of a module's parameters over the ranks after the backward pass.

    `ReplicatedWithGradAllReduce` does, for norms over the heads of a rank: each rank's gradient is
    partial, and the final `.grad` is the sum.
    """
    forward = vars(module).get("forward")
    style = getattr(forward, "__qualname__", "").partition(".")[0]
    ours = getattr(forward, "__module__", "") == f"{TRANSFORMERS_PACKAGE}.tensor_parallel"
    return ours and style == "ReplicatedWithGradAllReduce"


def transformers_rule_of(module: nn.Module, layout_of: Any) -> Rule | None:
    """The layouts that a module's style declares; None if tensors pass the module unchanged.

    Args:
        module: the module.
        layout_of: from a placement to a layout, None if there is none.
    """
    style_of_module = transformers_style_of(module)
    if style_of_module is None:
        return None
    style, kind = style_of_module[0], type(style_of_module[0]).__name__
    local = getattr(style, "use_local_output", True)
    if kind in PROPAGATED_STYLES:
        return None
    if kind in FULL_TENSOR_STYLES:
        return Rule(FULL, FULL)
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        outputs = layout_of(style.output_layouts, module.out_features) if local else None
        gets = layout_of(style.input_layouts, module.in_features)
        return Rule(gets, outputs)
    if kind == "SequenceParallel":
        cut = Spread(((style.sequence_dim, "tp"),))
        return Rule(cut, cut if local else None)
    if kind == "AllReduceParallel":
        return Rule(None, FULL)
    if kind == "MoeIdentityParallel":
        return Rule(FULL, Spread(partial=("tp",)))
    return Rule(
        hidden=f"its tensor parallel style {kind} has no rule for how its tensors are sharded; hook the "
        "modules before and after it",
    )


OFFLOADED_GRADIENT = (
    "accelerate keeps its weights on the disk or in the CPU's memory and drops what it has brought, so that "
    "no gradient stays; give the model a device_map without offloading"
)


def offload_hook_of(module: nn.Module) -> Any:
    """The accelerate hook that loads a module's own weights; None if they are loaded."""
    hook = vars(module).get("_hf_hook")  # asking for a missing attribute is slow
    for candidate in () if hook is None else (hook, *getattr(hook, "hooks", ())):
        if getattr(candidate, "offload", False) and getattr(candidate, "weights_map", None) is not None:
            return candidate
    return None


def is_offloaded(chunk: nn.Module) -> bool:
    """Whether any weights are offloaded."""
    return any(offload_hook_of(module) is not None for module in walk_modules(chunk).modules)


class OffloadedParameters(ModuleParameters):
    """Parameters in modules, some of them on the `meta` device until their module runs."""

    name = "accelerate's offloading"
    why = "a device_map keeps some of its weights on the disk or in the CPU's memory"

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self._homes: dict[str, tuple[nn.Module, str]] = {}
        for path, module in named_modules(root):
            if offload_hook_of(module) is not None:
                for name in module._parameters:
                    self._homes[f"{path}.{name}" if path else name] = module, name
        self._names = {id(k.parameter): k.name for k in self._kept}
        self._kept = [self._keep(k) for k in self._kept]

    def _keep(self, stored: StoredParameter) -> StoredParameter:
        away = strip_wrapper_names(stored.name) in self._homes
        return stored._replace(hidden=OFFLOADED_GRADIENT, sharded=True) if away else stored

    def _home(self, parameter: nn.Parameter) -> tuple[nn.Module, str] | None:
        return self._homes.get(self._names[id(parameter)])

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The parameter, loaded for this call if it is offloaded."""
        home = self._home(parameter)
        if home is None:
            return super().value(parameter)
        from accelerate.utils import align_module_device

        with align_module_device(home[0], torch.device("cpu")):
            brought = home[0]._parameters[home[1]]
            assert brought is not None
            return brought.detach().clone()

    def set_value(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Write to the parameter.

        Raises:
            FlexError: it is offloaded.
        """
        if self._home(parameter) is not None:
            raise FlexError(
                f"{self._names[id(parameter)]} is kept on the disk or in the CPU's memory by accelerate, "
                "where it cannot be set from here; set it before dispatch_model, or do without offloading"
            )
        super().set_value(parameter, value)

    def gradient(self, parameter: nn.Parameter, reduced: bool) -> LocalGradient:
        """Autograd's gradient; None where weights are dropped after use."""
        return (
            LocalGradient(None) if self._home(parameter) is not None else super().gradient(parameter, reduced)
        )

    def freeze(self) -> Undo:
        """Turn `requires_grad` off; modules with offloaded weights get other parameters in each call."""
        trained = [
            (module, name)
            for module in self.root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]

        def turn(on: bool) -> None:
            for module, name in trained:
                parameter = module._parameters[name]
                if parameter is not None:
                    parameter.requires_grad_(on)

        turn(False)
        return lambda: turn(True)
