"""While `verify()` watches, edits that ran on ranks' parts run on the whole too, and are compared."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.collectives import gather_whole
from megatron_flex.errors import described
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.editing import call_editing
from megatron_flex.runtime.firing import Firing
from megatron_flex.runtime.hooks import HookFunction, name_of
from megatron_flex.runtime.locally import Way
from megatron_flex.runtime.streams import same_stream

BOUND = 1e-5  # of the greatest entry: sums over ranks are summed in another order


class Comparing:
    """Listens to a Firing until it is taken out.

    Attributes:
        found: what is wrong, the same on all ranks that hold a tensor.
    """

    def __init__(self, firing: Firing) -> None:
        self._firing = firing
        self.found: list[str] = []
        firing.compared = self.compare

    def stop(self) -> None:
        """Take it out."""
        self._firing.compared = None

    def compare(
        self, hooks: list[HookFunction], key: Key, module: Any, local: Tensor, way: Way, out: Tensor
    ) -> None:
        """Edit the whole too, and note if the parts make another one. Collective over who holds a part."""
        firing, editing = self._firing, self._firing.editing
        if firing.clock.replaying() and not hooks[0].backward:
            return
        with torch.no_grad():
            whole = gather_whole(local.detach(), way.layout, firing.mesh)
            got = gather_whole(out.detach(), way.layout, firing.mesh)
            words = " | ".join(name_of(e) for e in way.given.values())
            try:
                for index, hook in enumerate(hooks):
                    if hook in way.edits and not editing.skipping.was_left_out(key, index):
                        find = partial(hook.editing_at, key)
                        with same_stream(key, index, whole):
                            whole = call_editing(find, module, whole.clone(), Namespace(), nn.ModuleDict())
            except Exception as error:  # a person's function, which had parts before; no rank may stop here
                self._note(key, f"{words} ran on ranks' parts, but fails on the whole: {described(error)}")
                return
            far, most = difference(got, whole)
        room = max(BOUND, 8 * torch.finfo(got.dtype).eps) * most if got.is_floating_point() else 0.0
        if not far <= room:
            self._note(
                key,
                f"{words} makes another tensor of ranks' parts than of the whole, by {far:.3g} at most where "
                f"the greatest entry is {most:.3g}; it is not local along the dims that are cut",
            )

    def _note(self, key: Key, text: str) -> None:
        self.found.append(f"{key.site}, microbatch {key.microbatch}: {text}")


def difference(got: Tensor, want: Tensor) -> tuple[float, float]:
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
