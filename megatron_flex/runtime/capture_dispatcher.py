"""What a hook that reads does: what is wanted of this rank's part is kept until the step is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_flex.collectives import Route, gather_rows, gather_full, scatter_rows, scatter_full
from megatron_flex.layout import Layout, full_shape
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.editing import EditRunner
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.selection import SelectionPlan, plan_selection
from megatron_flex.sites import EDITED_SUFFIX, GRADIENT_SUFFIX, Site

MAX_SELECTION_PLANS = 4096  # of selections that are at hand; sequences of ever new lengths make new ones


class CaptureDispatcher:
    """The part of a Firing that reads."""

    def __init__(
        self, clock: Clock, recorder: Recorder, editing: EditRunner, mesh: Mesh, gather_data_parallel: bool
    ) -> None:
        self.clock, self.recorder, self.editing, self.mesh = clock, recorder, editing, mesh
        self._over_data = gather_data_parallel
        self._heads: dict[str, int] = {}
        self._plans: dict[tuple[str, HookFunction, torch.Size, torch.dtype], tuple[Layout, SelectionPlan]] = {}

    def stands(self, site: Site) -> None:
        """Note how many attention heads the module at a site of this rank has."""
        config = getattr(getattr(site.tap, "module", None), "config", None)
        heads = getattr(config, "num_attention_heads", None)
        if isinstance(heads, int):
            self._heads[site.name] = heads

    def read(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        """Keep what passes, to be sent later."""
        self.editing.fired.update(hooks)
        if not any(h.expected_shape for h in hooks):
            pass
        elif route is None and not any(d.uneven for d in layout.dims):
            self.editing.check_shapes(hooks, key, full_shape(layout, local.shape, self.mesh.sizes))
        else:  # no rank knows it, so look at the tensor
            whole = self.gather(local, layout, route)
            self.editing.check_shapes(hooks, key, whole.shape)
            self.keep(hooks, key, whole, layout)
            return
        self.keep_shard(hooks, key, local, layout, route)

    def keep_shard(
        self,
        hooks: Sequence[HookFunction],
        key: Key,
        local: Tensor,
        layout: Layout,
        route: Route | None = None,
    ) -> None:
        """Keep what is wanted of this rank's part, to be sent later."""
        gathered: Tensor | None = None
        for hook in hooks if len(hooks) == 1 else _list_distinct(hooks):
            name = make_capture_key(key, hook)
            if hook.wanted is not None and route is None:
                self._push(hook, name, local, layout)
            elif hook.wanted is not None:
                gathered = self.gather(local, layout, route) if gathered is None else gathered
                self._select(hook, name, gathered, layout)
            elif route is None:
                self.recorder.shard(name, local, layout)
            else:
                self.recorder.rows(name, local, route)

    def keep(self, hooks: Sequence[HookFunction], key: Key, whole: Tensor, layout: Layout) -> None:
        """Keep what is wanted of a tensor, in `layout`, that every rank has whole."""
        for hook in _list_distinct(hooks):
            name = make_capture_key(key, hook)
            if hook.wanted is None:
                self.recorder.whole(name, whole, layout)
            else:
                self._select(hook, name, whole, layout)

    def _push(self, hook: HookFunction, key: Key, local: Tensor, layout: Layout) -> None:
        """Keep of this rank's part what is wanted."""
        plan = self._plan(hook, key, local, layout, self.mesh)
        if plan is None:
            return
        small = plan.local(local)
        if not plan.everywhere:
            self.recorder.shard(key, small, plan.layout, plan.finish if plan.finishes else None)
            return
        found = self.editing.guard(hook, key, partial(plan.finish, self.gather(small, plan.layout, None)))
        for ending, tensor in (found or {}).items():
            self.recorder.whole(key._replace(site=key.site + ending), tensor, layout)

    def _select(self, hook: HookFunction, key: Key, whole: Tensor, layout: Layout) -> None:
        """Keep what is wanted of a whole."""
        order = layout.permute or range(len(layout.dims))
        dims = tuple(replace(layout.dims[i], cuts=(), segments=(1,), keep=None, uneven=False) for i in order)
        plan = self._plan(hook, key, whole, Layout(dims), Mesh())
        if plan is not None:
            self.recorder.whole(key, whole, layout, lambda t: plan.finish(plan.local(t)))

    def _plan(self, hook: HookFunction, key: Key, tensor: Tensor, layout: Layout, mesh: Mesh) -> SelectionPlan | None:
        """How the wish is fulfilled, looked up if it is known; None if it cannot be: all ranks raise."""
        at = (key.site, hook, tensor.shape, tensor.dtype)
        found = self._plans.get(at)
        if found is not None and (found[0] is layout or found[0] == layout):
            return found[1]
        assert hook.wanted is not None
        place = key.site.removesuffix(f".{hook.keep_as}").removesuffix(EDITED_SUFFIX).removesuffix(GRADIENT_SUFFIX)
        parts = tensor.shape, tensor.dtype, tensor.device
        make = partial(plan_selection, hook.wanted, layout, *parts, mesh.sizes, mesh.coords, self._heads.get(place, 0))
        # Without the guard where nothing should go wrong: then ranks do not ask each other.
        plan = self.editing.guard(hook, key, make) if hook.can_fail else make()
        if plan is not None:
            if len(self._plans) >= MAX_SELECTION_PLANS:
                self._plans.clear()
            self._plans[at] = layout, plan
        return plan

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
        return gather_rows(local, route) if route else gather_full(local, layout, self.mesh)

    def scatter(self, whole: Tensor, local: Tensor, layout: Layout, route: Route | None) -> Tensor:
        """This rank's part of the whole."""
        return scatter_rows(whole, local, route) if route else scatter_full(whole, local, layout, self.mesh)


def make_capture_key(key: Key, hook: HookFunction) -> Key:
    """The key under which a hook keeps something."""
    return key._replace(site=f"{key.site}.{hook.keep_as}") if hook.keep_as else key


def _list_distinct(hooks: Sequence[HookFunction]) -> Iterator[HookFunction]:
    """Of hooks that keep the same the first."""
    seen = set()
    for hook in hooks:
        if hook.save and hook.keep_as not in seen:
            seen.add(hook.keep_as)
            yield hook
