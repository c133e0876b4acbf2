"""Nodes and hooks in the autograd graph: weak hooks, and the connection of an edit's output to its input.

A tensor keeps its graph alive, a graph keeps its hooks alive, and Python's garbage collector does not
traverse a graph. Megatron's token dispatcher keeps a tensor with its graph between steps: a hook there that
held the session, and with it the model, would keep both, and their shared memory, until the process ends.
Hooks therefore hold weak references.

An edit may return a tensor that does not depend on its input: `detach()`, a constant, a result of
`torch.no_grad()`. On one device the backward pass ends there. On several, ranks and pipeline stages wait for
the backward pass, and only one rank may have detached. Zeros are therefore propagated, which reach every hook
and stage upstream. Parameters that receive no other gradient have none afterwards, as on one device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from megatron_flex.runtime.function_transforms import running_transform


def weak_hook(method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object is alive, and returns None afterwards.

    Args:
        method: a method of the object that the graph must not keep alive.
        *args: the first arguments of each call; the graph keeps these alive.
    """
    reference = WeakMethod(method)

    def call(*more: Any) -> Any:
        found = reference()
        return None if found is None else found(*args, *more)

    return call


def enter_edit(tensor: Tensor) -> Tensor:
    """Return the input of an edit: the tensor with its own node in the graph, which always propagates a
    gradient, zeros if there is no other.

    The result shares the tensor's memory. Without gradients it is the tensor itself, as in a transform of
    `torch.func`, where no other rank waits for the backward pass.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    if running_transform() is not None:  # a torch.autograd.Function would need a rule for each transform
        return tensor
    # torch does not type `apply`
    return cast(Tensor, _EditEntrance.apply(tensor))  # type: ignore[no-untyped-call]


def connect_output(made: Tensor, entrance: Tensor, sure: bool) -> Tensor:
    """Connect an edit's result to its input, so that the backward pass always continues there.

    Args:
        made: the result of the edit.
        entrance: the result of `enter_edit`.
        sure: whether `made` depends on `entrance` whenever it requires a gradient.
    """
    needed = entrance.requires_grad and torch.is_grad_enabled()
    if made is entrance or not needed or (sure and made.requires_grad) or running_transform() is not None:
        return made
    # torch does not type `apply`
    return cast(Tensor, _EditExit.apply(made, entrance))  # type: ignore[no-untyped-call]


class _EditEntrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.like = tensor.shape, tensor.dtype, tensor.device
        return tensor.detach()  # not a view, which could not be edited in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor:
        return make_zero_gradient(ctx, *ctx.like) if grad is None else grad


class _EditExit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, entrance: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return made.detach()  # not a view, as above

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return (grad if ctx.needs_input_grad[0] else None), None


def make_zero_gradient(node: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that a node propagates without a gradient; parameters that get no other have none afterwards."""
    waiting = [p for p in find_upstream_parameters(node) if p.grad is None]
    if waiting:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: clear_zero_gradients(waiting))
    return torch.zeros(shape, dtype=dtype, device=device)


def find_upstream_parameters(node: Any) -> list[nn.Parameter]:
    """The parameters that a backward pass reaches from a node of the graph."""
    found: list[nn.Parameter] = []
    todo = deque(n for n, _ in node.next_functions if n is not None)
    seen: set[Any] = set(todo)
    while todo:
        one = todo.popleft()
        if isinstance(leaf := getattr(one, "variable", None), nn.Parameter):
            found.append(leaf)
        for following, _ in one.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def clear_zero_gradients(parameters: list[nn.Parameter]) -> None:
    """Set the gradients of these parameters, which had none before, to None again if they are all zeros."""
    known = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
    by_device: dict[torch.device, list[tuple[nn.Parameter, Tensor]]] = {}
    for parameter, grad in known:
        by_device.setdefault(grad.device, []).append((parameter, grad))
    for found in by_device.values():  # one synchronization of each device
        filled = torch.stack([grad.detach().any() for _, grad in found]).tolist()
        for (parameter, _), full in zip(found, filled, strict=True):
            if not full:
                parameter.grad = None
