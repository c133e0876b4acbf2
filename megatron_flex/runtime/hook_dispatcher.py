"""The target of a tap: finds the pass of a local tensor at its site, and runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_flex.collectives import Route
from megatron_flex.layout import (
    TENSOR_AXIS,
    Layout,
    PackedSequences,
    infer_layout,
    name_batch_first,
    shard_over_data,
    without_data_axis,
)
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.edit_environment import EditEnvironment
from megatron_flex.runtime.gradient_dispatcher import GradientDispatcher
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import explain_unhookable, is_low_precision
from megatron_flex.runtime.layout_inference import LayoutInference
from megatron_flex.runtime.pass_builder import PassBuilder
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.site_pass import Attach, Pass, Record, Take
from megatron_flex.runtime.site_rejection import SiteRejection, raise_absent, raise_captured, raise_no_layout
from megatron_flex.sites import DimNames, Site

if TYPE_CHECKING:
    from megatron_flex.runtime.debug.hook_trace import Tracer

MAX_PASSES = 1024  # that a site remembers; sequences of ever new lengths make new ones
# The number of the backward pass that runs, -1 if none does. A forward pass inside one is recomputation.
_running_backward = torch._C._current_graph_task_id


class HookDispatcher:
    """What the sites of a session have in common.

    Attributes:
        captures: records captures and feeds sinks.
        passes: makes what happens at a site.
        gradients: dispatches gradients.
        inference: infers the layouts that no framework declares.
        over_data: whether captures and edits concatenate the samples of all data parallel ranks.
        alone: whether there is one tensor parallel rank.
        observer: takes all local tensors after their edits, with their layouts on each data parallel rank,
            while it is set.
    """

    def __init__(
        self,
        registry: HookRegistry,
        clock: Clock,
        recorder: Recorder,
        editing: EditEnvironment,
        mesh: Mesh,
        gather_data_parallel: bool,
        backward_seen: Callable[[], None],
        peers: Callable[[], Mesh],
    ) -> None:
        self.registry, self.clock, self.editing, self.mesh = registry, clock, editing, mesh
        self.over_data, self.alone = gather_data_parallel, mesh[TENSOR_AXIS].size == 1
        self.observer: Take | None = None
        self.inference = LayoutInference(registry, editing, mesh)
        self.captures = CaptureDispatcher(clock, recorder, editing, mesh, gather_data_parallel)
        self.passes = PassBuilder(
            self.captures, editing, mesh, gather_data_parallel, backward_seen, lambda: registry.version, peers
        )
        self.rejection = SiteRejection(editing)
        self.gradients = GradientDispatcher(
            registry, self.captures, self.passes, self.inference, self.rejection, backward_seen
        )

    def trace(self, tracer: Tracer | None) -> None:
        """Print each pass by a tracer, or no longer."""
        self.passes.tracer = tracer
        self.registry.note_change()

    def observe(self, observer: Take | None) -> None:
        """Let an observer take all local tensors at sites with taps, or no longer."""
        self.observer = observer
        self.registry.note_change()

    def report_absent(self, site: Site, count: int) -> None:
        """Record that a call had only `count` tensors, and not the tensor of the site."""
        self.editing.record_errors_of(site.name, self._reject_absent, site, count)

    def _reject_absent(self, site: Site, count: int) -> None:
        if site.index == 0:
            self.editing.reasons[site.name] = "there is no tensor"
            return
        for hook in self.registry.at(site.name):
            self.editing.guard(hook, self.clock.make_key(site.name), partial(raise_absent, site, count))

    def explain_unknown(self, site: Site, why: str) -> None:
        """Record that no rule has a layout for the tensor of a site."""
        self.editing.record_errors_of(site.name, self._reject_unknown, site, why)

    def _reject_unknown(self, site: Site, why: str) -> None:
        for hook in self.registry.at(site.name):
            key = self.clock.make_key(site.name)
            self.rejection.reject(hook, site.name, key, why, partial(raise_no_layout, site, why))


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


class SiteDispatch:
    """The callback of a site's tap."""

    def __init__(self, dispatcher: HookDispatcher, site: Site) -> None:
        self._dispatcher, self._site, self._name = dispatcher, site, site.name
        self._registry, self._clock, self._editing = dispatcher.registry, dispatcher.clock, dispatcher.editing
        self._packs = dispatcher.clock.packs  # the clock's own dict: a pass that asks the clock costs a call
        self._module = site.tap and site.tap.module
        self._revision = -1
        self._continued = False  # hooks are bound to a text whose earlier tokens are in a cache
        self._passes: dict[Any, Pass] = {}
        dispatcher.captures.note_heads(site)

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Route | None = None) -> Tensor:
        """Run the pass of a tensor through the site; if that raises, return the tensor unedited.

        Args:
            local: this rank's tensor.
            layout: its layout, where that is another one in each call.
            route: the route of expert rows.

        Raises:
            HookError: a CUDA graph is being captured.
        """
        # At once and not at the end of the step: a replay of the graph has no end of a step.
        if local.is_cuda and torch.cuda.is_current_stream_capturing():
            raise_captured(self._name)
        try:
            if self._revision != self._registry.revision:
                self._renew()
            clock = self._clock
            varies = not self._direct or layout is not None or route is not None or local.is_nested
            if varies or self._packs or clock.first_token or self._continued:
                return self._run_varying(local, layout, route)
            known = self._passes.get((local.shape, local.dtype, local.device, local.layout, type(local)))
            if known is None:
                if is_low_precision(type(local)) and not self._acts:
                    return self._read_dequantized(local, layout, route)
                if why := self._explain_unhookable(local):
                    return self._omit(local, why)
                known = self._make_direct(local)
            replay = _running_backward() != -1
            if replay and not self._acts:
                return local
            return known(
                local, self._clock.make_key(self._name, local if self._acts else None, replay), replay
            )
        except Exception as error:  # recorded: all ranks raise it at the end of the step
            self._editing.record_internal_error(self._name, error)
            return local

    def _renew(self) -> None:
        """Adopt the active hooks."""
        site, dispatcher = self._site, self._dispatcher
        self._hooks, self._later = hooks, later = self._registry.hooks_at(self._name)
        self._needing = [h for h in (*hooks, *later) if h.needs_dim_names]
        self._sinks = [h for h in hooks if h.tensor_sink is not None]
        self._taps = [h.feature_tap for h in hooks if h.feature_tap is not None]
        joins = any(tap.joins_gradients for tap in self._taps)
        self._acts = bool(later) or joins or any(h.editing_function for h in hooks)
        named = bool(self._needing) and site.dim_names is not None
        inferred = site.inferred and (not dispatcher.alone or named)
        self._direct = not site.propagated and not inferred
        self._passes = {}
        self._revision = self._registry.revision

    def _make_direct(self, local: Tensor) -> Pass:
        site = self._site
        layout = infer_layout(local.shape, None, 1) if site.inferred else site.layout
        at = local.shape, local.dtype, local.device, local.layout, type(local)
        return self._make(at, local, layout, None, ())

    def _run_varying(self, local: Tensor, layout: Layout | None, route: Route | None) -> Tensor:
        """Run the pass of a tensor whose layout, or the names of whose dims, are another one in each call."""
        site, dispatcher = self._site, self._dispatcher
        if is_low_precision(type(local)) and not self._acts:
            return self._read_dequantized(local, layout, route)
        if why := self._explain_unhookable(local):
            return self._omit(local, why)
        if self._packs and (pack := self._clock.pack) is not None:
            layout, route = _describe_packed(pack, site, layout, route)
        replay = _running_backward() != -1
        key = self._clock.make_key(self._name, local if self._acts else None, replay)
        if layout is None:
            layout = dispatcher.inference.layout(site, key, local) if site.inferred else site.layout
            if layout is None:
                return local
        elif site.propagated and route is None:
            note = dispatcher.inference.note_layout
            self._editing.record_errors_of(self._name, note, self._name, layout, local)
        known = self._name_dims(local)
        shape = local.shape if route is None else (route.token_layout, local.shape[1:])  # rows come and go
        at = layout, known, shape, local.dtype, local.device, local.layout
        varying = self._passes.get(at) or self._make(at, local, layout, route, known.names if known else ())
        return varying(local, key, replay, route)

    def _read_dequantized(self, local: Tensor, layout: Layout | None, route: Route | None) -> Tensor:
        """Let hooks that change nothing have the values of a tensor of 8 or 4 bits; the model keeps it."""
        self(local.detach().dequantize(), layout, route)
        return local

    def _name_dims(self, local: Tensor) -> DimNames | None:
        """Bind hooks to the names of the dims of the tensor; None where no hook needs them.

        Raises:
            HookError: a dim that a hook needs is unknown.
        """
        site, first = self._site, self._clock.first_token
        if not self._needing:
            return None
        if site.dim_names is not None:
            known = site.dim_names.find(local)
        elif first or self._continued:
            known = DimNames(site.dims, first)
            self._continued = bool(first)
        else:
            return None
        for hook in self._needing:
            hook.name_dims(self._site, known)
        return known

    def _make(
        self, at: Any, local: Tensor, layout: Layout, route: Route | None, names: tuple[str, ...]
    ) -> Pass:
        """Make the pass of a tensor, and remember it for those like it."""
        site, dispatcher = self._site, self._dispatcher
        replica_layout = name_batch_first(layout, names) if site.inferred and route is None else layout
        layout = replica_layout
        if dispatcher.over_data and route is None:
            replica_layout = without_data_axis(
                replica_layout
            )  # the layout on each data parallel rank, which dumps record
            layout = shard_over_data(replica_layout)
        gradients, captures = dispatcher.gradients, dispatcher.captures
        attach = None
        if self._later or (site.propagated and self._editing.modules):
            attach = partial(gradients.attach, site, self._later, replica_layout, layout)
        if self._taps:  # after the hooks on the gradient, which see what features add to it
            attach = partial(self._feed_features, attach, replica_layout)
        sinks: tuple[Record, ...] = ()
        if self._sinks:
            sinks = ((partial(captures.feed_sinks, self._sinks), replica_layout),)
        observer: Record | None = None
        if dispatcher.observer is not None:
            observer = (
                partial(self._editing.record_errors_of, self._name, dispatcher.observer),
                replica_layout,
            )
        site_pass, lasting = dispatcher.passes.make(
            self._name, self._hooks, self._module, local, layout, route, sinks, attach, observer
        )
        if lasting:
            if len(self._passes) >= MAX_PASSES:
                self._passes.clear()
            self._passes[at] = site_pass
        return site_pass

    def _feed_features(
        self, attach: Attach | None, layout: Layout, key: Key, local: Tensor, route: Route | None
    ) -> Tensor:
        """Let features take the tensor that continues in the model; an error is recorded."""
        out = local if attach is None else attach(key, local, route)
        try:
            for tap in self._taps:
                out = tap.take(key, out, layout, route)
        except Exception as error:  # recorded: other ranks wait for the backward pass of what is attached
            self._editing.record_internal_error(self._name, error)
        return out

    def _explain_unhookable(self, local: Tensor) -> str:
        """Why no hook at the site can have the tensor; empty if they can."""
        why = explain_unhookable(local)
        if why and local.is_meta and not any(h.save or h.tensor_sink for h in (*self._hooks, *self._later)):
            return ""  # an edit alone may get a tensor without values
        return why

    def _omit(self, local: Tensor, why: str) -> Tensor:
        if self._hooks or self._later:
            self._dispatcher.rejection.omit_hooks(self._name, why, [*self._hooks, *self._later])
        return local

    def unknown(self, local: Tensor, why: str) -> Tensor:
        """Dispatch a tensor for which no rule has a layout: only a hook's expected shape can supply one.

        Args:
            local: this rank's tensor.
            why: the reason.
        """
        if self._registry.expected(self._name) is not None:
            return self(local)
        self._dispatcher.explain_unknown(self._site, why)
        return local

    def absent(self, count: int) -> None:
        """Record that the call had only `count` tensors, and not the tensor of the site."""
        self._dispatcher.report_absent(self._site, count)
