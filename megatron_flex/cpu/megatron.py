"""What megatron-core and `megatron.training` need besides a device: replacements for Transformer Engine.

One function per module of Megatron, found by the module's name and applied when that module is imported (or
at once, if
it is). Each inspects the installed version, so that one table serves all versions. Norms are plain torch's.
Sequence parallel
needs nothing of a norm but a mark on its parameters: each rank sees a part of the sequence, so Megatron
sums the
gradients of marked parameters over the tensor parallel group.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatron_flex.cpu.patches import AfterImportFinder, Patches, loaded_modules
from megatron_flex.errors import FlexError


class FlexLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, with the weight stored around zero if asked (`zero_centered`)."""

    def __init__(self, hidden_size: int, eps: float, zero_centered: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        if zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; shape and layout are those of `input`."""
        if not self.zero_centered:
            return super().forward(input)
        shape = list(self.normalized_shape)
        return nn.functional.layer_norm(input, shape, self.weight + 1, self.bias, self.eps)


class FlexRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, with the weight stored around zero if asked (`zero_centered`)."""

    def __init__(self, hidden_size: int, eps: float, zero_centered: bool) -> None:
        super().__init__(hidden_size, eps=eps)
        self.zero_centered = zero_centered
        if zero_centered:
            nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; shape and layout are those of `x`."""
        if not self.zero_centered:
            return super().forward(x)
        return nn.functional.rms_norm(x, list(self.normalized_shape), self.weight + 1, self.eps)


_NORM_CLASSES: dict[str, type[FlexLayerNorm] | type[FlexRMSNorm]] = {
    "LayerNorm": FlexLayerNorm,
    "RMSNorm": FlexRMSNorm,
}


def build_norm(config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:
    """The norm that a Megatron `config` asks for (`config.normalization`), over `hidden_size` features.

    Its parameters carry `sequence_parallel`, as Megatron's gradient reduction expects. Which kernel is
    asked for (`persist_layer_norm`, `memory_efficient_layer_norm`) makes no difference here.

    Raises:
        FlexError: if `config.normalization` is neither "LayerNorm" nor "RMSNorm".
    """
    kind = _NORM_CLASSES.get(config.normalization)
    if kind is None:
        known = " or ".join(_NORM_CLASSES)
        raise FlexError(f"normalization {config.normalization!r} has no plain torch norm; use {known}")
    norm = kind(hidden_size, eps, bool(config.layernorm_zero_centered_gamma))
    for parameter in norm.parameters():
        # Megatron reads this attribute of its own; torch does not declare it
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


MEGATRON_PACKAGE = "megatron"
REBOUND_PACKAGES = (MEGATRON_PACKAGE, "__main__")
_TE = "megatron.core.extensions.transformer_engine"
_KERNEL_CHOICES = ("sequence_parallel", "persist_layer_norm", "memory_efficient_layer_norm")


def _torch_norm(patches: Patches, module: ModuleType) -> None:
    """`WrappedTorchNorm` refuses sequence parallel and kernels it does not have; ours can do both."""
    wrapped = module.WrappedTorchNorm
    original = wrapped.__new__

    def new(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any) -> Any:
        refused = any(getattr(config, name, False) for name in _KERNEL_CHOICES)
        if config.normalization == "L2Norm" or not (refused or config.layernorm_zero_centered_gamma):
            return original(cls, config, hidden_size, eps, *args, **kwargs)
        return build_norm(config, hidden_size, eps)

    patches.set(wrapped, "__new__", staticmethod(new))


def _transformer_engine(patches: Patches, module: ModuleType) -> None:
    """Without Transformer Engine this module holds mock objects for its classes, and a norm that raises."""
    if getattr(module, "HAVE_TE", False):
        return
    from unittest.mock import NonCallableMock

    for name, value in list(vars(module).items()):
        # `isinstance(x, TELinear)` is asked even without Transformer Engine; a mock makes that raise.
        if name.startswith("TE") and isinstance(value, NonCallableMock):
            patches.set(module, name, _missing_class(name))

    def new(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
        return build_norm(config, hidden_size, eps)

    # Hybrid models take their last norm from here, whatever the layer specs say.
    patches.set(module.TENorm, "__new__", staticmethod(new))


def _missing_class(name: str) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        raise FlexError(f"{name} needs Transformer Engine, which needs a GPU; use a local layer spec")

    return type(name, (torch.nn.Module,), {"__init__": init, "__doc__": f"Stands for the absent {name}."})


def _clip_vit_model(patches: Patches, module: ModuleType) -> None:
    """Without Transformer Engine its norms default to torch's class, which takes other arguments."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if module.NORM_IMPL is not nn.LayerNorm:
        return
    original = module.CLIPViTModel.__init__
    called = inspect.signature(original)

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = called.bind(*args, **kwargs)
        for name in ("ln_pre_impl", "ln_post_impl"):
            given.arguments.setdefault(name, WrappedTorchNorm)
        original(*given.args, **given.kwargs)

    patches.set(module.CLIPViTModel, "__init__", init)


class _NoFp8:
    """`FP8GlobalStateManager` of a machine where nothing is 8-bit."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _no_context(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


def _share_storage(output: torch.Tensor, source: torch.Tensor) -> None:
    """Give `output`, whose storage was emptied, the bytes of `source`; no version counter moves."""
    output.untyped_storage().resize_(source.untyped_storage().size())
    output.untyped_storage().copy_(source.untyped_storage())


def _random(patches: Patches, module: ModuleType) -> None:
    """Recomputation names 8-bit helpers it imports with Transformer Engine only, and compiles C++."""
    stand_ins = {
        "FP8GlobalStateManager": _NoFp8,
        "activation_recompute_forward": _no_context,
        "fp8_autocast": _no_context,
    }
    for name, value in stand_ins.items():
        if not hasattr(module, name):
            patches.set(module, name, value)
    patches.set_present(module, "_get_share_storage", lambda: _share_storage)


def _fp8_utils(patches: Patches, module: ModuleType) -> None:
    """0.12 calls this for a distributed optimizer's 8-bit parameters even where there are none."""
    quantize = getattr(module, "_quantize_param_shard_impl", None)
    if quantize is None or module.HAVE_TE:
        return

    def quantize_if_any(model_params: Any, *args: Any, **kwargs: Any) -> None:
        if len(model_params):
            quantize(model_params, *args, **kwargs)

    patches.set(module, "_quantize_param_shard_impl", quantize_if_any)


def _moe_utils(patches: Patches, module: ModuleType) -> None:
    """The router asks for a kernel by a name that may not exist; split sizes must become numpy arrays."""
    if not hasattr(module, "te_general_gemm"):
        patches.set(module, "te_general_gemm", None)
    if hasattr(module, "maybe_move_tensor_to_cpu"):
        patches.set(module, "maybe_move_tensor_to_cpu", _move_tensor_to_cpu)


def _move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The tensor is on the CPU already; Megatron converts to numpy only what it moves."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _dataset_utils(patches: Patches, module: ModuleType) -> None:
    """A wheel ships the compiled helper without the Makefile that would compile it again."""
    if find_spec("megatron.core.datasets.helpers_cpp") is not None:
        patches.set_present(module, "compile_helpers", lambda: None)


def _fused_kernels(patches: Patches, module: ModuleType) -> None:
    """Up to 0.16 the launcher's old kernel loader asks the CUDA compiler for its version."""
    patches.set_present(module, "load", lambda args: None)


def _check_sent(tensor: torch.Tensor | None) -> None:
    assert tensor is not None


def _inference_communication(patches: Patches, module: ModuleType) -> None:
    """Stages of a model that generates assert that what they send to each other is on a GPU."""
    patches.set_present(module, "_is_cuda", _check_sent)


_MODULE_PATCHES: dict[str, Callable[[Patches, ModuleType], None]] = {
    "megatron.core.transformer.torch_norm": _torch_norm,
    _TE: _transformer_engine,
    "megatron.core.tensor_parallel.random": _random,
    "megatron.core.fp8_utils": _fp8_utils,
    "megatron.core.transformer.moe.moe_utils": _moe_utils,
    "megatron.core.models.vision.clip_vit_model": _clip_vit_model,
    "megatron.core.datasets.utils": _dataset_utils,
    "megatron.legacy.fused_kernels": _fused_kernels,
    "megatron.core.inference.communication_utils": _inference_communication,
}


def install_megatron_patches(patches: Patches) -> None:
    """Patch the modules of Megatron that are imported, and each other one when it is.

    Names that they and the main script bound before (`from torch import zeros`) are bound to what stands in
    for them.
    """

    def after_import(module: ModuleType) -> None:
        recipe = _MODULE_PATCHES.get(module.__name__)
        if recipe is not None:
            recipe(patches, module)

    for module in loaded_modules((MEGATRON_PACKAGE,)):
        after_import(module)
    patches.rebind(loaded_modules(REBOUND_PACKAGES))
    finder = AfterImportFinder(MEGATRON_PACKAGE, after_import)
    sys.meta_path.insert(0, finder)
    patches.on_restore(lambda: sys.meta_path.remove(finder))
