"""Steps of gradient accumulation, as accelerate and transformers' Trainer delimit them.

Both set `GradientState.sync_gradients` before each microbatch: true for the last one of a step of the
optimizer. Both run the backward pass by `Accelerator.backward`. The calls of a model in between are of that
microbatch, and the step ends with the last backward pass, before gradients are clipped or used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from megatron_flex.adapters.adapter_base import Listener, Undo
from megatron_flex.adapters.taps import intercept
from megatron_flex.errors import FlexWarning
from megatron_flex.wording import count_words

UNFINISHED = (
    "the model was restored before the last microbatch of a step of gradient accumulation: the captures of "
    "this step are dropped ({count}); leave the scope of the hooks when training is over"
)


class GradientAccumulation:
    """The steps of one model, whose own loop is accelerate's.

    A step with one microbatch is an ordinary call of the model, whose captures arrive when it returns, unless
    a dump or statistics need a step.

    Args:
        listener: is notified of steps.
        enabled: whether accelerate is followed at all.
    """

    def __init__(self, listener: Listener, enabled: bool = True) -> None:
        self.listener, self.enabled = listener, enabled
        self._undos: list[Undo] | None = None  # None until accelerate is imported
        self._accelerator: Any = None
        self._microbatch: int | None = None  # of the open step; None if no step is open
        self._due = False  # whether a microbatch begins with the next call
        self._last = False  # whether it is the last one of its step

    def watch(self) -> Undo:
        """Follow accelerate's functions, until the returned function is called."""
        self._watch()
        return self._unwatch

    def _watch(self) -> bool:
        """Follow accelerate, if it is imported; return whether that is new."""
        states, loops = sys.modules.get("accelerate.state"), sys.modules.get("accelerate.accelerator")
        if not self.enabled or self._undos is not None or states is None or loops is None:
            return False
        state: Any = getattr(states, "GradientState", None)
        accelerator: Any = getattr(loops, "Accelerator", None)
        if state is None or accelerator is None:  # its import is running
            return False
        self._undos = [
            intercept(state, "_set_sync_gradients", self._microbatch_begins),
            intercept(accelerator, "backward", self._backward),
        ]
        return True

    def _unwatch(self) -> None:
        if self._microbatch is not None:
            count = count_words(self._microbatch + 1, "microbatch", "microbatches")
            self._microbatch = None
            warnings.warn(UNFINISHED.format(count=count), FlexWarning, stacklevel=2)
        for undo in self._undos or ():
            undo()
        self._undos = None

    def _microbatch_begins(self, original: Callable[..., Any], state: Any, sync: bool) -> Any:
        """accelerate sets whether the next microbatch is the last one of its step."""
        if self._microbatch is not None:
            if self._last:  # its backward pass was not accelerate's
                self._end(failed=False)
            else:
                self._microbatch += 1
        self._due, self._last = True, bool(sync)
        return original(state, sync)

    def call_begins(self) -> int | None:
        """Begin a step if one is due; return the microbatch of this call, None for a call outside a step."""
        if self._undos is None and self._watch():
            # The first microbatch began before: only one that is not the last can be recognised.
            shared = sys.modules["accelerate.state"].GradientState._shared_state
            self._due, self._last = shared.get("sync_gradients") is False, False
        if self._microbatch is None and self._due and torch.is_grad_enabled():
            if self.listener.in_step() or (self._last and not self.listener.needs_step()):
                return None
            self.listener.step_begins(None, microbatches=0)
            self._microbatch = 0
        return self._microbatch

    @property
    def divides_loss(self) -> bool:
        """Whether the call that begins belongs to a microbatch, whose loss accelerate will divide."""
        return self._due or self._microbatch is not None

    def factor(self) -> float:
        """The factor between gradients and those of the loss that `Accelerator.backward` is given."""
        accelerator = self._accelerator
        if accelerator is None:
            return 1.0
        scale = 1.0 if accelerator.scaler is None else float(accelerator.scaler.get_scale())
        return scale / int(accelerator.gradient_accumulation_steps)

    def _backward(self, original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a microbatch, and end the step if it was the last."""
        self._accelerator = accelerator
        try:
            result = original(accelerator, *args, **kwargs)
        except BaseException:
            self.fail()
            raise
        finally:
            self._accelerator = None
        if self._last:
            self._due = False
            if self._microbatch is not None:
                self._end(failed=False)
        return result

    def fail(self) -> None:
        """End the open step: the model or its backward pass raised."""
        self._due = False
        if self._microbatch is not None:
            self._end(failed=True)

    def _end(self, failed: bool) -> None:
        self._microbatch = None
        self.listener.step_ends(failed)
