"""Edits the tensors of a site: on this rank's shard if all edits there are local, else gather,
edit, scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megatron_flex.collectives import Route
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.autograd_graph import weak_hook
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_runner import EditRunner
from megatron_flex.runtime.hook_collectives import gather_at_site, scatter_at_site
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.local_edits import LocalEditPlan, LocalEditPlanner
from megatron_flex.runtime.result_gradients import ResultGradients
from megatron_flex.runtime.stand_in import StandIns, beside
from megatron_flex.sites import EDITED_SUFFIX


class EditDispatcher:
    """Edits a local tensor, or its gradient: on this rank's shard, or between a gather and a scatter.

    Attributes:
        planner: decides which edits run on shards.
        stand_ins: zeros in place of local tensors that do not fit their layout.
        gradients: agreement on whether results need a gradient.
        compared: the comparison that `verify()` makes of each local edit; None otherwise.
    """

    def __init__(
        self,
        captures: CaptureDispatcher,
        editing: EditRunner,
        mesh: Mesh,
        gather_data_parallel: bool,
        backward_seen: Callable[[], None],
        version: Callable[[], int],
        peers: Callable[[], Mesh],
    ) -> None:
        self.captures, self.editing, self.mesh = captures, editing, mesh
        self._over_data, self._backward_seen = gather_data_parallel, backward_seen

        def trains() -> bool:
            return bool(editing.modules)

        self.planner = LocalEditPlanner(mesh, trains, version)
        self.stand_ins = StandIns(mesh, trains, editing.caught)
        self.gradients = ResultGradients(peers, lambda: editing.complete)
        self.compared: (
            Callable[[list[HookFunction], Key, Any, Tensor, LocalEditPlan, Tensor], None] | None
        ) = None

    def edit(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        layout: Layout,
        route: Route | None,
        record: bool,
    ) -> Tensor:
        """Edit a local tensor; with `record` the tensor before the edit is captured.

        A tensor that does not fit its layout is returned unedited, and zeros take its place in the
        collectives.
        """
        if route is not None:
            return self._edit_fitting(hooks, key, module, local, layout, route, record)
        taking, other = self.stand_ins.of(key.site, local, layout, hooks)
        if taking is None:
            self.editing.fired.update(hooks)
            self.editing.complete = False
            return self.gradients.settle(key.site, local, local)
        out = self._edit_fitting(hooks, key, module, taking, layout, None, record)
        return beside(local, out) if other else out

    def _edit_fitting(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        layout: Layout,
        route: Route | None,
        record: bool,
    ) -> Tensor:
        plan = self.planner.find_plan(hooks, key.site, local, layout, route)
        if plan is not None:
            return self.edit_shard(hooks, key, module, local, plan, record)
        full = gather_at_site(local, layout, route, self.mesh)
        if record:
            self.editing.apart(key.site, self.captures.keep_full, hooks, key, full, layout)
        made = self.edit_full(hooks, key, module, full, layout, record)
        return scatter_at_site(made, local, layout, route, self.mesh)

    def _report_backward(self, _: Any) -> None:
        self._backward_seen()

    def edit_shard(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        local: Tensor,
        plan: LocalEditPlan,
        record: bool,
    ) -> Tensor:
        """Edit this rank's shard. Nothing is communicated except the reductions of an edit."""
        if record:
            self.editing.apart(key.site, self.captures.keep_shard, hooks, key, local, plan.layout)
        made = self.editing.edit(hooks, key, module, plan.into(local), plan.layout, plan)
        out = self.gradients.settle(key.site, local, plan.outof(made, local))
        if self.compared is not None:
            self.editing.apart(key.site, self.compared, hooks, key, module, local, plan, out)
        capture_edited = [h for h in hooks if h.captures_edited]
        if record and capture_edited and not hooks[0].backward:
            after = key._replace(site=key.site + EDITED_SUFFIX)
            self.editing.apart(key.site, self.captures.keep_shard, capture_edited, after, out, plan.layout)
        return out

    def edit_full(
        self,
        hooks: list[HookFunction],
        key: Key,
        module: Any,
        full: Tensor,
        layout: Layout,
        record: bool,
    ) -> Tensor:
        """Run editing functions on a full tensor: all of them on an activation, or all on its gradient.

        With `record` the result is captured for the hooks that ask for it.
        """
        edited = full
        try:
            edited = self.editing.edit(hooks, key, module, full, layout)
        except Exception as error:  # the package's own error; the code below is collective
            self.editing.caught(key.site, error)
        edited = self.gradients.settle(key.site, full, edited)
        if self.editing.modules and edited.requires_grad and not hooks[0].backward:
            if self._over_data and "dp" not in layout.axes and self.mesh["dp"].size > 1:
                self.editing.guard(hooks[0], key, partial(_raise_no_batch_dim, key.site))
            # Outside a schedule all ranks must know of this backward pass, even if one rank edits for all.
            edited.register_hook(weak_hook(self._report_backward))  # never raises
        if record and any(h.captures_edited for h in hooks) and not hooks[0].backward:
            kept = [h for h in hooks if h.captures_edited]
            after = key._replace(site=key.site + EDITED_SUFFIX)
            self.editing.apart(key.site, self.captures.keep_full, kept, after, edited, layout)
        return edited


def _raise_no_batch_dim(site: str) -> None:
    raise HookError(
        f"{site} has no batch dim along which data parallel ranks could be concatenated, so gradients of "
        "trainable modules would be of another scale there; attach without gather_data_parallel"
    )
