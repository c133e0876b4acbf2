"""The sums over ranks inside an edit on shards, which a rank joins although its edit fails.

Every rank calls `Shard.sum` as often as the others, until the edit of one of them raises: the others then
wait in a sum, or in its gradient. In the first pass the ranks therefore meet before each sum and at the end
of the edit, and leave the tensor unedited if one of them failed. Later passes send nothing more: a rank whose
edit fails knows the sums of the pass before, and joins those that are left with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_flex.collectives.edit_exchange import run_beside
from megatron_flex.collectives.rank_agreement import max_over_ranks
from megatron_flex.errors import FlexError
from megatron_flex.mesh import Axis, Mesh


class FailedElsewhere(FlexError):
    """The edit failed on another rank, which has recorded the error."""


class SumCall(NamedTuple):
    """One sum of an edit.

    Attributes:
        like: the shape, dtype and device of what is summed, on the meta device.
        device: its device.
        axes: the axes to sum over.
        differentiable: whether the result needs a gradient.
    """

    like: Tensor
    device: torch.device
    axes: list[Axis]
    differentiable: bool


Join = Callable[[Tensor, list[Axis]], Tensor]  # a sum to which this rank contributes zeros, with its gradient


class EditSums:
    """The sums of one hook's edit at shards of one shape.

    Args:
        over: the axes of the ranks that may wait for each other in these sums.
        join: see `Join`.

    Attributes:
        running: that of the edit that runs now.
    """

    running: ClassVar[EditSums | None] = None

    def __init__(self, over: Mesh, join: Join) -> None:
        self._over, self._join = over, join
        # By whether autograd is on, and whether the shard needs a gradient: the sums of the last pass.
        self._known: dict[tuple[bool, bool], list[SumCall]] = {}
        self._calls: list[SumCall] = []
        self._results: list[Tensor] = []
        self._is_known = False

    def run(self, edit: Callable[[], Tensor], local: Tensor) -> Tensor:
        """Run an edit of a local shard; if it fails, join the sums that the other ranks are in.

        Raises:
            FailedElsewhere: in a first pass, the edit failed on another rank.
            Exception: what the edit raised.
        """
        mode = torch.is_grad_enabled(), local.requires_grad
        expected = self._known.get(mode)
        self._calls, self._results, self._is_known = [], [], expected is not None
        before, EditSums.running = EditSums.running, self
        try:
            edited = edit()
            if not self._is_known:
                self._meet(False)
        except FailedElsewhere:
            self._results = []
            raise
        except Exception:  # raised again: the peers wait in the sums that are left
            if expected is None:
                self._results = []
                self._meet(True)
            else:
                self._join_rest(expected)
            raise
        finally:
            EditSums.running = before
        self._known[mode], self._results = self._calls, []
        return edited

    def begin(self, axes: list[Axis]) -> None:
        """Called before each sum: in a first pass the ranks meet."""
        if axes and not self._is_known:
            self._meet(False)

    def note(self, summed: Tensor, result: Tensor, axes: list[Axis]) -> None:
        """Note a sum: what is summed, and the result, in whose gradient another sum is."""
        if axes:
            like = torch.empty(summed.shape, dtype=summed.dtype, device="meta")
            self._calls.append(SumCall(like, summed.device, axes, result.requires_grad))
            self._results.append(result)

    def connect(self, local: Tensor) -> Tensor:
        """The shard of a rank whose edit failed: the backward pass also joins the gradients of the sums."""
        results, self._results = [r for r in self._results if r.requires_grad], []
        if not results or not torch.is_grad_enabled():
            return local
        return run_beside(local, *results)

    def _join_rest(self, expected: list[SumCall]) -> None:
        for call in expected[len(self._calls) :]:
            zeros = torch.zeros_like(call.like, device=call.device)
            self._results.append(self._join(zeros.requires_grad_(call.differentiable), call.axes))

    def _meet(self, failed: bool) -> None:
        # A rank that failed goes on: its own error is raised.
        if max_over_ranks([int(failed)], self._over, "the sums of an edit")[0] and not failed:
            raise FailedElsewhere("the edit failed on another rank that holds a shard")
