"""What a tap calls: one local tensor goes through the hooks that stand at its place."""

from __future__ import annotations

import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.collectives import (
    Route,
    from_leader,
    gather_rows,
    gather_whole,
    is_leader,
    scatter_rows,
    scatter_whole,
    towards_leader,
)
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout, whole_shape
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.hooks import HookFunction, Registry, call_editing
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.streams import same_stream
from megatron_flex.sites import GRAD, Site


class Firing:
    """The way of tensors and gradients through hooks: read, or gather, edit, scatter.

    Attributes:
        save_ctx: what editing functions of this rank share.
        modules: the trainable modules that they are given.
        fired: the hooks that something has passed through.
        failure: what went wrong first in this step, in words, and the error.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        recorder: Recorder,
        mesh: Mesh,
        backward_seen: Callable[[], None],
    ) -> None:
        self.registry, self.clock, self.mesh = registry, clock, mesh
        self.save_ctx = Namespace()
        self.modules = nn.ModuleDict()
        self.fired: set[HookFunction] = set()
        self.failure: tuple[str, BaseException] | None = None
        self._recorder, self._backward_seen = recorder, backward_seen
        self._leads = is_leader(mesh)

    def fire(
        self, site: Site, local: Tensor, layout: Layout | None = None, route: Route | None = None
    ) -> Tensor:
        """Pass a local tensor through the hooks at its site."""
        layout = layout or site.layout
        hooks = self.registry.at(site.name)
        key = self.clock.key(site.name)
        module = getattr(site.tap, "module", None)
        out = self._forward(module, [h for h in hooks if not h.backward], key, local, layout, route)
        # In the first pass of a checkpointed region nothing is differentiated; its replay gets the hook.
        if any(h.backward for h in hooks) and out.requires_grad and torch.is_grad_enabled():
            seen = key._replace(site=site.name + GRAD)
            # On a tensor of its own: one that is used elsewhere too (the residual beside a norm's input) has
            # a gradient from there as well, and a view that is masked in place loses its hooks.
            out = out.clone()
            back = route and route.gradient()
            out.register_hook(partial(self.gradient, site.name, layout.gradient(), module, seen, route=back))
        return out

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
                self._read(hooks, key, local, layout, route)
            return local
        whole = self._gather(local, layout, route)
        if record:
            self._recorder.whole(key, whole)
        return self._scatter(self._edit(hooks, key, module, whole), local, layout, route)

    def gradient(
        self,
        name: str,
        layout: Layout,
        module: Any,
        key: Key | None,
        grad: Tensor,
        route: Route | None = None,
    ) -> Tensor | None:
        """Pass a local gradient, in `layout`, through the hooks that want it."""
        hooks = [h for h in self.registry.at(name) if h.backward]
        key = key or self.clock.key(name + GRAD)
        factor = self.clock.gradient_factor if any(h.gradient_scale == "loss" for h in hooks) else 1.0
        local = grad if factor == 1.0 else _at_loss_scale(grad, factor)
        edited = None
        if any(h.editing_function for h in hooks):
            whole = self._gather(local, layout, route)
            if any(h.save for h in hooks):
                self._recorder.whole(key, whole)
            edited = self._scatter(self._edit(hooks, key, module, whole), local, layout, route)
            edited = edited if factor == 1.0 else (edited * factor).to(grad.dtype)
        elif hooks:
            self._read(hooks, key, local, layout, route)
        self._backward_seen()
        return edited

    def _gather(self, local: Tensor, layout: Layout, route: Route | None) -> Tensor:
        return gather_rows(local, route) if route else gather_whole(local, layout, self.mesh)

    def _scatter(self, whole: Tensor, local: Tensor, layout: Layout, route: Route | None) -> Tensor:
        return scatter_rows(whole, local, route) if route else scatter_whole(whole, local, layout, self.mesh)

    def _read(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        self.fired.update(hooks)
        if route is None:
            self._check_shapes(hooks, key, whole_shape(layout, local.shape, self.mesh.sizes))
            self._recorder.shard(key, local, layout)
        elif any(h.expected_shape for h in hooks):  # only the router knows it, so look at the tensor
            whole = self._gather(local, layout, route)
            self._check_shapes(hooks, key, whole.shape)
            self._recorder.whole(key, whole)
        else:
            self._recorder.rows(key, local, route)

    def _check_shapes(self, hooks: list[HookFunction], key: Key, shape: Sequence[int]) -> None:
        for hook in hooks:
            self._guard(hook, key, partial(hook.check_shape, shape))

    def _edit(self, hooks: list[HookFunction], key: Key, module: Any, whole: Tensor) -> Tensor:
        """Run editing functions one after the other; one that fails leaves the tensor as it was."""
        for hook in hooks:
            self.fired.add(hook)
            self._guard(hook, key, partial(hook.check_shape, whole.shape))
            if hook.editing_function is not None:
                if hook.run == "leader":
                    whole = self._lead(hook, key, module, whole)
                else:
                    edited = self._run(hook, key, module, whole)
                    whole = whole if edited is None else edited
        return whole

    def _run(self, hook: HookFunction, key: Key, module: Any, whole: Tensor) -> Tensor | None:
        with same_stream(key, whole):
            edit = partial(call_editing, hook, module, whole, self.save_ctx, self.modules)
            return self._guard(hook, key, edit)

    def _lead(self, hook: HookFunction, key: Key, module: Any, whole: Tensor) -> Tensor:
        """Let the leader edit for all ranks that hold this whole."""
        whole = towards_leader(whole, self.mesh)
        made = self._run(hook, key, module, whole) if self._leads else whole
        return from_leader(whole if made is None else made, whole, self.mesh)

    def _guard(self, hook: HookFunction, key: Key, call: Callable[[], Tensor | None]) -> Tensor | None:
        """Run what a person wrote; keep an error for the end of the step, where all ranks raise it."""
        try:
            return call()
        except Exception as error:
            when = f"iteration {key.iteration}, microbatch {key.microbatch}"
            where = f"hook ({hook.describe()}) at {key.site}, {when}"
            line = "" if isinstance(error, HookError) else f" in {_users_line(error)}"
            kind = "" if isinstance(error, HookError) else f"{type(error).__name__}: "
            self.failure = self.failure or (f"{where}: {kind}{error}{line}", error)
            return None


def _at_loss_scale(grad: Tensor, factor: float) -> Tensor:
    """A gradient without the factor; in fp32 if it is fp16, whose range the factor is there to keep it in."""
    return (grad.float() if grad.dtype == torch.float16 else grad) / factor


def _users_line(error: BaseException) -> str:
    """Where in the file of the editing function the error came up."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [i for i, f in enumerate(frames) if f.name == call_editing.__name__]
    theirs = frames[inside[-1] + 1 :] if inside else frames
    frame = [f for f in theirs if f.filename == theirs[0].filename][-1]
    return f"{frame.filename}:{frame.lineno}"
