"""Backward hooks: dispatches the gradient of an activation or of a parameter to the hooks on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import Enter, Route, follow_replaced_gradient, weak_hook
from megatron_flex.layout import Layout
from megatron_flex.layout.gradient_layout import (
    PARTS_DIFFER,
    USES_DIFFER,
    GradientLayout,
    explain_unlike_conjugate,
    find_activation_gradient,
    find_parameter_gradient,
)
from megatron_flex.runtime.capture_dispatcher import CaptureDispatcher
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.hooks import HookFunction, explain_unhookable
from megatron_flex.runtime.layout_inference import LayoutInference
from megatron_flex.runtime.pass_builder import PassBuilder
from megatron_flex.runtime.site_pass import Pass
from megatron_flex.runtime.site_rejection import (
    SiteRejection,
    raise_captured,
    raise_no_gradient_layout,
    raise_partial_gradient,
)
from megatron_flex.sites import GRADIENT_SUFFIX, Site

MAX_PASSES = 4096  # that are remembered, of all gradients
NO_LAYOUT = (PARTS_DIFFER, USES_DIFFER)  # reasons for which no layout describes a gradient


class GradientDispatcher:
    """Dispatches a gradient to its hooks: captures, sinks, edits.

    Every entry point from a backward pass records an error instead of raising it, and returns the gradient
    unedited.
    """

    def __init__(
        self,
        registry: HookRegistry,
        captures: CaptureDispatcher,
        passes: PassBuilder,
        inference: LayoutInference,
        rejection: SiteRejection,
        backward_seen: Callable[[], None],
    ) -> None:
        self.registry, self.captures, self.passes, self.inference = registry, captures, passes, inference
        self.clock, self.editing = captures.clock, captures.editing
        self._rejection, self._backward_seen = rejection, backward_seen
        self._revision = -1
        self._known: dict[Any, Pass] = {}

    def attach(
        self,
        site: Site,
        later: list[HookFunction],
        replica_layout: Layout,
        layout: Layout,
        key: Key,
        out: Tensor,
        route: Route | None,
    ) -> Tensor:
        """Attach the hooks on a tensor's gradient to the edited tensor, and return that tensor.

        An error is recorded: the edited tensor continues, as other ranks wait for its backward pass.
        """
        try:
            return self._attach(site, later, replica_layout, layout, key, out, route)
        except Exception as error:  # recorded, as above
            self.editing.record_internal_error(site.name, error)
            return out

    def _attach(
        self,
        site: Site,
        later: list[HookFunction],
        replica_layout: Layout,
        layout: Layout,
        key: Key,
        out: Tensor,
        route: Route | None,
    ) -> Tensor:
        module = site.tap and site.tap.module
        if site.propagated and self.editing.modules and out.requires_grad:
            find = find_activation_gradient(site.tap, layout)
            check = GradientDispatcher._check_trainable_gradient
            out.register_hook(self._make_graph_hook(check, site.name, find, layout, key))
        # The first pass of a checkpointed region has no autograd graph; its replay gets the hook.
        if not later or not torch.is_grad_enabled():
            return out
        if not out.requires_grad:
            self.editing.reasons[site.name] = "the tensor there needs no gradient"
            return out
        gradient_key = key._replace(site=site.name + GRADIENT_SUFFIX)
        back = route and route.for_gradient()
        find = find_activation_gradient(site.tap, layout)
        dumped = find
        if any(h.tensor_sink for h in later) and replica_layout != layout:
            dumped = find_activation_gradient(site.tap, replica_layout)
        owner = None if module is None else weakref.ref(module)  # the graph must not keep the model alive
        compare = "propagated" if site.propagated else "assumed" if self.inference.is_assumed(site) else ""
        arguments = site.name, find, dumped, owner, gradient_key, back, compare
        backward = self._make_graph_hook(GradientDispatcher._dispatch_activation, *arguments)
        # A node of its own: a tensor that is used elsewhere too (the residual beside a norm's input) also
        # receives a gradient from there, and a view that is masked in place loses its hooks.
        node = Enter.apply(out, GradientHooks(backward))  # type: ignore[no-untyped-call]  # torch does not type it
        return cast(Tensor, node)

    def _make_graph_hook(self, method: Callable[..., Tensor | None], place: str, *args: Any) -> Any:
        """Make a hook of the autograd graph that calls `method` with the site's name, `args` and the
        gradient.

        The hook records an error instead of raising it; the gradient is then unedited.
        """
        return weak_hook(self._run_guarded, method, place, *args)

    def _run_guarded(self, method: Callable[..., Tensor | None], place: str, *args: Any) -> Tensor | None:
        if args[-1].is_cuda and torch.cuda.is_current_stream_capturing():  # the last argument is the gradient
            raise_captured(place + GRADIENT_SUFFIX)
        try:
            return method(self, place, *args)
        except Exception as error:  # recorded: all ranks raise it at the end of the step
            self.editing.record_internal_error(place + GRADIENT_SUFFIX, error)
            self._backward_seen()
            return None

    def _check_trainable_gradient(
        self, name: str, find: Callable[[], GradientLayout], layout: Layout, key: Key, grad: Tensor
    ) -> None:
        """Refuse a trainable module where each rank would compute only a part of its gradient."""
        why = explain_unlike_conjugate(find(), layout)
        if not why:
            return
        for hook in (h for h in self.registry.at(name) if h.editing_function and not h.backward):
            self.editing.guard(hook, key, partial(raise_partial_gradient, name, why))

    def _dispatch_activation(
        self,
        name: str,
        find: Callable[[], GradientLayout],
        find_dumped: Callable[[], GradientLayout],
        owner: Callable[[], Any] | None,
        key: Key,
        route: Route | None,
        compare: str,
        grad: Tensor,
    ) -> Tensor | None:
        source, replica_layout = find(), find_dumped().layout
        layout = source.layout or self._expected_layout(name, key, source.reason, grad)
        if layout is None:
            why, shape = source.reason, source.reason not in NO_LAYOUT
            for hook in (h for h in self.registry.at(name) if h.backward):
                tell = partial(raise_no_gradient_layout, name, why, shape)
                self._rejection.reject(hook, name, key, why, tell)
            self._backward_seen()
            return None
        if compare == "assumed":
            edits = any(h.editing_function and h.backward for h in self.registry.at(name))
            if not self.inference.compare_ranks(name, key, grad, edits):
                self._backward_seen()
                return None
        elif compare and route is None:
            self.inference.note_layout(name + GRADIENT_SUFFIX, layout, grad)
        if replica_layout is not None:
            self.captures.feed_sinks(
                [h for h in self.registry.at(name) if h.backward], key, grad, replica_layout, route
            )
        return self.run_hooks(name, layout, owner and owner(), key, grad, route)

    def _expected_layout(self, name: str, key: Key, reason: str, grad: Tensor) -> Layout | None:
        """The layout of a gradient of which no rule says how it is sharded, from the shape that hooks expect.

        None without such a shape, and where it is known that no layout describes the gradient.
        """
        if self.registry.expected(name) is None or reason in NO_LAYOUT:
            return None
        return self.inference.layout_expected(name, key, grad, backward=True)

    def dispatch_parameter(self, site: ParameterSite, grad: Tensor | None) -> Tensor | None:
        """Dispatch a parameter's local gradient to its hooks; zeros if there is no gradient."""
        if grad is None:  # torch lets no hook replace a missing gradient
            if site.parameter is not None:
                self.dispatch_parameter(site, torch.zeros_like(site.parameter))
            return None
        edited = self._run_guarded(GradientDispatcher._dispatch_parameter, site.name, site, grad)
        if edited is not None:
            follow_replaced_gradient(grad, edited)
        return edited

    def _dispatch_parameter(self, _: str, site: ParameterSite, grad: Tensor) -> Tensor | None:
        if why := explain_unhookable(grad):
            self._rejection.omit_hooks(
                site.name + GRADIENT_SUFFIX, why, [h for h in self.registry.at(site.name) if h.backward]
            )
            self._backward_seen()
            return None
        key = self.clock.make_key(site.name + GRADIENT_SUFFIX)
        layout = self.inference.layout(site, key, grad) if site.inferred else site.layout
        if layout is None:
            self._backward_seen()
            return None
        source = find_parameter_gradient(site.gradient_layout_source, layout)
        if source.layout is None:
            why = source.reason
            for hook in (h for h in self.registry.at(site.name) if h.backward):
                self._rejection.reject(
                    hook, site.name, key, why, partial(raise_no_gradient_layout, site.name, why)
                )
            self._backward_seen()
            return None
        return self.run_hooks(site.name, source.layout, None, key, grad)

    def run_hooks(
        self,
        name: str,
        layout: Layout,
        module: Any,
        key: Key,
        grad: Tensor,
        route: Route | None = None,
    ) -> Tensor | None:
        """Dispatch a local gradient, in `layout`, to its hooks."""
        hooks = [h for h in self.registry.at(name) if h.backward and h.tensor_sink is None]
        factor = self.clock.gradient_factor if any(h.gradient_scale == "loss" for h in hooks) else 1.0
        local = grad if factor == 1.0 else _divide_by_factor(grad, factor)
        edited = None
        if hooks:
            out = self._find_pass(hooks, layout, module, key, local, route)(local, key, False, route)
            if any(h.editing_function for h in hooks):
                edited = out if factor == 1.0 else (out * factor).to(grad.dtype)
        self._backward_seen()
        return edited

    def _find_pass(
        self,
        hooks: list[HookFunction],
        layout: Layout,
        module: Any,
        key: Key,
        local: Tensor,
        route: Route | None,
    ) -> Pass:
        """The pass of a gradient, made for the first one of its layout and shape."""
        if self._revision != self.registry.revision:
            self._known, self._revision = {}, self.registry.revision
        shape = local.shape if route is None else (route.token_layout, local.shape[1:])
        at = key.site, layout, shape, local.dtype, local.device
        known = self._known.get(at)
        if known is None:
            known, lasting = self.passes.make(key.site, hooks, module, local, layout, route, backward=True)
            if lasting:
                if len(self._known) >= MAX_PASSES:
                    self._known.clear()
                self._known[at] = known
        return known


class GradientHooks:
    """An exchange that leaves a tensor as it is, and calls `run` with its gradient.

    `run` gets zeros if there is no gradient. It returns another gradient, or None to keep the one it got.
    """

    joint_entrance, joint_exit, zeros_count = True, False, True

    def __init__(self, run: Callable[[Tensor], Tensor | None]) -> None:
        self._run = run

    def enter(self, local: Tensor) -> Tensor:
        return local

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """Nothing edits the tensor here."""
        return edited

    def enter_gradient(self, grad: Tensor) -> Tensor:
        edited = self._run(grad)
        return grad if edited is None else edited

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _divide_by_factor(grad: Tensor, factor: float) -> Tensor:
    """The gradient divided by the factor; fp16 becomes fp32, because the factor keeps values in
    fp16's range.
    """
    return (grad.float() if grad.dtype == torch.float16 else grad) / factor
