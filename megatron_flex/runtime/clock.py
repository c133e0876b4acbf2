"""The step, iteration, microbatch and call that a tensor belongs to, and whether it is a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_flex.adapters import is_recomputing
from megatron_flex.layout import PackedSequences
from megatron_flex.runtime.captures import Key


class Clock:
    """The session updates the clock from the adapter's calls.

    Attributes:
        step: the number of runs of a schedule, or calls of the model outside one, since attaching; from 0.
        iteration: the framework's iteration number, or `step` if the framework has none.
        given_iteration: the iteration number of a launcher, which replaces the framework's; or None.
        seeds: the iteration that seeds the random numbers of edits (a launcher's also for calls outside a
            schedule, so that a resumed run draws other numbers), and how many steps in a row had it before.
        microbatch: the microbatch whose forward or backward pass runs.
        tokens: the number of tokens that this rank's losses of the step are summed over, where the framework
            divides by the tokens of all ranks at the end of the step; otherwise None.
        microbatches: the number of microbatches that have begun in the step on this rank.
        chunk: the virtual chunk that the microbatch runs through.
        packs: the packed sequences of the step by microbatch; none of a microbatch that is not packed.
        first_token: the tokens that a cache has of the text whose next tokens the model is called on; -1 if
            the cache does not tell how many.
        by_calls: whether the gradient factor comes from calls in a user's own step, and not from a schedule.
    """

    def __init__(self) -> None:
        self.step = -1
        self.iteration = -1
        self.given_iteration: int | None = None
        self.seeds = -1, 0
        self.microbatch = self.microbatches = 0
        self.tokens: Tensor | None = None
        self.packs: dict[int, PackedSequences] = {}
        self.first_token = 0
        self.chunk = 0
        self._calls: dict[tuple[str, int, bool], int] = {}
        self._passed: dict[tuple[str, int], dict[int, Tensor]] = {}  # samples of passes, by their call
        self._outputs: Any = WeakTensorKeyDictionary()
        self._ask: Callable[[], float] | None = None
        self._factor: float | None = None
        self.by_calls = False

    @property
    def gradient_factor(self) -> float:
        """The factor between this step's gradients and the gradients of a microbatch's own loss."""
        if self._factor is None:
            self._factor = 1.0 if self._ask is None else self._ask()
        return self._factor

    @property
    def pack(self) -> PackedSequences | None:
        """The packed sequences of the microbatch whose pass runs; None if it is not packed."""
        return self.packs.get(self.microbatch) if self.packs else None

    @staticmethod
    def replaying() -> bool:
        """Whether this is activation recomputation: a forward pass inside a backward pass."""
        return is_recomputing()

    def begin_step(self, iteration: int | None, gradient_factor: Callable[[], float] | None = None) -> None:
        """Begin a step; `gradient_factor` is called only if a hook needs the factor."""
        self._ask, self._factor = gradient_factor, None
        self.tokens, self.by_calls = None, False
        self.step += 1
        self.iteration = self.step if iteration is None else iteration
        known = self.iteration if self.given_iteration is None else self.given_iteration
        self.seeds = known, self.seeds[1] + 1 if known == self.seeds[0] else 0
        self.microbatch = self.chunk = 0
        self.microbatches = 1  # a single call outside a schedule, which reports no microbatch
        self._calls.clear()
        self._passed.clear()
        self._outputs.clear()
        self.packs.clear()

    def set_gradient_factor(self, gradient_factor: Callable[[], float] | None) -> None:
        """Set the gradient factor for a call in a user's own step, by an engine that scales losses."""
        if gradient_factor is not None:
            self._ask, self._factor, self.by_calls = gradient_factor, None, True

    def begin_forward(self, microbatch: int, chunk: int = 0) -> None:
        """Begin a microbatch's forward pass."""
        self.microbatch, self.chunk = microbatch, chunk
        self.microbatches = max(self.microbatches, microbatch + 1)

    def remember_output(self, output: Any) -> None:
        """Remember the microbatch and the chunk of this output, for its backward pass."""
        for tensor in _list_tensors(output):
            self._outputs[tensor] = self.microbatch, self.chunk

    def add_tokens(self, tokens: Tensor) -> None:
        """Add the number of tokens over which a microbatch's loss is summed."""
        self.tokens = tokens.detach() if self.tokens is None else self.tokens + tokens.detach()

    def begin_backward(self, output: Any) -> None:
        """Begin the backward pass from this output."""
        for tensor in _list_tensors(output):
            self.microbatch, self.chunk = self._outputs.get(tensor, (self.microbatch, self.chunk))

    def make_key(self, site: str, tensor: Tensor | None = None, replay: bool | None = None) -> Key:
        """Make the key of one pass through a site; passes of the same microbatch are counted.

        Recomputation has its own count, so that a replay gets the number of the first pass. Checkpointed
        regions are recomputed last to first: a module that runs in several regions is identified by its
        tensor.

        Args:
            site: the site's name.
            tensor: the tensor at the site, needed where a replay must get the right number.
            replay: whether this is a replay, if the caller has asked already.
        """
        if replay is None:
            replay = is_recomputing()
        place = (site, self.microbatch, replay)
        call = self._calls.get(place, 0)
        self._calls[place] = call + 1
        if tensor is None:
            pass
        elif replay:
            call = self._find_call(site, tensor, call)
        elif _may_be_recomputed():
            self._passed.setdefault((site, self.microbatch), {})[call] = _sample_entries(tensor)
        return _new_key(Key, (site, self.step, self.iteration, self.microbatch, call))

    def _find_call(self, site: str, tensor: Tensor, call: int) -> int:
        """The number of the first pass that this is the replay of; `call` if that is not certain."""
        if self._calls.get((site, self.microbatch, False), 0) < 2:
            return call
        samples = self._passed.get((site, self.microbatch), {})
        sample_now = _sample_entries(tensor) if samples else tensor
        same = [n for n, sample in samples.items() if torch.equal(sample, sample_now)]
        return same[0] if len(same) == 1 else call


_new_key: Callable[..., Key] = tuple.__new__  # one call, where that of a NamedTuple is two
_saved_tensors_hooks: Callable[[bool], Any] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


def _may_be_recomputed() -> bool:
    """Whether a backward pass may run this forward pass again.

    Checkpointing runs the first pass without gradients, or with hooks on saved tensors that recompute them.
    """
    if not torch.is_grad_enabled() or _saved_tensors_hooks is None:
        return True
    return _saved_tensors_hooks(True) is not None


SAMPLE_SIZE = 16  # entries of a tensor that identify its pass


def _sample_entries(tensor: Tensor) -> Tensor:
    """Some entries of the tensor, read without synchronization."""
    tensor = tensor.detach()
    step = max(1, tensor.numel() // SAMPLE_SIZE)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step].clone()
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]  # flattening would copy the tensor


def _list_tensors(output: Any) -> list[Tensor]:
    items = output if isinstance(output, (list, tuple)) else [output]
    return [t for t in items if isinstance(t, Tensor)]
