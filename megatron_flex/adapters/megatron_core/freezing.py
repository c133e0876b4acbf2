"""A model whose parameters get no gradient, in Megatron's wrappers and under its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.adapters.base import Undo
from megatron_flex.adapters.inert import behind


def freeze_parameters(roots: list[nn.Module], wrappers: list[Any]) -> Undo:
    """Turn `requires_grad` off for all parameters, until the returned function is called."""
    undos = [_set_attribute(p, "requires_grad", False) for root in roots for p in root.parameters()]
    overlapped = [bool(w.ddp_config.overlap_grad_reduce) for w in wrappers]  # they may share the settings
    for wrapper, waits in zip(wrappers, overlapped, strict=True):
        undos += _suspend_wrapper(wrapper, waits)
    return lambda: _undo_all(undos)


def _suspend_wrapper(wrapper: Any, waits: bool) -> list[Undo]:
    """Let a wrapper neither wait for gradients nor go on gathering parameters, which do not change."""
    undos: list[Undo] = []
    if waits:
        groups = [*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups]
        for group in groups:
            group.reset()
        if all(hasattr(group, "is_first_batch") for group in groups):
            # As in a first batch, in which it is not known which gradients will come, nor how often.
            undos += [_set_attribute(group, "is_first_batch", True) for group in groups]
        else:
            # Megatron-core before 0.16 waits for a reduction that the last gradient would have begun.
            undos.append(_set_attribute(wrapper.ddp_config, "overlap_grad_reduce", False))
            undos.append(_set_attribute(wrapper.config, "grad_sync_func", None))
    if wrapper.ddp_config.overlap_param_gather:
        wrapper.start_param_sync(force_sync=True)
        # Its hooks pass over parameters that are in no bucket, and insist that the others are trained.
        undos.append(_set_attribute(wrapper, "param_to_bucket_group", {}))
        undos.append(_set_attribute(wrapper.config, "param_sync_func", None))
    return undos


def _set_attribute(owner: Any, name: str, value: Any) -> Undo:
    before: Any = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def open_recomputed_regions(roots: list[nn.Module]) -> Undo:
    """Let what enters the layers require a gradient, even where the embedding is frozen.

    Megatron's recomputed regions pass gradients on only if their inputs require them; what is trained inside
    would get none. Inputs from another pipeline stage require them anyway.
    """
    undos = []
    for root in roots:
        config: Any = root.config
        embedding = getattr(root, "embedding", None)
        if config.recompute_granularity is not None and isinstance(embedding, nn.Module):
            undos.append(behind(embedding, _require_gradient))
    return lambda: _undo_all(undos)


def _require_gradient(_: nn.Module, __: Any, output: Any) -> Any:
    opens = isinstance(output, Tensor) and torch.is_grad_enabled() and output.is_floating_point()
    return output.detach().requires_grad_() if opens and not output.requires_grad else output


def _undo_all(undos: list[Callable[[], None]]) -> None:
    for undo in reversed(undos):
        undo()
