"""The gradient norm that a training loop reports: where PyTorch and DeepSpeed compute it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.adapter_base import NormListener, Undo
from megatron_flex.adapters.taps import intercept

CLIP_FUNCTION = "clip_grad_norm_"


def watch_torch_clipping(roots: Sequence[nn.Module], listener: NormListener) -> Undo:
    """Notify `listener` of the norms of all gradients that `torch.nn.utils.clip_grad_norm_` returns.

    A loop that clips parts of the model one by one does not report a norm of the model: no notification.
    """
    original = torch.nn.utils.clip_grad_norm_

    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        trained = {id(p) for root in roots for p in root.parameters() if p.grad is not None}
        if float(norm_type) != 2.0 or not trained <= {id(p) for p in clipped}:
            return original(clipped, max_norm, norm_type, *args, **kwargs)
        listener.norm_begins()
        norm = original(clipped, max_norm, norm_type, *args, **kwargs)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of DTensors: a partial sum
        listener.norm_ends(float(full))
        return norm

    _rebind(original, clip)
    return lambda: _rebind(clip, original)


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Rebind the name in all loaded modules: scripts and libraries import the function itself."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__dict__.get(CLIP_FUNCTION) is old:
            setattr(module, CLIP_FUNCTION, new)


def watch_engine_steps(engine: Any, listener: NormListener) -> Undo:
    """Notify `listener` of the norms that a DeepSpeed engine has after each update of its weights."""

    def around(update: Callable[..., Any], *args: Any) -> Any:
        listener.norm_begins()
        updated = update(*args)
        norm = engine.get_global_grad_norm()
        listener.norm_ends(None if norm is None else float(norm))
        return updated

    return intercept(engine, "_take_model_step", around)
