"""What an autograd graph calls, without keeping alive what it belongs to.

A tensor keeps its graph, a graph keeps its hooks, and Python's garbage collector does not see through
a graph. Megatron's token dispatcher keeps a tensor with its graph between steps: a hook there that held the
session, and with it the model, would keep both, and their shared memory, until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function that calls a bound method for as long as its object is alive, and returns None afterwards.

    Args:
        method: of the object that the graph must not keep.
        *args: what comes before the arguments of a call; the graph keeps these.
    """
    reference = WeakMethod(method)

    def call(*more: Any) -> Any:
        found = reference()
        return None if found is None else found(*args, *more)

    return call
