"""Follow Megatron's pipeline schedules: which step, which microbatch, forward or backward.

The schedules look their helpers up in their module at each call, so replacing the module's functions is
enough, in every version; the microbatch goes by on the output tensor from forward to backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_flex.adapters.base import Listener, Undo
from megatron_flex.adapters.inert import before, behind
from megatron_flex.adapters.megatron_core.module_classes import unwrap_model
from megatron_flex.adapters.taps import intercept
from megatron_flex.errors import FlexError

SCHEDULE_FUNCTIONS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)

PACKED_CONTEXT_PARALLEL = (
    "packed sequences (packed_seq_params) are dealt out over context parallel ranks one by one, and in which "
    "order is not known here; with context_parallel_size={size}, do without packing, or take the hooks out"
)


def watch_schedules(roots: list[nn.Module], context_parallel: int, listener: Listener) -> Undo:
    """Tell `listener` what the schedules do with these models and when the models are called without one."""
    from megatron.core.pipeline_parallel import schedules

    state = _ScheduleWatcher(roots, context_parallel, listener)
    undos = [intercept(schedules, name, state.run) for name in SCHEDULE_FUNCTIONS]
    undos.append(intercept(schedules, "forward_step", state.forward))
    undos.append(intercept(schedules, "backward_step", state.backward))
    for root in roots:
        undos.append(before(root, state.before_call, with_kwargs=True))
        undos.append(behind(root, state.after_call, always_call=True))

    def undo() -> None:
        for u in reversed(undos):
            u()

    return undo


def keep_schedules_watchable() -> Undo:
    """Let the schedule that a loop fetches from now on be followed also by what is attached after that."""
    from megatron.core.pipeline_parallel import schedules

    undos = [intercept(schedules, name, _call_unchanged) for name in SCHEDULE_FUNCTIONS]

    def undo() -> None:
        for u in undos:
            u()

    return undo


def _call_unchanged(schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return schedule(*args, **kwargs)


class _ScheduleWatcher:
    """What one watcher knows; its methods stand around Megatron's functions."""

    def __init__(self, roots: list[nn.Module], context_parallel: int, listener: Listener) -> None:
        self.roots, self.listener = roots, listener
        self.context_parallel = context_parallel
        self.running = False
        self.calling = False

    def ours(self, model: Any) -> bool:
        models = model if isinstance(model, (list, tuple)) else [model]
        return any(unwrap_model(m) is root for m in models if isinstance(m, nn.Module) for root in self.roots)

    def run(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.running or not self.ours(kwargs.get("model")):
            return schedule(*args, **kwargs)
        count = int(kwargs["num_microbatches"])
        self.listener.step_begins(current_iteration(), partial(self.gradient_factor, count), count)
        self.running, failed = True, True
        try:
            result = schedule(*args, **kwargs)
            failed = False
        finally:
            self.running = False
            if failed:
                self.listener.step_ends(True)
        self.listener.step_ends(False)
        return result

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model: Any = kwargs.get("model", args[2] if len(args) > 2 else None)
        if not self.ours(model):
            return step(*args, **kwargs)
        if not self.running:
            raise FlexError(
                "the schedule that runs was fetched before the hooks were attached and cannot be followed; "
                "call get_forward_backward_func() after attaching"
            )
        chunk = next((i for i, root in enumerate(self.roots) if unwrap_model(model) is root), 0)
        self.listener.forward_begins(int(kwargs.get("current_microbatch") or 0), chunk)
        result = step(*args, **kwargs)
        output, tokens = result if isinstance(result, tuple) else (result, None)
        per_token = getattr(self.roots[0].config, "calculate_per_token_loss", False)
        self.listener.forward_ends(output, tokens if per_token else None)
        return result

    def backward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.running:
            self.listener.backward_begins(kwargs.get("output_tensor", args[1] if len(args) > 1 else None))
        result = step(*args, **kwargs)
        if self.running:
            self.listener.backward_ends()
        return result

    def gradient_factor(self, microbatches: int) -> float:
        """By how much Megatron's gradients are greater than those of one microbatch's own loss.

        Without the loss for each token it multiplies a loss by the context parallel size and divides it by
        the number of microbatches, whether a loss function returns a pair or three (then the tokens are a
        rank's own, fewer by the context parallel size). `config.grad_scale_func` comes on top.
        """
        config: Any = self.roots[0].config
        factor = 1.0
        if not getattr(config, "calculate_per_token_loss", False):
            factor *= self.context_parallel / microbatches
        if config.grad_scale_func is not None:
            parameter = next(p for root in self.roots for p in root.parameters())
            factor *= float(config.grad_scale_func(torch.ones(1, device=parameter.device)))
        return factor

    def before_call(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        if not self.running and not self.calling:
            self.listener.call_begins()
            self.calling = True
        packed = getattr(kwargs.get("packed_seq_params"), "qkv_format", None) == "thd"
        if packed and self.context_parallel > 1:
            self.listener.cannot(PACKED_CONTEXT_PARALLEL.format(size=self.context_parallel))

    def after_call(self, _: nn.Module, __: Any, output: Any) -> None:
        if self.calling:
            self.calling = False
            self.listener.call_ends(failed=output is None)  # torch passes None when the forward raised


def current_iteration() -> int | None:
    """The iteration that `megatron.training` says it is in; None in a loop of one's own."""
    state = sys.modules.get("megatron.training.global_vars")
    args = getattr(state, "_GLOBAL_ARGS", None)
    found = getattr(args, "curr_iteration", None)
    return None if found is None else int(found)
