"""The plan of a site: what happens to each tensor there, worked out once for the active hooks.

A plan holds while `HookRegistry.revision` stays. Executing it looks nothing up and derives nothing: hooks,
layouts, collectives and editing functions are in it. What is rare goes the general way, through
`HookDispatcher.dispatch`, and the plan says so: layouts that vary from call to call, packed rows of experts,
trainable modules, values that edits share, `run="once"`, `on_error="skip"`, `expected_shape`, tracing and
verification. The first pass of an edit goes that way too, as ranks compare their tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_flex.adapters import is_recomputing
from megatron_flex.layout import (
    TENSOR_AXIS,
    Layout,
    infer_layout,
    name_batch_first,
    shard_over_data,
    without_data_axis,
)
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.edit_dispatcher import EditDispatcher
from megatron_flex.runtime.edit_traits import changes_by_pass
from megatron_flex.runtime.function_analysis import uses_context
from megatron_flex.runtime.gradient_dispatcher import GradientDispatcher
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import HookFunction, explain_unhookable
from megatron_flex.runtime.planned_edits import plan_pass
from megatron_flex.sites import DimNames, Site

General = Callable[[Tensor], Tensor]
MAX_SHAPES = 1024  # shapes whose passes a site remembers; sequences of ever new lengths make new ones


@dataclass(frozen=True, slots=True)
class SitePlan:
    """What happens at a site.

    Attributes:
        revision: the revision of the registry that it is made of.
        run: takes the local tensor of a pass and returns the one to go on with; None where every pass goes
            the general way.
    """

    revision: int
    run: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, slots=True)
class SiteHooks:
    """The hooks at a site, with the layouts of its tensor.

    Attributes:
        site: the site.
        hooks: the hooks on the tensor.
        later: the hooks on its gradient.
        own: the layout on each data parallel rank, which sinks record.
        layout: the layout that captures and edits have.
    """

    site: Site
    hooks: list[HookFunction]
    later: list[HookFunction]
    own: Layout
    layout: Layout


class SitePlanner:
    """Makes the plans of a session's sites.

    Attributes:
        traced: whether each call of a hook is printed, which the general way does.
    """

    def __init__(
        self,
        registry: HookRegistry,
        captures: CaptureDispatcher,
        edits: EditDispatcher,
        gradients: GradientDispatcher,
        gather_data_parallel: bool,
    ) -> None:
        self._registry, self._captures, self._edits, self._gradients = registry, captures, edits, gradients
        self._over_data = gather_data_parallel
        self._one_rank = edits.mesh[TENSOR_AXIS].size == 1
        self.traced = False

    def make(self, site: Site, general: General) -> SitePlan:
        """The plan of a site for the active hooks; `general` dispatches a tensor the general way."""
        hooks, later = self._registry.standing(site.name)
        run: Callable[[Tensor], Tensor] | None = None
        if not self._needs_general(site, hooks):
            make = partial(self._make_run, site, hooks, later, general)
            if not site.inferred:
                run = make((), site.layout)
            else:
                needing = [h for h in (*hooks, *later) if h.needs_dim_names]
                run = InferredSite(site, needing, make, general)
        return SitePlan(self._registry.revision, run)

    def _needs_general(self, site: Site, hooks: list[HookFunction]) -> bool:
        """Whether every pass of the site goes the general way."""
        if self.traced or site.propagated or (site.inferred and not self._one_rank):
            return True
        edits = [e for h in hooks if (e := h.editing_of(site.name)) is not None]
        modules = self._edits.editing.modules
        if edits and (modules or self._edits.compared is not None):
            return True
        if any(uses_context(e) or changes_by_pass(e) for e in edits):
            return True
        return any(
            h.expected_shape is not None or h.run == "once" or h.on_error == "skip" or h.captures_edited
            for h in hooks
        )

    def _make_run(
        self,
        site: Site,
        hooks: list[HookFunction],
        later: list[HookFunction],
        general: General,
        names: tuple[str, ...],
        layout: Layout,
    ) -> Callable[[Tensor], Tensor]:
        own = name_batch_first(layout, names) if site.inferred else layout
        if self._over_data:
            own = without_data_axis(own)
            layout = shard_over_data(own)
        parts = SiteHooks(site, hooks, later, own, layout)
        if any(h.editing_function for h in hooks):
            return SiteEdit(parts, self._captures, self._edits, self._gradients, general)
        return SiteRead(parts, self._captures, self._gradients, general)


class InferredSite:
    """The passes of a site without a declared layout on one rank, by what is known of its tensor's dims.

    Args:
        site: the site.
        needing: its hooks that depend on the names of the dims.
        make: makes the passes of tensors whose dims have these names and this layout.
        general: dispatches a tensor the general way.
    """

    def __init__(
        self,
        site: Site,
        needing: list[HookFunction],
        make: Callable[[tuple[str, ...], Layout], Callable[[Tensor], Tensor]],
        general: General,
    ) -> None:
        self._site, self._make, self._general = site, make, general
        self._needing = needing if site.dim_names is not None else []
        self._by_dims: dict[tuple[int, DimNames | None], Callable[[Tensor], Tensor]] = {}

    def __call__(self, local: Tensor) -> Tensor:
        """Run the pass."""
        known = None
        if self._needing and self._site.dim_names is not None:
            known = self._site.dim_names.find(local)
            if known.first:  # another one in each call
                return self._general(local)
            for hook in self._needing:
                hook.name_dims(self._site, known)
        run = self._by_dims.get((local.ndim, known))
        if run is None:
            if explain_unhookable(local):
                return self._general(local)
            made = self._make(known.names if known else (), infer_layout(local.shape, None, 1))
            run = self._by_dims[local.ndim, known] = made
        return run(local)


class SiteRead:
    """The passes of a site whose hooks capture its tensor, feed sinks, or are on its gradient."""

    def __init__(
        self, parts: SiteHooks, captures: CaptureDispatcher, gradients: GradientDispatcher, general: General
    ) -> None:
        self._parts, self._captures, self._gradients = parts, captures, gradients
        self._general, self._name, self._later = general, parts.site.name, parts.later
        self._clock, self._fired = captures.clock, captures.editing.fired
        self._hooks, self._own, self._layout = parts.hooks, parts.own, parts.layout
        self._sinks = [h for h in parts.hooks if h.tensor_sink is not None]
        self._saved = captures.list_distinct(parts.hooks)
        # One hook captures the tensor under the name of the site.
        self._entire = [(h.wanted, suffix) for h, suffix in self._saved] == [(None, "")]

    def __call__(self, local: Tensor) -> Tensor:
        """Run the pass."""
        if explain_unhookable(local):
            return self._general(local)
        replay, later = is_recomputing(), self._later
        if replay and not later:
            return local
        key = self._clock.key(self._name, local if later else None, replay)
        if not replay:
            self._fired.update(self._hooks)
            if self._sinks:
                self._captures.feed_sinks(self._sinks, key, local, self._own, None)
            if self._entire:
                self._captures.recorder.shard(key, local, self._layout)
            elif self._saved:
                self._captures.keep_distinct(self._saved, key, local, self._layout)
        if not later:
            return local
        parts = self._parts
        return self._gradients.attach(parts.site, later, key, local, parts.own, parts.layout, None)


class SiteEdit:
    """The passes of a site that edit its tensor: the first of each shape goes the general way."""

    def __init__(
        self,
        parts: SiteHooks,
        captures: CaptureDispatcher,
        edits: EditDispatcher,
        gradients: GradientDispatcher,
        general: General,
    ) -> None:
        self._parts, self._captures, self._edits, self._gradients = parts, captures, edits, gradients
        self._general, self._name, self._later = general, parts.site.name, parts.later
        self._clock, self._editing = captures.clock, captures.editing
        self._module = getattr(parts.site.tap, "module", None)
        self._sinks = [h for h in parts.hooks if h.tensor_sink is not None]
        self._saved = captures.list_distinct(parts.hooks)
        self._passes: dict[torch.Size, Any] = {}

    def __call__(self, local: Tensor) -> Tensor:
        """Run the pass."""
        planned = self._passes.get(local.shape)
        if planned is None or explain_unhookable(local):
            return self._run_first(local)
        replay = is_recomputing()
        key = self._clock.key(self._name, local, replay)
        saved = None if replay else self._saved
        if not replay:
            self._editing.fired.update(self._parts.hooks)
            if self._sinks:
                self._captures.feed_sinks(self._sinks, key, local, self._parts.own, None)
        out: Tensor = planned.run(local, key, self._module, replay, saved)
        if not self._later:
            return out
        parts = self._parts
        try:
            return self._gradients.attach(parts.site, self._later, key, out, parts.own, parts.layout, None)
        except Exception as error:  # keep the edited tensor: other ranks wait for its backward pass
            self._editing.caught(self._name, error)
            return out

    def _run_first(self, local: Tensor) -> Tensor:
        """Go the general way, and plan the passes that follow with tensors of this shape."""
        out = self._general(local)
        if self._editing.failure is None:
            self._editing.apart(self._name, self._plan_passes, local)
        return out

    def _plan_passes(self, local: Tensor) -> None:
        """Plan the passes that follow with tensors of this shape."""
        parts, edits = self._parts, self._edits
        if not edits.stand_ins.fits(self._name, local.shape, parts.layout):
            return
        way = edits.planner.find_plan(parts.hooks, self._name, local, parts.layout, None)
        planned = plan_pass(parts.hooks, self._name, local.shape, parts.layout, way, edits)
        if planned is not None:
            if len(self._passes) >= MAX_SHAPES:
                self._passes.clear()
            self._passes[local.shape] = planned
