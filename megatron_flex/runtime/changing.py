"""What a hook that edits does: edit this rank's part, or gather, edit, scatter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megatron_flex.collectives import Route
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.editing import EditRunner
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.local_edits import LocalEditPlanner, LocalEditPlan
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.weak import weakly
from megatron_flex.sites import EDITED_SUFFIX


class EditDispatcher(CaptureDispatcher):
    """The part of a Firing that edits."""

    def __init__(
        self,
        clock: Clock,
        recorder: Recorder,
        editing: EditRunner,
        mesh: Mesh,
        gather_data_parallel: bool,
        backward_seen: Callable[[], None],
        version: Callable[[], int],
    ) -> None:
        super().__init__(clock, recorder, editing, mesh, gather_data_parallel)
        self._backward_seen = backward_seen
        self.locally = LocalEditPlanner(mesh, lambda: bool(editing.modules), version)
        self.compared: Callable[[list[HookFunction], Key, Any, Tensor, LocalEditPlan, Tensor], None] | None = None

    def edited(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        layout: Layout,
        route: Route | None,
        record: bool,
    ) -> Tensor:
        """Edit, on this rank's part or on the whole; with `record` what was there before is kept."""
        way = self.locally.way(hooks, key, local, layout, route)
        if way is not None:
            return self.on_part(hooks, key, module, local, way, record)
        whole = self.gather(local, layout, route)
        if record:
            self.keep(hooks, key, whole, layout)
        return self.scatter(self.edit(hooks, key, module, whole, layout, record), local, layout, route)

    def _backward_came(self, _: Any) -> None:
        self._backward_seen()

    def on_part(
        self, hooks: list[HookFunction], key: Key, module: Any, local: Tensor, way: LocalEditPlan, record: bool
    ) -> Tensor:
        """Edit this rank's part. Nothing is sent but what an edit sums over ranks."""
        if record:
            self.keep_shard(hooks, key, local, way.layout)
        made = self.editing.edit(hooks, key, module, way.into(local), way.layout, way)
        out = way.outof(made, local)
        if self.compared is not None:
            self.compared(hooks, key, module, local, way, out)
        behind = [h for h in hooks if h.behind]
        if record and behind and not hooks[0].backward:
            self.keep_shard(behind, key._replace(site=key.site + EDITED_SUFFIX), out, way.layout)
        return out

    def edit(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        whole: Tensor,
        layout: Layout,
        record: bool,
    ) -> Tensor:
        """Pass a whole through editing functions, all of them on a tensor or all on its gradient.

        With `record` what comes of it is kept for hooks that want that.
        """
        edited = self.editing.edit(hooks, key, module, whole, layout)
        if self.editing.modules and edited.requires_grad and not hooks[0].backward:
            if self._over_data and "dp" not in layout.axes and self.mesh["dp"].size > 1:
                self.editing.guard(hooks[0], key, partial(_raise_no_batch_dim, key.site))
            # Outside a schedule all ranks must know of this backward pass, also where one rank edits for all.
            edited.register_hook(weakly(self._backward_came))
        if record and any(h.behind for h in hooks) and not hooks[0].backward:
            kept = [h for h in hooks if h.behind]
            self.keep(kept, key._replace(site=key.site + EDITED_SUFFIX), edited, layout)
        return edited


def _raise_no_batch_dim(site: str) -> None:
    raise HookError(
        f"{site} has no batch dim along which data parallel ranks could be put together, so gradients of "
        "trainable modules would be of another scale there; attach without gather_data_parallel"
    )
