"""The gradient norm that Megatron's optimizers report: `step()` of each returns it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megatron_flex.adapters.adapter_base import NormListener, Undo

OWN_NORM = "grad_norm_group"  # marks parameters that Megatron clips by a norm of their own


def watch_optimizer_steps(roots: list[Any], listener: NormListener) -> Undo:
    """Notify `listener` of the norm of each optimizer step; the steps of a chained optimizer are one."""
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    depth = [0]

    def around(original: Any) -> Any:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if depth[0]:
                return original(optimizer, *args, **kwargs)
            scale = float(optimizer.get_loss_scale())  # the step may change it
            listener.norm_begins(_clipped_apart(roots), _counting_rule(optimizer))
            depth[0] += 1
            try:
                done = original(optimizer, *args, **kwargs)
            finally:
                depth[0] -= 1
            # An overflow of fp16 gradients ends the step without a norm.
            listener.norm_ends(None if done[1] is None else float(done[1]), scale)
            return done

        return step

    replaced = [
        (kind, kind.__dict__["step"]) for kind in _subclasses(MegatronOptimizer) if "step" in vars(kind)
    ]
    for kind, original in replaced:
        kind.step = around(original)

    def undo() -> None:
        for kind, original in replaced:
            kind.step = original

    return undo


def _subclasses(kind: Any) -> Iterator[Any]:
    visited: dict[Any, None] = {}
    pending = [kind]
    while pending:
        subclass = pending.pop()
        if subclass not in visited:
            visited[subclass] = None
            pending += subclass.__subclasses__()
    return iter(visited)


def _clipped_apart(roots: list[Any]) -> list[nn.Parameter]:
    return [p for root in roots for p in root.parameters() if getattr(p, OWN_NORM, None) is not None]


def _counting_rule(optimizer: Any) -> Callable[[nn.Parameter], bool]:
    """Megatron's rule for the parameters whose local gradients a rank adds to the norm."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    first = next(iter(getattr(optimizer, "chained_optimizers", [])), optimizer)
    known = inspect.signature(param_is_not_tensor_parallel_duplicate).parameters
    groups = {name: getattr(first, name, None) for name in ("tp_group", "expert_tp_group") if name in known}
    return lambda p: param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p, **groups)
