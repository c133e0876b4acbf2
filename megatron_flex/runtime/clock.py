"""The clock: which step, iteration, microbatch and call a tensor belongs to, and whether it is a replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_flex.adapters import replaying
from megatron_flex.runtime.captures import Key


class Clock:
    """Kept by the session from what the adapter tells.

    Attributes:
        step: runs of a schedule, or calls of the model outside one, since attaching; from 0.
        iteration: as the framework counts, or `step` where it does not.
        told: the iteration as a launcher counts, which schedules then have whoever counts beside it; or None.
        microbatch: the one whose forward or backward pass runs.
        tokens: how many this rank's losses of the step are summed over, where the framework divides by those
            of all ranks at its end; else None.
        microbatches: how many have begun in the step on this rank.
        chunk: the virtual chunk that it runs through.
        by_calls: whether the gradient factor is that of calls in a person's own step, and not of a schedule.
    """

    def __init__(self) -> None:
        self.step = -1
        self.iteration = -1
        self.told: int | None = None
        self.microbatch = self.microbatches = 0
        self.tokens: Tensor | None = None
        self.chunk = 0
        self._calls: Counter[tuple[str, int, bool]] = Counter()
        self._passed: dict[tuple[str, int], list[Tensor]] = {}
        self._outputs: Any = WeakTensorKeyDictionary()
        self._ask: Callable[[], float] | None = None
        self._factor: float | None = None
        self.by_calls = False

    @property
    def gradient_factor(self) -> float:
        """By how much this step's gradients are greater than those of a microbatch's own loss."""
        if self._factor is None:
            self._factor = 1.0 if self._ask is None else self._ask()
        return self._factor

    @staticmethod
    def replaying() -> bool:
        """Whether this is activation recomputation: a forward pass inside a backward pass."""
        return replaying()

    def begin(self, iteration: int | None, gradient_factor: Callable[[], float] | None = None) -> None:
        """A step starts; `gradient_factor` is asked only if a hook wants to know it."""
        self._ask, self._factor = gradient_factor, None
        self.tokens, self.by_calls = None, False
        self.step += 1
        self.iteration = self.step if iteration is None else iteration
        self.microbatch = self.chunk = 0
        self.microbatches = 1  # of a call by itself, which nothing else tells of
        self._calls.clear()
        self._passed.clear()
        self._outputs.clear()

    def scale(self, gradient_factor: Callable[[], float] | None) -> None:
        """The model is called in a person's own step, by an engine that scales losses."""
        if gradient_factor is not None:
            self._ask, self._factor, self.by_calls = gradient_factor, None, True

    def forward(self, microbatch: int, chunk: int = 0) -> None:
        """A microbatch's forward pass starts."""
        self.microbatch, self.chunk = microbatch, chunk
        self.microbatches = max(self.microbatches, microbatch + 1)

    def mark(self, output: Any) -> None:
        """Remember which microbatch, in which chunk, made this output, for its backward pass."""
        for tensor in _list_tensors(output):
            self._outputs[tensor] = self.microbatch, self.chunk

    def count(self, tokens: Tensor) -> None:
        """A microbatch's loss is a sum over so many tokens."""
        self.tokens = tokens.detach() if self.tokens is None else self.tokens + tokens.detach()

    def backward(self, output: Any) -> None:
        """The backward pass from this output starts."""
        for tensor in _list_tensors(output):
            self.microbatch, self.chunk = self._outputs.get(tensor, (self.microbatch, self.chunk))

    def key(self, site: str, tensor: Tensor | None = None) -> Key:
        """The key of one pass through a site; passes of the same microbatch are counted.

        Recomputation counts by itself, so that a replayed pass gets the number that it had at first. Parts of
        a model are recomputed last to first: a module that runs in several is known again by its tensor.

        Args:
            site: the site's name.
            tensor: what passes, where a replay must get its number right.
        """
        replay = self.replaying()
        place = (site, self.microbatch, replay)
        call = self._calls[place]
        self._calls[place] += 1
        if tensor is not None:
            before = self._passed.setdefault((site, self.microbatch), [])
            if not replay:
                before.append(_sample_entries(tensor))
            elif len(before) > 1:
                same = [n for n, sample in enumerate(before) if torch.equal(sample, _sample_entries(tensor))]
                call = same[0] if len(same) == 1 else call
        return Key(site, self.step, self.iteration, self.microbatch, call)


SAMPLE_SIZE = 16  # entries of a tensor by which its pass is known again


def _sample_entries(tensor: Tensor) -> Tensor:
    """Some entries, of which nothing has to wait."""
    tensor = tensor.detach()
    step = max(1, tensor.numel() // SAMPLE_SIZE)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step].clone()
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]  # to flatten it would copy all


def _list_tensors(output: Any) -> list[Tensor]:
    items = output if isinstance(output, (list, tuple)) else [output]
    return [t for t in items if isinstance(t, Tensor)]
