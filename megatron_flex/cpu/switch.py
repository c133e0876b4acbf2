"""Turns the CPU runtime on and off, counted, so that nested users do not switch it off for each other.

While it is on, torch compiles nothing: Megatron's fused functions are `torch.compile` and gain nothing here.
"""

from __future__ import annotations

import os
import sys
from threading import get_ident
from typing import Any

import torch

from megatron_flex.cpu import cuda, device_arguments, gloo, megatron, rng
from megatron_flex.cpu.patches import Patches
from megatron_flex.errors import FlexError

_DYNAMO_CONFIG = "torch._dynamo.config"
_COMPILE_VARIABLE = "TORCH_COMPILE_DISABLE"


def disable_compilation(patches: Patches) -> None:
    """Switch dynamo off in every thread, for functions that are decorated already and for those to come.

    What dynamo read from the environment when it was imported is set in its configuration; if it is
    imported later, it reads the environment, and the configuration is set right on the way out.
    """
    config = sys.modules.get(_DYNAMO_CONFIG)
    disabled = default = os.environ.get(_COMPILE_VARIABLE, "0") == "1"
    if config is not None:
        disabled, default = bool(config.disable), _set_default(config, True)
        config.disable = True  # type: ignore[attr-defined]  # `sys.modules` gives a module of unknown attributes
    patches.set_item(os.environ, _COMPILE_VARIABLE, "1")
    patches.on_restore(lambda: _set_dynamo_disabled(disabled, default))


def _set_dynamo_disabled(disabled: bool, default: bool) -> None:
    config = sys.modules.get(_DYNAMO_CONFIG)
    if config is not None:
        _set_default(config, default)
        config.disable = disabled  # type: ignore[attr-defined]  # as above


def _set_default(config: Any, value: bool) -> bool:
    """Set what threads see that set nothing themselves, and return what they saw.

    Newer versions of torch keep what is set for the thread that set it; older ones have no such default.
    """
    entry = config._config["disable"]
    default = bool(getattr(entry, "default", config.disable))
    if hasattr(entry, "default"):
        entry.default = value
    return default


# In this order; the last sees what the others replaced, and undoing goes backwards.
_INSTALLERS = (
    disable_compilation,
    cuda.install_cuda_stand_ins,
    rng.install_random_generator,
    device_arguments.install_device_arguments,
    gloo.install_gloo_wrappers,
    megatron.install_megatron_patches,
)


class _Runtime:
    """How often it was enabled, by which thread, and what to undo. A process has one torch, so one of it."""

    def __init__(self) -> None:
        self.depth = 0
        self.thread = 0
        self.patches = Patches()


_RUNTIME = _Runtime()


def enable(force: bool = False) -> None:
    """Let torch and Megatron use the CPU as their GPU. Local: no rank waits for another.

    Calls are counted: as many `disable()` undo it.

    Args:
        force: enable it even on a machine that has a GPU, which is then unused.

    Raises:
        FlexError: if a GPU is present and `force` is not set.

    Examples:
        >>> from megatron_flex import cpu
        >>> cpu.enable()  # before Megatron is imported
        >>> cpu.disable()
    """
    if _RUNTIME.depth == 0:
        if torch.cuda.is_available() and not force:
            raise FlexError("a GPU is present and the CPU runtime would hide it; use it, or pass force=True")
        _install(_RUNTIME.patches)
        _RUNTIME.thread = get_ident()
    _RUNTIME.depth += 1


def disable() -> None:
    """Undo one `enable()`; the last one puts back every attribute that was set. Call it in the same thread.

    Raises:
        FlexError: if it is not enabled, or was enabled in another thread.

    Examples:
        >>> from megatron_flex import cpu
        >>> cpu.enable()
        >>> cpu.disable()
    """
    if _RUNTIME.depth == 0:
        raise FlexError("the CPU runtime is not enabled; call enable() first")
    if _RUNTIME.depth == 1:
        # Torch keeps settings of the compiler for each thread; only the one that changed them has them.
        if get_ident() != _RUNTIME.thread:
            raise FlexError("the CPU runtime was enabled in another thread; call disable() in that thread")
        _RUNTIME.patches.restore(megatron.REBOUND_PACKAGES)
    _RUNTIME.depth -= 1


def is_enabled() -> bool:
    """Whether the CPU runtime is on."""
    return _RUNTIME.depth > 0


def _install(patches: Patches) -> None:
    try:
        # Megatron warns, or refuses, where this is not set; on a CPU it means nothing.
        if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
            patches.set_item(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", "1")
        for install in _INSTALLERS:
            install(patches)
    except BaseException:
        patches.restore(megatron.REBOUND_PACKAGES)
        raise
