"""The clock: which step, iteration, microbatch and call a tensor belongs to, and whether it is a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_flex.runtime.captures import Key


class Clock:
    """Kept by the session from what the adapter tells.

    Attributes:
        step: runs of a schedule, or calls of the model outside one, since attaching; from 0.
        iteration: as the framework counts, or `step` where it does not.
        microbatch: the one whose forward or backward pass runs.
    """

    def __init__(self) -> None:
        self.step = -1
        self.iteration = -1
        self.microbatch = 0
        self._calls: Counter[tuple[str, int, bool]] = Counter()
        self._outputs: Any = WeakTensorKeyDictionary()
        self._ask: Callable[[], float] | None = None
        self._factor: float | None = None

    @property
    def gradient_factor(self) -> float:
        """By how much this step's gradients are greater than those of a microbatch's own loss."""
        if self._factor is None:
            self._factor = 1.0 if self._ask is None else self._ask()
        return self._factor

    @staticmethod
    def replaying() -> bool:
        """Whether this is activation recomputation: a forward pass inside a backward pass."""
        return bool(torch._C._current_graph_task_id() != -1)

    def begin(self, iteration: int | None, gradient_factor: Callable[[], float] | None = None) -> None:
        """A step starts; `gradient_factor` is asked only if a hook wants to know it."""
        self._ask, self._factor = gradient_factor, None
        self.step += 1
        self.iteration = self.step if iteration is None else iteration
        self.microbatch = 0
        self._calls.clear()
        self._outputs.clear()

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward pass starts."""
        self.microbatch = microbatch

    def mark(self, output: Any) -> None:
        """Remember which microbatch made this output, for its backward pass."""
        for tensor in _tensors(output):
            self._outputs[tensor] = self.microbatch

    def backward(self, output: Any) -> None:
        """The backward pass from this output starts."""
        for tensor in _tensors(output):
            self.microbatch = self._outputs.get(tensor, self.microbatch)

    def key(self, site: str) -> Key:
        """The key of one pass through a site; passes of the same microbatch are counted.

        Recomputation counts by itself, so that a replayed pass gets the number that it had at first.
        """
        place = (site, self.microbatch, self.replaying())
        call = self._calls[place]
        self._calls[place] += 1
        return Key(site, self.step, self.iteration, self.microbatch, call)


def _tensors(output: Any) -> list[Tensor]:
    items = output if isinstance(output, (list, tuple)) else [output]
    return [t for t in items if isinstance(t, Tensor)]
