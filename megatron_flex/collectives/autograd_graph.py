"""Hooks of the autograd graph, and gradients that are missing in a backward pass.

A tensor keeps its graph alive, a graph keeps its hooks alive, and Python's garbage collector does not
traverse a graph. Megatron's token dispatcher keeps a tensor with its graph between steps: a hook there that
held the session, and with it the model, would keep both, and their shared memory, until the process ends.
Hooks therefore hold weak references.

An edit may return a tensor that does not depend on its input: `detach()`, a constant, a result of
`torch.no_grad()`. On one device the backward pass ends there. On several, ranks and pipeline stages wait for
the backward pass, and only one rank may have detached. Zeros are therefore propagated, which reach every hook
and stage upstream. Parameters that receive no other gradient have none afterwards, as on one device. For this
the zeros are followed through the graph (`_MissingGradients`): a gradient that happens to be zero, as of a
vocabulary shard without a token, stays, as an optimizer decays weights that have a gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch import Tensor, nn

# The innermost transform of `torch.func` that runs (grad, jacrev, jvp, vmap), or None: one call, in C.
running_transform = torch._C._functorch.peek_interpreter_stack


def weak_hook(method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object is alive, and returns None afterwards.

    Args:
        method: a method of the object that the graph must not keep alive.
        *args: the first arguments of each call; the graph keeps these alive.
    """
    reference = WeakMethod(method)

    def call(*more: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args, *more)

    return call


def follow_zeros(node: Any, zeros: Tensor) -> Tensor | None:
    """Follow the zeros that a node returns without a gradient of its own.

    Parameters that receive no other gradient have none afterwards.

    Returns:
        What the node returns: None if the next node gets its zeros from another one.
    """
    return _missing_gradients().begin(node, zeros)


def follow_replaced_gradient(before: Tensor, after: Tensor) -> None:
    """Take the gradient that a hook returns for the missing gradient that the hook got, if it got one."""
    for missing in list(_of_passes.values()):
        missing.replace(before, after)


class _MissingGradients:
    """Placeholder zeros for missing gradients in one backward pass, followed from node to node.

    Whether a node got such zeros alone cannot be seen in their entries. It is seen by identity: a tensor that
    no other path adds to arrives as the object that the node before it returned. A reference to it is kept
    until then, so that autograd adds nothing to it in place. If several nodes return such zeros to one
    node, the first are sent, and the rest are added when they arrive.

    The hooks refer to this object weakly: the pass, which calls `finish` at its end, owns it.
    """

    def __init__(self) -> None:
        self._nodes: list[Any] = []  # that are watched
        self._numbers: dict[Any, int] = {}
        self._sent: dict[tuple[int, int], Tensor] = {}  # (node, its input) -> zeros on their way to it
        self._held_back: dict[tuple[int, int], Tensor] = {}
        self._without: set[int] = set()  # nodes that got nothing but such zeros
        self._waiting: list[tuple[nn.Parameter, Any]] = []  # with their nodes
        self._handles: list[Any] = []

    def begin(self, node: Any, zeros: Tensor) -> Tensor | None:
        """Follow the zeros that a node returns; what it returns instead."""
        if node in self._numbers:  # its own hook follows them
            return zeros
        return self._send(node, (zeros,))[0] if self._watch_upstream(node) else zeros

    def replace(self, before: Tensor, after: Tensor) -> None:
        """Follow `after` in the place of `before`."""
        for place in [p for p, tensor in self._sent.items() if tensor is before]:
            self._sent[place] = after

    def finish(self) -> None:
        """Remove the hooks, and the zeros that parameters without a gradient of their own got."""
        for handle in self._handles:
            handle.remove()
        # Zeros still: where other ranks did not cut, a reduction in the backward pass brings their gradients.
        clear_zero_gradients([p for p, node in self._waiting if self._numbers[node] in self._without])

    def _watch_upstream(self, node: Any) -> bool:
        """Watch the nodes that a node leads to; whether any parameter waits for its first gradient."""
        upstream = dict.fromkeys(
            n for n, _ in node.next_functions if n is not None and n not in self._numbers
        )
        todo = deque(upstream)
        while todo:
            upstream_node = todo.popleft()
            leaf = getattr(upstream_node, "variable", None)
            if isinstance(leaf, nn.Parameter) and leaf.grad is None:
                self._waiting.append((leaf, upstream_node))
            for following, _ in upstream_node.next_functions:
                if following is not None and following not in upstream and following not in self._numbers:
                    upstream[following] = None
                    todo.append(following)
        if not self._waiting:
            return False
        for (
            upstream_node
        ) in upstream:  # the hooks are given its number: a hook that held the node would keep the graph
            number = self._numbers[upstream_node] = len(self._nodes)
            self._nodes.append(upstream_node)
            self._handles.append(upstream_node.register_prehook(weak_hook(self._note_arrived, number)))
            self._handles.append(upstream_node.register_hook(weak_hook(self._note_left, number)))
        return True

    def _note_arrived(
        self, number: int, grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        without, late = True, False
        gradients = list(grads)
        for index, grad in enumerate(grads):
            sent, rest = (zeros.pop((number, index), None) for zeros in (self._sent, self._held_back))
            without &= grad is None or grad is sent
            if rest is not None:
                gradients[index], late = rest if grad is None else grad + rest, True
        if without:
            self._without.add(number)
        return tuple(gradients) if late else None

    def _note_left(
        self, number: int, grads: tuple[Tensor | None, ...], _: Any
    ) -> tuple[Tensor | None, ...] | None:
        return self._send(self._nodes[number], grads) if number in self._without else None

    def _send(self, node: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        out = list(grads)
        for index, ((following, at), grad) in enumerate(zip(node.next_functions, grads, strict=False)):
            if following is None or grad is None:
                continue
            place = self._numbers[following], at
            if place not in self._sent:
                self._sent[place] = grad
            else:
                held_back = self._held_back.get(place)
                self._held_back[place] = grad if held_back is None else held_back + grad
                out[index] = None
        return tuple(out)


_of_passes: WeakValueDictionary[int, _MissingGradients] = WeakValueDictionary()


def _missing_gradients() -> _MissingGradients:
    """The missing gradients of the backward pass that is running."""
    task = torch._C._current_graph_task_id()  # what torch's own checkpoints tell passes apart by
    missing = _of_passes.get(task)
    if missing is None:
        missing = _of_passes[task] = _MissingGradients()
        torch.autograd.Variable._execution_engine.queue_callback(missing.finish)
    return missing


def clear_zero_gradients(parameters: list[nn.Parameter]) -> None:
    """Set the gradients of these parameters, which had none before, to None again if they are all zeros."""
    known = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
    by_device: dict[torch.device, list[tuple[nn.Parameter, Tensor]]] = {}
    for parameter, grad in known:
        by_device.setdefault(grad.device, []).append((parameter, grad))
    for gradients in by_device.values():  # one synchronization of each device
        filled = torch.stack([grad.detach().any() for _, grad in gradients]).tolist()
        for (parameter, _), full in zip(gradients, filled, strict=True):
            if not full:
                parameter.grad = None
