"""While `verify()` watches, edits that ran on ranks' parts run on the whole too, and are compared."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.collectives import gather_full
from megatron_flex.errors import described
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.editing import call_editing_function
from megatron_flex.runtime.firing import HookDispatcher
from megatron_flex.runtime.hooks import HookFunction, describe_edit
from megatron_flex.runtime.local_edits import LocalEditPlan
from megatron_flex.runtime.streams import seed_generators

ROUNDING_BOUND = 1e-5  # of the greatest entry: sums over ranks are summed in another order


class LocalEditCheck:
    """Listens to a Firing until it is taken out.

    Attributes:
        found: what is wrong, the same on all ranks that hold a tensor.
    """

    def __init__(self, firing: HookDispatcher) -> None:
        self._firing = firing
        self.found: list[str] = []
        firing.compared = self.compare

    def stop(self) -> None:
        """Take it out."""
        self._firing.compared = None

    def compare(
        self, hooks: list[HookFunction], key: Key, module: Any, local: Tensor, plan: LocalEditPlan, out: Tensor
    ) -> None:
        """Edit the whole too, and note if the parts make another one. Collective over who holds a part."""
        firing, editing = self._firing, self._firing.editing
        if firing.clock.replaying() and not hooks[0].backward:
            return
        with torch.no_grad():
            full = gather_full(local.detach(), plan.layout, firing.mesh)
            got = gather_full(out.detach(), plan.layout, firing.mesh)
            words = " | ".join(describe_edit(e) for e in plan.given.values())
            try:
                for index, hook in enumerate(hooks):
                    if hook in plan.edits and not editing.skipping.was_skipped(key, index):
                        find = partial(hook.editing_at, key)
                        with seed_generators(key, index, full):
                            full = call_editing_function(find, module, full.clone(), Namespace(), nn.ModuleDict())
            except Exception as error:  # a person's function, which had parts before; no rank may stop here
                self._note(key, f"{words} ran on ranks' parts, but fails on the whole: {described(error)}")
                return
            far, most = measure_difference(got, full)
        room = max(ROUNDING_BOUND, 8 * torch.finfo(got.dtype).eps) * most if got.is_floating_point() else 0.0
        if not far <= room:
            self._note(
                key,
                f"{words} makes another tensor of ranks' parts than of the whole, by {far:.3g} at most where "
                f"the greatest entry is {most:.3g}; it is not local along the dims that are cut",
            )

    def _note(self, key: Key, text: str) -> None:
        self.found.append(f"{key.site}, microbatch {key.microbatch}: {text}")


def measure_difference(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The greatest difference, and the greatest entry that there should be; what is no number counts too."""
    if not want.numel():
        return 0.0, 0.0
    exact = not want.is_floating_point() and not want.is_complex()
    one, other = (got.long(), want.long()) if exact else (got, want)
    same = (one == other) | ((one != one) & (other != other))
    far = (one - other).abs().masked_fill(same, 0).double()
    finite = other.abs().double()
    most = float(finite[finite.isfinite()].max()) if finite.isfinite().any() else 0.0
    return float(far.nan_to_num(nan=float("inf")).max()), most
