"""Makes the passes of a session: decides where edits run, and composes what their hooks ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_flex.collectives import (
    IDENTITY,
    Route,
    is_leader_for,
    plan_exchange,
    replica_mesh,
    weak_hook,
)
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher, Saved
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_environment import EditEnvironment, find_replica_axis
from megatron_flex.runtime.edit_steps import PlannedEdit, anchor_saved, compose_step
from megatron_flex.runtime.edit_traits import changes_by_pass
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.local_edits import LocalEditPlan, LocalEditPlanner
from megatron_flex.runtime.result_gradients import ResultGradients
from megatron_flex.runtime.shape_guard import ShapeGuard
from megatron_flex.runtime.site_pass import After, Attach, Pass, PassEdits, Record, Take
from megatron_flex.sites import EDITED_SUFFIX

if TYPE_CHECKING:
    from megatron_flex.runtime.debug.hook_trace import Tracer

Compare = Callable[[Key, Tensor, Tensor, LocalEditPlan, Callable[[], Pass]], None]


class PassBuilder:
    """Makes passes of activations and of gradients.

    Attributes:
        planner: decides which edits run on shards.
        shape_guard: zeros in place of local tensors that do not fit their layout.
        gradients: agreement on whether results need a gradient.
        compared: the comparison that `verify()` makes of each local edit; None otherwise.
        tracer: prints each pass, while it is set.
    """

    def __init__(
        self,
        captures: CaptureDispatcher,
        editing: EditEnvironment,
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
        self.shape_guard = ShapeGuard(mesh, trains, editing.record_internal_error)
        self.gradients = ResultGradients(peers, lambda: editing.complete)
        self.compared: Compare | None = None
        self.tracer: Tracer | None = None

    def make(
        self,
        name: str,
        hooks: list[HookFunction],
        module: Any,
        local: Tensor,
        layout: Layout,
        route: Route | None,
        sinks: tuple[Record, ...] = (),
        attach: Attach | None = None,
        observer: Record | None = None,
        backward: bool = False,
    ) -> tuple[Pass, bool]:
        """The pass of tensors like `local`, and whether it holds for later tensors of the same shape.

        Collective over the ranks that hold the tensor, in the first pass of a site with edits.

        Args:
            name: the site, or the name of its gradient.
            hooks: the hooks there, on the tensor or on its gradient.
            module: the module at the site.
            local: this rank's tensor.
            layout: its layout.
            route: the route of expert rows.
            sinks: the sinks that take the local tensor.
            attach: attaches the hooks on the gradient.
            observer: takes the local tensor after the edits.
            backward: whether the tensor is a gradient.
        """
        if not any(h.editing_function for h in hooks):
            records = (*sinks, *self._list_captures(hooks, layout), *((observer,) if observer else ()))
            return Pass(hooks, records, None, attach, self.editing, self.gradients), True
        # What fails beside an edit must not keep this rank from the collectives of the edit.
        apart = self.editing.record_errors_of
        sinks = tuple((partial(apart, name, take), at) for take, at in sinks)
        substitute: Tensor | None = None
        if route is None:
            contribution, replaces_local = self.shape_guard.admit(name, local, layout, hooks)
            if contribution is None:  # on all ranks alike
                idle = PassEdits(name, (self._mark_incomplete,), layout, self.mesh, IDENTITY)
                return Pass(hooks, sinks, idle, attach, self.editing, self.gradients), False
            substitute = contribution if replaces_local else None
        saved = self.captures.list_distinct(hooks)
        keep = partial(apart, name, self._choose_capture(saved))
        records = (*sinks, *([(keep, layout)] if saved else []))
        shape = local.shape if substitute is None else substitute.shape
        plan = self.planner.find_plan(hooks, name, shape, layout, route)
        edits = self._plan_edits(name, hooks, module, shape, layout, route, plan, backward)
        after = self._list_after(edits, hooks, module, plan, backward)
        if observer is not None:
            after = (*after, partial(_observe, *observer))
        edits = replace(edits, substitute=substitute, after=after)
        return Pass(hooks, records, edits, attach, self.editing, self.gradients), substitute is None

    def _list_captures(self, hooks: list[HookFunction], layout: Layout) -> tuple[Record, ...]:
        """What captures the tensors of hooks of which none edits."""
        saved = self.captures.list_distinct(hooks)
        take = self._choose_capture(saved)
        if any(h.expected_shape for h in hooks):
            take = partial(self.captures.capture_expected, hooks)
        traced = [] if self.tracer is None else [(self.tracer.note, layout)]
        return ((take, layout), *traced) if saved else ()

    def _choose_capture(self, saved: Saved) -> Take:
        if [(h.selection, suffix) for h, suffix in saved] == [(None, "")]:
            return self.captures.recorder.shard  # one hook, under the name of the site
        return partial(self.captures.keep, saved)

    def _plan_edits(
        self,
        name: str,
        hooks: list[HookFunction],
        module: Any,
        shape: torch.Size,
        layout: Layout,
        route: Route | None,
        plan: LocalEditPlan | None,
        backward: bool,
    ) -> PassEdits:
        """The edits of hooks: on shards of this shape by a plan, otherwise on the full tensor."""
        editing = self.editing
        planned = self._list_edits(name, hooks, module, layout, plan)
        exchange: Any = plan.exchange if plan is not None else None
        if plan is None and route is None:
            exchange = plan_exchange(layout, self.mesh, shape)
        return PassEdits(
            name,
            tuple(compose_step(edit, planned[:n], editing) for n, edit in enumerate(planned)),
            layout,
            self.mesh,
            exchange,
            expecting=[h for h in hooks if h.expected_shape is not None],
            full_size=None if plan is None else plan.shard.full_size,
            follow=None if self.tracer is None else partial(self.tracer.follow, hooks, layout),
            anchor=anchor_saved(planned, editing),
            watch=None if plan or backward or not editing.modules else self._watch(name, hooks, layout),
        )

    def _list_edits(
        self, name: str, hooks: list[HookFunction], module: Any, layout: Layout, plan: LocalEditPlan | None
    ) -> list[PlannedEdit]:
        """The edits of hooks: on shards by a plan, otherwise on the full tensor."""
        holders, leads = replica_mesh(layout, self.mesh), is_leader_for(layout, self.mesh)
        replicas = find_replica_axis(layout, self.mesh)
        out = []
        for index, hook in enumerate(hooks):
            given = hook.editing_of(name)
            function = given if plan is None else plan.edits.get(hook)
            if given is None or function is None:
                continue
            at = hook.editing_at if plan is None else partial(plan.at, hook)
            find: Any = at if changes_by_pass(given) else None
            sums = None if plan is None else plan.sums.get(hook)
            out.append(PlannedEdit(hook, index, function, find, module, sums, holders, leads, replicas))
        return out

    def _watch(self, name: str, hooks: list[HookFunction], layout: Layout) -> Callable[[Key, Tensor], None]:
        """What tells the session of the backward pass through trainable modules."""
        editing = self.editing
        apart = self._over_data and "dp" not in layout.axes and self.mesh["dp"].size > 1

        def watch(key: Key, edited: Tensor) -> None:
            if apart:
                editing.guard(hooks[0], key, partial(_raise_no_batch_dim, name))
            # Outside a schedule all ranks must know of this backward pass, even if one rank edits for all.
            edited.register_hook(weak_hook(self._report_backward))  # never raises

        return watch

    def _report_backward(self, _: Tensor) -> None:
        self._backward_seen()

    def _list_after(
        self,
        edits: PassEdits,
        hooks: list[HookFunction],
        module: Any,
        plan: LocalEditPlan | None,
        backward: bool,
    ) -> tuple[After, ...]:
        """What takes the edited local tensor: the comparison of `verify()`, and captures."""
        out: list[After] = []
        editing, captures, compared, layout = self.editing, self.captures, self.compared, edits.layout
        saved = captures.list_distinct([h for h in hooks if h.captures_edited and not backward])
        if plan is not None and compared is not None:

            def compare(key: Key, local: Tensor, edited: Tensor, route: Route | None) -> None:
                def gathered() -> Pass:
                    shape = local.shape
                    full = self._plan_edits(edits.name, hooks, module, shape, layout, None, None, backward)
                    return Pass((), (), full, None, editing, self.gradients)

                editing.record_errors_of(key.site, compared, key, local, edited, plan, gathered)

            out.append(compare)
        if saved:

            def capture(key: Key, local: Tensor, edited: Tensor, route: Route | None) -> None:
                after = key._replace(site=key.site + EDITED_SUFFIX)
                editing.record_errors_of(key.site, captures.keep, saved, after, edited, layout, route)

            out.append(capture)
        return tuple(out)

    def _mark_incomplete(self, tensor: Tensor, key: Key, replay: bool) -> Tensor:
        self.editing.complete = False
        return tensor


def _observe(take: Take, layout: Layout, key: Key, _: Tensor, edited: Tensor, route: Route | None) -> None:
    take(key, edited, layout, route)


def _raise_no_batch_dim(site: str) -> None:
    raise HookError(
        f"{site} has no batch dim along which data parallel ranks could be concatenated, so gradients of "
        "trainable modules would be of another scale there; attach without gather_data_parallel"
    )
