"""What a tap calls: one local tensor goes through the hooks that stand at its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from megatron_flex.adapters import ParameterSite
from megatron_flex.collectives import Route, gradient_of
from megatron_flex.errors import AbsentError, HookError
from megatron_flex.layout import Layout, name_batch_first, shard_over_data, without_data_axis
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.changing import EditDispatcher
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.layout_inference import LayoutInference
from megatron_flex.runtime.editing import EditRunner
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.hook_registry import HookRegistry
from megatron_flex.runtime.weak import weakly
from megatron_flex.sites import GRADIENT_SUFFIX, Site


class HookDispatcher(EditDispatcher):
    """The way of tensors and gradients through hooks: read, or gather, edit, scatter."""

    def __init__(
        self,
        registry: HookRegistry,
        clock: Clock,
        recorder: Recorder,
        editing: EditRunner,
        mesh: Mesh,
        gather_data_parallel: bool,
        backward_seen: Callable[[], None],
    ) -> None:
        super().__init__(
            clock, recorder, editing, mesh, gather_data_parallel, backward_seen, lambda: registry.version
        )
        self.registry = registry
        self.declared = LayoutInference(registry, editing, mesh)

    def fire(
        self, site: Site, local: Tensor, layout: Layout | None = None, route: Route | None = None
    ) -> Tensor:
        """Pass a local tensor through the hooks at its site."""
        hooks, later = self.registry.standing(site.name)
        acting = bool(later) or any(h.editing_function for h in hooks)
        key = self.clock.key(site.name, local if acting else None)
        if layout is None:
            layout = self.declared.layout(site, key, local) if site.inferred else site.layout
        elif site.followed and route is None:
            self.declared.told(site.name, layout, local)
        own = name_batch_first(layout) if site.inferred and not route else layout
        if self._over_data and not route:
            own = without_data_axis(own)  # which dumps have of each rank
        if not self.clock.replaying():
            self.feed_sinks(hooks, key, local, own, route)
        if self._over_data and not route:
            layout = shard_over_data(own)
        module = getattr(site.tap, "module", None)
        out = self._forward(module, hooks, key, local, layout, route)
        if site.followed and self.editing.modules and out.requires_grad:
            turned = self._turned(site, layout)
            out.register_hook(weakly(self._check_trainable_gradient, site.name, turned, layout, key))
        # In the first pass of a checkpointed region nothing is differentiated; its replay gets the hook.
        if not later or not torch.is_grad_enabled():
            return out
        if not out.requires_grad:
            self.editing.reasons[site.name] = "the tensor there needs no gradient"
        else:
            seen = key._replace(site=site.name + GRADIENT_SUFFIX)
            # On a tensor of its own: one that is used elsewhere too (the residual beside a norm's input) has
            # a gradient from there as well, and a view that is masked in place loses its hooks. (torch does
            # not type `apply`.)
            out = cast(Tensor, _GradientBranch.apply(out))  # type: ignore[no-untyped-call]
            back = route and route.gradient()
            turned = self._turned(site, layout)
            dumped = turned
            if any(h.tensor_sink for h in later) and own != layout:
                dumped = self._turned(site, own)
            owner = None if module is None else weakref.ref(module)
            out.register_hook(weakly(self._dispatch_activation, site.name, turned, dumped, owner, seen, back))
        return out

    def feed_sinks(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        """Hand what passes to the takers that want it; gradients at the loss's own scale."""
        for hook in hooks:
            if hook.tensor_sink is not None:
                self.editing.fired.add(hook)
                factor = self.clock.gradient_factor if hook.backward else 1.0
                if why := hook.tensor_sink.take(key, local, layout, route, factor):
                    self.editing.guard(hook, key, partial(_not_recorded, why))

    def _turned(self, site: Site, layout: Layout) -> Callable[[], Layout | str]:
        """What tells the gradient's layout, or why it is not known, once the whole forward pass is."""
        follow = getattr(site.tap, "gradient", None)
        return (
            partial(gradient_of, layout)
            if follow is None
            else cast(Callable[[], Layout | str], follow(layout))
        )

    def _check_trainable_gradient(
        self, name: str, turned: Callable[[], Layout | str], layout: Layout, key: Key, grad: Tensor
    ) -> None:
        """Refuse a trainable module where each rank would get a share of its gradient."""
        found = turned()
        if found == layout.gradient():
            return
        why = found if isinstance(found, str) else f"each rank has a summand over {', '.join(found.partial)}"
        for hook in (h for h in self.registry.at(name) if h.editing_function and not h.backward):
            self.editing.guard(hook, key, partial(raise_partial_gradient, name, why))

    def _dispatch_activation(
        self,
        name: str,
        turned: Callable[[], Layout | str],
        dumped: Callable[[], Layout | str],
        owner: Callable[[], Any] | None,
        key: Key,
        route: Route | None,
        grad: Tensor,
    ) -> Tensor | None:
        layout, own = turned(), dumped()
        if isinstance(layout, str):
            for hook in (h for h in self.registry.at(name) if h.backward):
                self.reject(hook, name, key, layout, partial(raise_no_gradient_layout, name, layout))
            self._backward_seen()
            return None
        if route is None:
            self.declared.told(name + GRADIENT_SUFFIX, layout, grad)
        if isinstance(own, Layout):
            self.feed_sinks([h for h in self.registry.at(name) if h.backward], key, grad, own, route)
        return self.gradient(name, layout, owner and owner(), key, grad, route)

    def reject(self, hook: HookFunction, name: str, key: Key, why: str, refuse: Callable[[], None]) -> None:
        """A place whose layout is not known is an error; a dump of a pattern leaves it out."""
        self.editing.fired.add(hook)
        if hook.tensor_sink is None or not hook.tensor_sink.omits_site(name, why):
            self.editing.guard(hook, key, refuse)

    def _forward(
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
                self.read(hooks, key, local, layout, route)
            return local
        return self.edited(hooks, key, module, local, layout, route, record)

    def absent(self, site: Site, count: int) -> None:
        """A call had only `count` tensors, and not the site's."""
        if site.index == 0:
            self.editing.reasons[site.name] = "there is no tensor"
            return
        for hook in self.registry.at(site.name):
            self.editing.guard(hook, self.clock.key(site.name), partial(raise_absent, site, count))

    def unknown(self, site: Site, local: Tensor, why: str) -> Tensor:
        """Pass a tensor of which no rule tells how it lies on the ranks: only a hook's shape can."""
        if self.registry.expected(site.name) is not None:
            return self.fire(site, local)
        for hook in self.registry.at(site.name):
            key = self.clock.key(site.name)
            self.reject(hook, site.name, key, why, partial(raise_no_layout, site, why))
        return local

    def parameter(self, site: ParameterSite, grad: Tensor) -> Tensor | None:
        """Pass a parameter's local gradient through the hooks that want it."""
        key = self.clock.key(site.name + GRADIENT_SUFFIX)
        layout = self.declared.layout(site, key, grad) if site.inferred else site.layout
        found = layout.gradient() if site.followed is None else site.followed.gradient(layout)
        if isinstance(found, str):
            for hook in (h for h in self.registry.at(site.name) if h.backward):
                self.reject(hook, site.name, key, found, partial(raise_no_gradient_layout, site.name, found))
            self._backward_seen()
            return None
        return self.gradient(site.name, found, None, key, grad)

    def gradient(
        self,
        name: str,
        layout: Layout,
        module: Any,
        key: Key,
        grad: Tensor,
        route: Route | None = None,
    ) -> Tensor | None:
        """Pass a local gradient, in `layout`, through the hooks that want it."""
        hooks = [h for h in self.registry.at(name) if h.backward and h.tensor_sink is None]
        factor = self.clock.gradient_factor if any(h.gradient_scale == "loss" for h in hooks) else 1.0
        local = grad if factor == 1.0 else _divide_by_factor(grad, factor)
        edited = None
        if any(h.editing_function for h in hooks):
            edited = self.edited(hooks, key, module, local, layout, route, any(h.save for h in hooks))
            edited = edited if factor == 1.0 else (edited * factor).to(grad.dtype)
        elif hooks:
            self.read(hooks, key, local, layout, route)
        self._backward_seen()
        return edited


class TapCallback:
    """What the tap of a site calls."""

    def __init__(self, firing: HookDispatcher, site: Site) -> None:
        self._firing, self._site = firing, site
        firing.stands(site)

    def __call__(self, local: Tensor, layout: Layout | None = None, route: Route | None = None) -> Tensor:
        """Pass a tensor through the hooks."""
        return self._firing.fire(self._site, local, layout, route)

    def unknown(self, local: Tensor, why: str) -> Tensor:
        """Pass a tensor that no rule tells the layout of."""
        return self._firing.unknown(self._site, local, why)

    def absent(self, count: int) -> None:
        """Note that it was not there."""
        self._firing.absent(self._site, count)


class _GradientBranch(torch.autograd.Function):
    """The same tensor once more, with a gradient of its own; it is not copied."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()  # no view, which could not be edited in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def raise_no_layout(site: Site, why: str) -> None:
    raise HookError(
        f"how {site.name} lies on the ranks is not known: {why}; hook another place, or say expected_shape"
    )


def raise_partial_gradient(name: str, why: str) -> None:
    raise HookError(f"the gradient at {name} is not whole, {why}; use trainable modules elsewhere")


def _not_recorded(why: str) -> None:
    raise HookError(f"the site cannot be recorded: {why}")


def raise_no_gradient_layout(name: str, why: str) -> None:
    raise HookError(
        f"how the gradient at {name} lies on the ranks is not known: {why}; hook the gradient elsewhere"
    )


def raise_absent(site: Site, count: int) -> None:
    raise AbsentError(
        f"unpack_idx={site.index} is out of range: {count} tensor(s) passed there; None and numbers do not "
        "count"
    )


def _divide_by_factor(grad: Tensor, factor: float) -> Tensor:
    """A gradient without the factor; in fp32 if it is fp16, whose range the factor is there to keep it in."""
    return (grad.float() if grad.dtype == torch.float16 else grad) / factor
