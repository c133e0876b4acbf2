"""Records captures: selects from this rank's shard, stores that until the step ends, and feeds sinks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_flex.collectives import Route, gather_full
from megatron_flex.errors import HookError
from megatron_flex.layout import Layout, full_order, full_shape
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.clock import Clock
from megatron_flex.runtime.edit_environment import EditEnvironment
from megatron_flex.runtime.hooks import HookFunction, TensorSink
from megatron_flex.runtime.recorder import Recorder
from megatron_flex.runtime.selection import SelectionPlan, plan_selection
from megatron_flex.runtime.selection.reduce import Results
from megatron_flex.sites import DimNames, Site

SEQUENCE = "sequence"  # before the number of a packed sequence, in the name of its capture
Saved = Sequence[tuple[HookFunction, str]]  # hooks that capture, with the suffix of the capture's name
MAX_SELECTION_PLANS = 4096  # bounds the cache of selections; sequences of ever new lengths make new ones


class CaptureDispatcher:
    """Records what hooks capture, and feeds the sinks of a session."""

    def __init__(
        self,
        clock: Clock,
        recorder: Recorder,
        editing: EditEnvironment,
        mesh: Mesh,
        gather_data_parallel: bool,
    ) -> None:
        self.clock, self.recorder, self.editing, self.mesh = clock, recorder, editing, mesh
        self._over_data = gather_data_parallel
        self._heads: dict[str, int] = {}
        self._plans: dict[
            tuple[str, HookFunction, int | None, Layout, torch.Size, torch.dtype, DimNames | None],
            SelectionPlan,
        ] = {}

    def note_heads(self, site: Site) -> None:
        """Note the number of attention heads of the module at a site of this rank."""
        config = getattr(site.tap and site.tap.module, "config", None)
        heads = getattr(config, "num_attention_heads", None)
        if isinstance(heads, int):
            self._heads[site.name] = heads

    def capture_expected(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        """Capture a local tensor for hooks of which some expect a shape of the full tensor."""
        if route is None and not any(d.uneven for d in layout.dims):
            shape: Sequence[int] = full_shape(layout, local.shape, self.mesh.sizes)
        else:  # no rank knows it: gather the tensor
            shape = gather_full(local.detach(), layout, self.mesh, route).shape
        self.editing.check_shapes(hooks, key, shape)
        self.keep(self.list_distinct(hooks), key, local, layout, route)

    @staticmethod
    def list_distinct(hooks: Sequence[HookFunction]) -> Saved:
        """The hooks that capture something different each, with the suffix of the capture's name."""
        suffixes = {h.keep_as: h for h in reversed(hooks) if h.save}  # of equal ones the first
        return [(h, f".{h.keep_as}" if h.keep_as else "") for h in hooks if suffixes.get(h.keep_as) is h]

    def keep(self, saved: Saved, key: Key, local: Tensor, layout: Layout, route: Route | None = None) -> None:
        """Store what each hook of `list_distinct` captures of this rank's shard, to be sent later."""
        gathered: Tensor | None = None
        for hook, suffix in saved:
            name = key._replace(site=key.site + suffix) if suffix else key
            if hook.selection is None:
                self.recorder.shard(name, local, layout, route)
            elif route is None:
                self._keep_selected_shard(hook, name, local, layout)
            else:
                if gathered is None:
                    gathered = gather_full(local.detach(), layout, self.mesh, route)
                self._keep_selected_full(hook, name, gathered, layout)

    def _keep_selected_shard(self, hook: HookFunction, key: Key, local: Tensor, layout: Layout) -> None:
        """Store the part of this rank's shard that a hook selects."""
        for name, number in self._list_sequences(hook, key, layout):
            plan = self._find_plan(hook, key, local, layout, self.mesh, number)
            if plan is None:
                continue
            small = plan.local(local)
            if not plan.everywhere:
                finish = plan.finish if plan.finishes else None
                self.recorder.shard(name, small, plan.layout, finish=finish)
                continue
            gathered = gather_full(small.detach(), plan.layout, self.mesh)
            results = self.editing.guard(hook, key, partial(plan.finish, gathered))
            for ending, tensor in (results or {}).items():
                self.recorder.record_full(name._replace(site=name.site + ending), tensor, layout)

    def _list_sequences(
        self, hook: HookFunction, key: Key, layout: Layout
    ) -> Iterable[tuple[Key, int | None]]:
        """The keys under which a hook captures a tensor: one for each packed sequence if it asks for that.

        With each key the number of the sequence; None for the selection as it is. All ranks have the same.
        """
        assert hook.selection is not None
        if not hook.selection.each_sequence:
            return [(key, None)]
        count = max((len(d.sequences) for d in layout.dims), default=0)
        if not count:
            return [(key, None)]  # the selection says what is wrong
        return [(key._replace(site=f"{key.site}.{SEQUENCE}{n}"), n) for n in range(count)]

    def _keep_selected_full(self, hook: HookFunction, key: Key, full: Tensor, layout: Layout) -> None:
        """Store the part of a full tensor that a hook selects."""
        order = full_order(layout)
        dims = tuple(replace(layout.dims[i], cuts=(), segments=(1,), keep=None, uneven=False) for i in order)
        for name, number in self._list_sequences(hook, key, layout):
            plan = self._find_plan(hook, key, full, Layout(dims), Mesh(), number)
            if plan is not None:
                self.recorder.record_full(name, full, layout, partial(_select_full, plan))

    def _find_plan(
        self,
        hook: HookFunction,
        key: Key,
        tensor: Tensor,
        layout: Layout,
        mesh: Mesh,
        number: int | None = None,
    ) -> SelectionPlan | None:
        """Find the plan for a selection, or for one packed sequence of it, cached; None if the selection is
        impossible: all ranks then raise.
        """
        known = hook.known_dims(key.site)
        at = key.site, hook, number, layout, tensor.shape, tensor.dtype, known
        cached = self._plans.get(at)
        if cached is not None:
            return cached
        assert hook.selection is not None
        heads = self._heads.get(hook.site_of(key.site), 0)
        selection = hook.selection if number is None else hook.selection.in_sequence(number)
        parts = tensor.shape, tensor.dtype, tensor.device
        make = partial(
            plan_selection,
            selection,
            layout,
            *parts,
            mesh.sizes,
            mesh.coords,
            heads,
            known,
        )
        plan = self.editing.guard(hook, key, make)
        if plan is not None:
            if len(self._plans) >= MAX_SELECTION_PLANS:
                self._plans.clear()
            self._plans[at] = plan
        return plan

    def feed_sinks(
        self, hooks: list[HookFunction], key: Key, local: Tensor, layout: Layout, route: Route | None
    ) -> None:
        """Pass a local tensor to the sinks of these hooks; a gradient at the scale of the loss."""
        for hook in hooks:
            if hook.tensor_sink is not None:
                self.editing.fired.add(hook)
                factor = self.clock.gradient_factor if hook.backward else 1.0
                self.editing.guard(
                    hook, key, partial(_feed_sink, hook.tensor_sink, key, local, layout, route, factor)
                )

    def record_inner_tensor(self, place: str, full: Tensor, replays: bool) -> Key:
        """Capture a full tensor that an editing function holds, under a name that is not a site's.

        Args:
            place: the name.
            full: the full tensor, the same on every rank that holds it.
            replays: whether recomputation may run the edit again; a replay is not captured.

        Returns:
            The key of the capture, which a replay shares with the first pass.
        """
        key = self.clock.make_key(place)
        first = not self._over_data or self.mesh["dp"].coord == 0
        if first and not (replays and self.clock.replaying()):
            self.recorder.record_full(key, full, Layout(()))
        return key


def _select_full(plan: SelectionPlan, full: Tensor) -> Results:
    """What a plan selects of a full tensor."""
    return plan.finish(plan.local(full))


def _feed_sink(
    tensor_sink: TensorSink, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float
) -> None:
    if why := tensor_sink.take(key, local, layout, route, factor):
        raise HookError(f"the site cannot be recorded: {why}")
