"""One pass of the edits at a site with tensors of one shape: on this rank's shard, or on the full tensor.

Which functions run, in which order, and what they need around them is in the plan. The autograd graph is that
of `EditDispatcher`, with fewer nodes: the gather is the entrance of the edit and the scatter its exit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives import FullTensorPlan
from megatron_flex.layout import Layout
from megatron_flex.runtime.autograd_graph import connect_output, enter_edit, make_zero_gradient
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.debug.purity import draws_random_numbers
from megatron_flex.runtime.edit_dispatcher import EditDispatcher
from megatron_flex.runtime.edit_runner import PlannedEdit, find_replica_axis
from megatron_flex.runtime.edit_traits import traits_of
from megatron_flex.runtime.hook_collectives import raise_broken
from megatron_flex.runtime.hooks import EditingFunction, HookFunction
from megatron_flex.runtime.local_edits import LocalEditPlan

Saved = Sequence[tuple[HookFunction, str]]  # hooks that capture, with the suffix of the capture's name


def plan_pass(
    hooks: list[HookFunction],
    name: str,
    shape: torch.Size,
    layout: Layout,
    way: LocalEditPlan | None,
    edits: EditDispatcher,
) -> LocalPass | GatheredPass | None:
    """The plan of passes with tensors of one shape; None where they go the general way.

    Args:
        hooks: the hooks at the site.
        name: the site.
        shape: the shape of the local tensor.
        layout: its layout.
        way: how the edits run on shards; None if they need the full tensor.
        edits: has the runner of editing functions, and the mesh.
    """
    functions: dict[HookFunction, EditingFunction] = {}
    for hook in hooks:
        edit = hook.editing_of(name) if way is None else way.edits.get(hook)
        if edit is not None:
            functions[hook] = edit
    steps = [
        PlannedEdit(
            hook,
            hooks.index(hook),
            edit,
            draws_random_numbers(edit),
            find_replica_axis(layout, edits.mesh),
            traits_of(edit).returns_new_tensor,
            None if way is None else way.sums.get(hook),
        )
        for hook, edit in functions.items()
    ]
    if way is not None:
        return LocalPass(steps, name, way, edits)
    plan = FullTensorPlan.of(layout, edits.mesh, shape)
    return None if plan is None else GatheredPass(steps, name, layout, plan, edits)


class LocalPass:
    """Edits this rank's shard."""

    def __init__(
        self, steps: list[PlannedEdit], name: str, way: LocalEditPlan, edits: EditDispatcher
    ) -> None:
        self._steps, self._name, self._way = steps, name, way
        self._editing, self._captures, self._gradients = edits.editing, edits.captures, edits.gradients
        self._fresh = way.returns_new_tensor
        self._plain = self._fresh and not way.padded and way.layout.permute is None

    def run(self, local: Tensor, key: Key, module: Any, replay: bool, saved: Saved | None) -> Tensor:
        """Edit a local tensor; with `saved` it is captured first."""
        way, editing = self._way, self._editing
        if saved:
            editing.apart(self._name, self._captures.keep_distinct, saved, key, local, way.layout)
        if not self._fresh:
            part = enter_edit(way.into(local))
            made = connect_output(editing.run(self._steps, key, module, part, replay), part, False)
        else:
            part = local if self._plain else way.into(local)
            made = editing.run(self._steps, key, module, part, replay)
            if not made.requires_grad and part.requires_grad and torch.is_grad_enabled():
                made = connect_output(made, enter_edit(part), False)
        if not self._plain:
            made = way.outof(made, local)
        elif made is not local and (not made.is_contiguous() or made._is_view()):
            made = made.clone(memory_format=torch.contiguous_format)
        return made if local.requires_grad else self._gradients.settle(self._name, local, made)


class GatheredPass:
    """Gathers the full tensor, edits it, and scatters the result."""

    def __init__(
        self,
        steps: list[PlannedEdit],
        name: str,
        layout: Layout,
        plan: FullTensorPlan,
        edits: EditDispatcher,
    ) -> None:
        self._steps, self._name, self._layout, self._plan = steps, name, layout, plan
        self._editing, self._captures, self._gradients = edits.editing, edits.captures, edits.gradients

    def run(self, local: Tensor, key: Key, module: Any, replay: bool, saved: Saved | None) -> Tensor:
        """Edit a local tensor; with `saved` the full tensor before the edit is captured."""
        editing, plan, linked = self._editing, self._plan, local.requires_grad and torch.is_grad_enabled()
        full = gather_planned(local, plan, linked)
        made = full
        try:
            if saved:
                hooks = [hook for hook, _ in saved]
                editing.apart(self._name, self._captures.keep_full, hooks, key, full, self._layout)
            made = editing.run(self._steps, key, module, full, replay)
        except Exception as error:  # the package's own error; the code below is collective
            editing.caught(self._name, error)
        if not linked:
            made = self._gradients.settle(self._name, local, made)
        return scatter_planned(made, full, plan)


def gather_planned(local: Tensor, plan: FullTensorPlan, linked: bool) -> Tensor:
    """The full tensor; with `linked` it is the entrance of an edit, which always propagates a gradient.

    Raises:
        BrokenError: the collective failed.
    """
    try:
        if not linked:
            return plan.gather(local)
        # torch does not type `apply`
        full: Tensor = _GatheredEntrance.apply(local, plan)  # type: ignore[no-untyped-call]
        return full
    except Exception as error:  # raised under its own name, as other ranks are in the collective
        raise_broken(error)


def scatter_planned(made: Tensor, entrance: Tensor, plan: FullTensorPlan) -> Tensor:
    """This rank's shard of an edited full tensor, connected to the edit's entrance; errors as above."""
    try:
        if not (torch.is_grad_enabled() and (made.requires_grad or entrance.requires_grad)):
            return plan.scatter(made.detach())
        # torch does not type `apply`
        shard: Tensor = _ScatteredExit.apply(made, entrance, plan)  # type: ignore[no-untyped-call]
        return shard
    except Exception as error:  # as above
        raise_broken(error)


class _GatheredEntrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: FullTensorPlan) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.like = plan, (local.shape, local.dtype, local.device)
        return plan.gather(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return make_zero_gradient(ctx, *ctx.like), None
        return ctx.plan.scatter_gradient(grad), None


class _ScatteredExit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, entrance: Tensor, plan: FullTensorPlan) -> Tensor:
        ctx.plan = plan
        return plan.scatter(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        # Assembled even where the edit's result needs no gradient: if each rank decided by itself, a rank
        # whose edit failed would leave the others waiting.
        full = ctx.plan.gather_gradient(grad)
        return (full if ctx.needs_input_grad[0] else None), None, None
