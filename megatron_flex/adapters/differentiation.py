"""Gradients of activations alone: parameters are frozen, and what first leaves them requires a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron_flex.adapters.tensor_trees import tensors, with_tensor


@contextmanager
def activations_require_gradients(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let outputs of modules with parameters require gradients in the block, before other hooks see them."""
    holders = [inner for module in modules for inner in module.modules() if inner._parameters]
    handles = [holder.register_forward_hook(_require_gradient, prepend=True) for holder in holders]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_gradient(_: nn.Module, __: Any, output: Any) -> Any:
    leaves: list[Tensor] = tensors(output)
    if not leaves or not leaves[0].is_floating_point() or leaves[0].requires_grad:
        return None
    # Not the leaf itself, which the module's caller could not change in place.
    return with_tensor(output, 0, leaves[0].detach().requires_grad_().clone())
