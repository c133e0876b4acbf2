"""Agreement on whether the result of an edit needs a gradient where the edited tensor needs none.

A frozen model with a trained parameter in an edit: the result of the edit is the first tensor that needs a
gradient, and every collective of the backward pass behind it follows from that, those of the model included.
A rank whose edit failed has the unedited tensor and cannot see it. In the first such pass of a site the ranks
therefore exchange whether the result needs a gradient; later passes use what they know, and send nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_flex.collectives import guard_collective, max_over_ranks, require_gradient
from megatron_flex.mesh import Mesh

STAGE_AXES = ("dp", "cp", "tp")  # ranks along these make the same passes of a site


class ResultGradients:
    """Has the results of all ranks at a site need a gradient, or none of them.

    Args:
        peers: returns the mesh of the ranks that make the same passes as this one.
        complete: whether no edit of the last pass failed, or was left out, on this rank.
    """

    def __init__(self, peers: Callable[[], Mesh], complete: Callable[[], bool]) -> None:
        self._peers, self._complete = peers, complete
        # By site, and whether data parallel ranks took part: whether results need a gradient.
        self._needs: dict[tuple[str, bool], bool] = {}
        self._unconfirmed: dict[tuple[str, bool], bool] = {}
        self._needed: set[tuple[str, bool]] = set()  # sites with results that needed one in this step
        self._connected: set[tuple[str, bool]] = set()  # sites with results that were only made to need one

    def settle(self, site: str, entry: Tensor, edited: Tensor) -> Tensor:
        """Return an edit's result, which needs a gradient if those of other ranks do.

        Collective over the stage in the first pass in which the edited tensor needs no gradient and autograd
        is on.

        Args:
            site: the name of the site, or of its gradient.
            entry: the tensor before the edit.
            edited: the result; the unedited tensor where the edit failed.
        """
        if entry.requires_grad or not torch.is_grad_enabled():
            return edited
        if not (entry.is_floating_point() or entry.is_complex()):
            return edited
        mesh = self._peers()
        place = site, mesh["dp"].size > 1
        needs = self._needs.get(place)
        if needs is None:
            needs = self._agree(place, edited, mesh)
        if edited.requires_grad:
            if place in self._needs:  # otherwise no rank knows: this is not agreed on
                self._needs[place] = True
                self._needed.add(place)
            return edited
        if not needs:
            return edited
        if self._complete():  # the other ranks do the same
            self._connected.add(place)
        return require_gradient(edited)

    def _agree(self, place: tuple[str, bool], edited: Tensor, mesh: Mesh) -> bool:
        """Whether some rank's result needs a gradient; remembered if an edit succeeded on some rank."""
        over = Mesh(tuple(mesh[n] for n in STAGE_AXES if mesh[n].size > 1))
        with guard_collective():
            needs, clean = max_over_ranks(
                [int(edited.requires_grad), int(self._complete())],
                over,
                f"the result of the edit at {place[0]}",
            )
        if clean:
            self._needs[place] = bool(needs)
        return bool(needs)

    def clear(self) -> None:
        """Forget everything; called on all ranks alike, as hooks have changed."""
        self._needs.clear()

    def step_ends(self, mesh: Mesh) -> None:
        """End a step: without a `confirm`, the ranks of the mesh exchange anew in the next one.

        So they do at sites whose results have ceased to need a gradient.
        """
        self._unconfirmed = {}
        if self._needs:
            joint, ceased = mesh["dp"].size > 1, self._connected - self._needed
            to_confirm = {at: needs for at, needs in self._needs.items() if joint or not at[1]}
            self._needs = {at: needs for at, needs in self._needs.items() if at not in to_confirm}
            self._unconfirmed = {at: needs for at, needs in to_confirm.items() if at not in ceased}
            self._needed, self._connected = set(), set()

    def confirm(self) -> None:
        """Note that no rank failed in the step that has ended."""
        if self._unconfirmed:
            self._needs |= self._unconfirmed
