"""A rank whose tensor does not fit its layout still takes part in the collectives of an edit.

The other ranks wait in these collectives. In the first pass of a site the ranks compare the shapes of their
local tensors, and edit only if all of them fit. Later a rank whose tensor does not fit sends zeros of the
previous shape instead; forward and backward run the same collectives on every rank. The error is recorded
in both cases.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_flex.collectives import check_shard, guard_collective, max_over_ranks, replica_mesh
from megatron_flex.errors import FlexError, HookError
from megatron_flex.layout import Layout
from megatron_flex.layout.gradient_layout import conjugate_layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.local_edits import explain_gather

MAX_SHAPES = 4096  # that are kept
NONE = -(2**62)  # of a rank without a value to compare: below every number
UNLIKE = (
    "ranks along {axes} have local tensors of different shapes or dtypes there, this one {mine}, where "
    "layout {layout} makes them equal; run the same model on tensors of the same shape on every "
    "rank, or hook another point"
)


class ShapeGuard:
    """Tracks which local tensors fit their layout at the sites of gathered edits, and replaces the others by
    zeros.

    Args:
        mesh: the run's axes.
        trains: whether there are trainable modules now.
        keep: records an error for the end of the step; called with the site's name and the error.
    """

    def __init__(
        self, mesh: Mesh, trains: Callable[[], bool], keep: Callable[[str, Exception], None]
    ) -> None:
        self._mesh, self._trains, self._keep = mesh, trains, keep
        self._fit: set[tuple[str, torch.Size, Layout]] = set()
        self._last: dict[str, torch.Size] = {}
        self._varies: dict[str, set[int]] = {}  # the dims whose length has varied
        self._compared: set[str] = set()  # the sites whose local tensors ranks have compared
        self._new: set[str] = set()  # those compared in this step

    def admit(
        self, site: str, local: Tensor, layout: Layout, hooks: Sequence[HookFunction]
    ) -> tuple[Tensor | None, bool]:
        """The tensor that this rank contributes to the collectives of the edits at a site.

        Collective in the first pass of the site, over the ranks that take part.

        Args:
            site: the name of the site, or of its gradient.
            local: this rank's tensor.
            layout: its layout.
            hooks: the hooks that edit.

        Returns:
            The tensor, and whether it replaces `local`. None, on all ranks alike, if some tensor does not fit
            in the first pass; nothing is edited then.
        """
        if (site, local.shape, layout) in self._fit:
            return local, False
        error = _describe_wrong_blocks(local, layout, self._mesh)
        if error is not None:
            self._keep(site, error)
        if site not in self._compared:
            over = self._over(site, layout, hooks)
            if over.axes and not self._alike(site, local, layout, over, error is not None):
                return None, False
        if error is None:
            self._remember(site, local.shape, layout)
            return local, False
        return (self._zeros(site, local), True) if site in self._last else (None, False)

    def step_ends(self, failed: bool) -> bool:
        """End a step; if it `failed`, other ranks may not have, and its new sites are compared again.

        Returns:
            Whether there are such sites.
        """
        again = failed and bool(self._new)
        if again:
            self._fit = {at for at in self._fit if at[0] not in self._new}
            self._compared -= self._new
        self._new.clear()
        return again

    def _over(self, site: str, layout: Layout, hooks: Sequence[HookFunction]) -> Mesh:
        """The axes whose ranks communicate in the edits at a site; none if each rank edits its shard
        alone.
        """
        edits = {h: e for h in hooks if (e := h.editing_of(site)) is not None}
        names = [d.name or str(i) for i, d in enumerate(layout.dims)]
        # Whether a function failed is asked of all ranks, as none may use a result that others lack.
        asks = any(h.on_error == "skip" for h in edits)
        if not asks and not explain_gather(edits, layout, names, self._mesh, self._trains()):
            return Mesh()
        sizes = self._mesh.sizes
        live = {*layout.active_axes(sizes), *conjugate_layout(layout).active_axes(sizes)}
        once = any(h.run == "once" for h in edits)
        if not live <= {a.name for a in self._mesh} or not (live or asks or once):
            return Mesh()
        live |= {a.name for a in replica_mesh(layout, self._mesh)}
        return Mesh(tuple(a for a in self._mesh if a.name in live and a.size > 1))

    def _alike(self, site: str, local: Tensor, layout: Layout, over: Mesh, wrong: bool) -> bool:
        """Whether the local tensors of all ranks fit and have the same shape; the same result on all
        ranks.
        """
        uneven = [d.uneven for d in layout.dims] if not wrong else []
        lengths = [0 if u else n for u, n in zip(uneven, local.shape, strict=not wrong)]
        code = zlib.crc32(f"{lengths} {local.dtype}".encode())
        numbers = [NONE] * 4 if wrong else [local.ndim, -local.ndim, code, -code]
        with guard_collective():
            greatest = max_over_ranks([int(wrong), *numbers], over, f"the first edit at {site}")
        failed, most, least, high, low = greatest
        if failed:
            return False
        if (most, high) != (-least, -low):
            axes = "/".join(a.name for a in over)
            local_shape = f"{tuple(local.shape)} of {local.dtype}"
            self._keep(site, HookError(UNLIKE.format(axes=axes, mine=local_shape, layout=layout.describe())))
            return False
        self._new.add(site)
        self._compared.add(site)
        return True

    def _remember(self, site: str, shape: torch.Size, layout: Layout) -> None:
        last = self._last.get(site, shape)
        varies = self._varies.setdefault(site, set())
        if len(last) == len(shape):
            varies |= {i for i, (a, b) in enumerate(zip(last, shape, strict=True)) if a != b}
        if len(self._fit) >= MAX_SHAPES:
            self._fit.clear()
        self._last[site] = shape
        self._fit.add((site, shape, layout))

    def _zeros(self, site: str, local: Tensor) -> Tensor:
        """Zeros for a tensor: the last shape that fitted, with the current lengths of dims that vary."""
        last, varies = self._last[site], self._varies[site]
        alike = len(last) == local.ndim
        shape = [local.shape[i] if alike and i in varies else n for i, n in enumerate(last)]
        return local.detach().new_zeros(shape).requires_grad_(local.requires_grad)


def _describe_wrong_blocks(local: Tensor, layout: Layout, mesh: Mesh) -> FlexError | None:
    try:
        check_shard(local.shape, layout, mesh)
    except FlexError as error:
        return error
    return None
