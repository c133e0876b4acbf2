"""What a hook that reads does: this rank's part is kept, to be sent when the step is over."""

from __future__ import annotations

from torch import Tensor

from megatron_flex.collectives import Route, gather_rows, gather_whole, scatter_rows, scatter_whole
from megatron_flex.layout import Layout, whole_shape
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.editing import Editing
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.recorder import Recorder


class Reading:
    """The part of a Firing that reads."""

    def __init__(
        self, clock: Clock, recorder: Recorder, editing: Editing, mesh: Mesh, gather_data_parallel: bool
    ) -> None:
        self.clock, self.recorder, self.editing, self.mesh = clock, recorder, editing, mesh
        self._over_data = gather_data_parallel

    def read(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        """Keep what passes, to be sent later."""
        self.editing.fired.update(hooks)
        if not any(h.expected_shape for h in hooks):
            pass
        elif route is None and not any(d.uneven for d in layout.dims):
            self.editing.check_shapes(hooks, key, whole_shape(layout, local.shape, self.mesh.sizes))
        else:  # no rank knows it, so look at the tensor
            whole = self.gather(local, layout, route)
            self.editing.check_shapes(hooks, key, whole.shape)
            self.recorder.whole(key, whole, layout)
            return
        if route is None:
            self.recorder.shard(key, local, layout)
        else:
            self.recorder.rows(key, local, route)

    def record(self, place: str, whole: Tensor, replays: bool) -> Key:
        """Keep a tensor that an editing function has whole, under a name that is no site's.

        Args:
            place: the name.
            whole: as every rank that holds it has it.
            replays: whether the place may be passed again in recomputation, which is not kept.

        Returns:
            Its key, which a replayed pass shares with the first.
        """
        key = self.clock.key(place)
        first = not self._over_data or self.mesh["dp"].coord == 0
        if first and not (replays and self.clock.replaying()):
            self.recorder.whole(key, whole, Layout(()))
        return key

    def gather(self, local: Tensor, layout: Layout, route: Route | None) -> Tensor:
        """The whole on every rank."""
        return gather_rows(local, route) if route else gather_whole(local, layout, self.mesh)

    def scatter(self, whole: Tensor, local: Tensor, layout: Layout, route: Route | None) -> Tensor:
        """This rank's part of the whole."""
        return scatter_rows(whole, local, route) if route else scatter_whole(whole, local, layout, self.mesh)
