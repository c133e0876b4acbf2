"""The target of a tap: dispatches one local tensor to the hooks at its site.

Hooks that only capture copy the tensor to the recorder. Edits run on the shard, or between a gather and a
scatter. Hooks on the gradient are attached to the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from megatron_flex.collectives import Route
from megatron_flex.layout import Layout, PackedSequences, name_batch_first, shard_over_data, without_data_axis
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.edit_dispatcher import EditDispatcher
from megatron_flex.runtime.edit_runner import EditRunner
from megatron_flex.runtime.gradient_dispatcher import GradientDispatcher
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import HookFunction, explain_unhookable, name_dims_at
from megatron_flex.runtime.layout_inference import LayoutInference
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.site_plan import SitePlan, SitePlanner
from megatron_flex.runtime.site_rejection import SiteRejection, raise_absent, raise_no_layout
from megatron_flex.sites import Site


class HookDispatcher:
    """Dispatches the tensors of a site to captures, edits and gradient hooks.

    Attributes:
        captures: records captures and feeds sinks.
        edits: runs edits.
        gradients: the same for the backward pass.
        inference: infers the layouts that no framework declares.
    """

    def __init__(
        self,
        registry: HookRegistry,
        clock: Clock,
        recorder: Recorder,
        editing: EditRunner,
        mesh: Mesh,
        gather_data_parallel: bool,
        backward_seen: Callable[[], None],
        peers: Callable[[], Mesh],
    ) -> None:
        self.registry, self.clock, self.editing, self.mesh = registry, clock, editing, mesh
        self._over_data = gather_data_parallel
        self.inference = LayoutInference(registry, editing, mesh)
        self.captures = CaptureDispatcher(clock, recorder, editing, mesh, gather_data_parallel)
        self.edits = EditDispatcher(
            self.captures, editing, mesh, gather_data_parallel, backward_seen, lambda: registry.version, peers
        )
        self._rejection = SiteRejection(editing)
        self.gradients = GradientDispatcher(
            registry, self.captures, self.edits, self.inference, self._rejection, backward_seen
        )
        self._planner = SitePlanner(registry, self.captures, self.edits, self.gradients, gather_data_parallel)

    def plan(self, site: Site) -> SitePlan:
        """The plan of a site for the hooks that are active now."""
        return self._planner.make(site, partial(self._dispatch, site, layout=None, route=None))

    def plan_generally(self, traced: bool) -> None:
        """Note that each call of a hook is printed, or no longer."""
        self._planner.traced = traced
        self.registry.note_change()

    def dispatch(
        self, site: Site, local: Tensor, layout: Layout | None = None, route: Route | None = None
    ) -> Tensor:
        """Dispatch a local tensor to the hooks at its site; if that raises, return the tensor unedited."""
        try:
            if self.clock.packs and (pack := self.clock.pack) is not None:
                layout, route = _describe_packed(pack, site, layout, route)
            return self._dispatch(site, local, layout, route)
        except Exception as error:  # recorded: all ranks raise it at the end of the step
            self.editing.caught(site.name, error)
            return local

    def _dispatch(self, site: Site, local: Tensor, layout: Layout | None, route: Route | None) -> Tensor:
        hooks, later = self.registry.standing(site.name)
        why = explain_unhookable(local)
        if why and (not local.is_meta or any(h.save or h.tensor_sink is not None for h in (*hooks, *later))):
            self._rejection.omit_hooks(site.name, why, [*hooks, *later])
            return local
        acting = bool(later) or any(h.editing_function for h in hooks)
        key = self.clock.key(site.name, local if acting else None)
        if layout is None:
            found = self.inference.layout(site, key, local) if site.inferred else site.layout
            if found is None:
                return local
            layout = found
        elif site.propagated and route is None:
            self.editing.apart(site.name, self.inference.note_layout, site.name, layout, local)
        names = name_dims_at(site, local, (*hooks, *later))
        own = name_batch_first(layout, names) if site.inferred and not route else layout
        if self._over_data and not route:
            own = without_data_axis(own)  # the layout on each data parallel rank, which dumps record
        if not self.clock.replaying():
            self.captures.feed_sinks(hooks, key, local, own, route)
        if self._over_data and not route:
            layout = shard_over_data(own)
        module = getattr(site.tap, "module", None)
        out = self._run_hooks(module, hooks, key, local, layout, route)
        try:
            return self.gradients.attach(site, later, key, out, own, layout, route)
        except Exception as error:  # keep the edited tensor: other ranks wait for its backward pass
            self.editing.caught(site.name, error)
            return out

    def _run_hooks(
        self,
        module: Any,
        hooks: list[HookFunction],
        key: Key,
        local: Tensor,
        layout: Layout,
        route: Route | None,
    ) -> Tensor:
        record = any(h.save for h in hooks) and not self.clock.replaying()
        if not any(h.editing_function for h in hooks):
            if record:
                self.captures.capture(hooks, key, local, layout, route)
            return local
        return self.edits.edit(hooks, key, module, local, layout, route, record)

    def report_absent(self, site: Site, count: int) -> None:
        """Record that a call had only `count` tensors, and not the tensor of the site."""
        self.editing.apart(site.name, self._reject_absent, site, count)

    def _reject_absent(self, site: Site, count: int) -> None:
        if site.index == 0:
            self.editing.reasons[site.name] = "there is no tensor"
            return
        for hook in self.registry.at(site.name):
            self.editing.guard(hook, self.clock.key(site.name), partial(raise_absent, site, count))

    def dispatch_unknown(self, site: Site, local: Tensor, why: str) -> Tensor:
        """Dispatch a tensor for which no rule has a layout: only a hook's expected shape can supply one."""
        if self.registry.expected(site.name) is not None:
            return self.dispatch(site, local)
        self.editing.apart(site.name, self._reject_unknown, site, why)
        return local

    def _reject_unknown(self, site: Site, why: str) -> None:
        for hook in self.registry.at(site.name):
            key = self.clock.key(site.name)
            self._rejection.reject(hook, site.name, key, why, partial(raise_no_layout, site, why))


def _describe_packed(
    pack: PackedSequences, site: Site, layout: Layout | None, route: Route | None
) -> tuple[Layout | None, Route | None]:
    """The layout, and the route of expert rows, of a tensor of packed sequences.

    Where no framework declares the layout it stays open.
    """
    if route is not None:
        dispatch = route.dispatch
        dispatch.stream = pack.layout_of(dispatch.stream)  # of all routes of this call
        route = replace(route, token_layout=pack.layout_of(route.token_layout))
    if layout is None and site.inferred:
        return None, route
    return pack.layout_of(site.layout if layout is None else layout), route


NO_PLAN = SitePlan(-1, None)


class SiteDispatch:
    """The callback of a site's tap: executes the plan of the site."""

    def __init__(self, dispatcher: HookDispatcher, site: Site) -> None:
        self._dispatcher, self._site, self._registry = dispatcher, site, dispatcher.registry
        self._packs = dispatcher.clock.packs  # the clock's own dict: a pass that asks the clock costs a call
        self._plan = NO_PLAN
        dispatcher.captures.note_heads(site)

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Route | None = None) -> Tensor:
        """Dispatch a tensor to the hooks of the site; return the edited tensor."""
        try:
            plan = self._plan
            if plan.revision != self._registry.revision:
                plan = self._plan = self._dispatcher.plan(self._site)
            if plan.run is not None and layout is None and route is None and not self._packs:
                return plan.run(local)
        except Exception as error:  # recorded: all ranks raise it at the end of the step
            self._dispatcher.editing.caught(self._site.name, error)
            return local
        return self._dispatcher.dispatch(self._site, local, layout, route)

    def unknown(self, local: Tensor, why: str) -> Tensor:
        """Dispatch a tensor whose layout no rule knows; `why`: the reason."""
        return self._dispatcher.dispatch_unknown(self._site, local, why)

    def absent(self, count: int) -> None:
        """Record that the call had only `count` tensors, and not the tensor of the site."""
        self._dispatcher.report_absent(self._site, count)
