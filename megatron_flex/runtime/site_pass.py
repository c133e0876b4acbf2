"""The pass of a tensor through a hook point: everything that runs there, forward and backward.

A `Pass` is made once for the hooks at a site, the layout, the shape and the dtype of the local tensor, and is
the only thing that runs: in the first pass of a site and in later ones, for activations and for gradients,
whether it is traced, verified or neither.

    sinks and captures take the local tensor
    enter ─► steps (edit_steps) ─► exit        an exchange of `collectives.edit_exchange`
    captures of the edited tensor; hooks on the gradient
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives import (
    Exchange,
    Route,
    ShardExchange,
    Substitute,
    choose_exchange,
    enter,
    exit,
    guard_collective,
)
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh
from megatron_flex.runtime.captures import Key
from megatron_flex.runtime.edit_environment import EditEnvironment
from megatron_flex.runtime.edit_steps import Step
from megatron_flex.runtime.hooks import HookFunction
from megatron_flex.runtime.result_gradients import ResultGradients

Take = Callable[[Key, Tensor, Layout, Route | None], None]  # takes the local tensor of a pass
Record = tuple[Take, Layout]
After = Callable[[Key, Tensor, Tensor, Route | None], None]  # takes the tensors before and after the edits
Attach = Callable[[Key, Tensor, Route | None], Tensor]


@dataclass(frozen=True, slots=True)
class PassEdits:
    """The edits of a pass.

    Attributes:
        name: the site, or the name of its gradient.
        steps: the editing functions.
        layout: the layout of the local tensor.
        mesh: the run's axes.
        exchange: how the tensor reaches the editing functions; None where each pass has another exchange.
        substitute: zeros in place of a local tensor that does not fit its layout; None if it fits.
        expecting: the hooks that expect a shape of the full tensor.
        full_size: that shape; None where it is that of the tensor the functions see.
        follow: wraps the exchange of one pass, to trace it; None if it is not traced.
        anchor: connects the values that the functions have shared; None if they share none.
        watch: tells the session of the backward pass that a result waits for; None if it need not know.
        after: what takes the edited local tensor.
    """

    name: str
    steps: tuple[Step, ...]
    layout: Layout
    mesh: Mesh
    exchange: Exchange | None
    substitute: Tensor | None = None
    expecting: Sequence[HookFunction] = ()
    full_size: Sequence[int] | None = None
    follow: Callable[[Exchange, Key, Route | None], Exchange] | None = None
    anchor: Callable[[Tensor], Tensor] | None = None
    watch: Callable[[Key, Tensor], None] | None = None
    after: tuple[After, ...] = ()


class Pass:
    """What happens to a tensor at a hook point.

    Args:
        hooks: the hooks, which count as called.
        records: sinks and captures, which take the local tensor; not in activation recomputation.
        edits: the edits, if any.
        attach: attaches the hooks on the gradient to the tensor that continues in the model.
    """

    __slots__ = ("_attach", "_editing", "_edits", "_fired", "_gradients", "_hooks", "_plain", "_records")

    def __init__(
        self,
        hooks: Sequence[HookFunction],
        records: tuple[Record, ...],
        edits: PassEdits | None,
        attach: Attach | None,
        editing: EditEnvironment,
        gradients: ResultGradients,
    ) -> None:
        self._hooks, self._records, self._edits, self._attach = hooks, records, edits, attach
        self._editing, self._fired, self._gradients = editing, editing.fired, gradients
        self._plain: ShardExchange | None = None
        if edits is not None and edits.substitute is None and edits.follow is None:
            exchange: Any = edits.exchange
            self._plain = exchange if isinstance(exchange, ShardExchange) and exchange.plain else None

    def __call__(self, local: Tensor, key: Key, replay: bool, route: Route | None = None) -> Tensor:
        """Run the pass.

        Args:
            local: this rank's tensor.
            key: the key of the pass.
            replay: whether this is activation recomputation.
            route: the route of expert rows.

        Returns:
            The tensor that continues in the model.
        """
        if not replay:
            self._fired.update(self._hooks)
            for take, layout in self._records:
                take(key, local, layout, route)
        out = local
        if self._plain is not None:
            out = self._edit_plain(local, key, replay, self._plain)
        elif self._edits is not None:
            out = self._edit(local, key, replay, route)
        return out if self._attach is None else self._attach(key, out, route)

    def _edit(self, local: Tensor, key: Key, replay: bool, route: Route | None) -> Tensor:
        edits = self._edits
        assert edits is not None
        exchange = edits.exchange or _choose_exchange(edits, local, route)
        if edits.substitute is not None:
            exchange = Substitute(edits.substitute, exchange)
        if edits.follow is not None:
            exchange = edits.follow(exchange, key, route)
        entrance = enter(local, exchange)
        edited = self._run_steps(edits, local, entrance, key, replay)
        out = exit(edited, entrance, local, exchange)
        for take in () if replay else edits.after:
            take(key, local, out, route)
        return out

    def _edit_plain(self, local: Tensor, key: Key, replay: bool, exchange: ShardExchange) -> Tensor:
        """Edit the local tensor itself by presets, which need no node of the graph around them."""
        edits = self._edits
        assert edits is not None
        edited = self._run_steps(edits, local, local, key, replay)
        if local.requires_grad and not edited.requires_grad and torch.is_grad_enabled():
            edited = edited.clone() if edited._is_view() else edited
            out = exit(edited, enter(local, exchange), local, exchange)
        else:
            out = exchange.exit(edited, local)
        for take in () if replay else edits.after:
            take(key, local, out, None)
        return out

    def _run_steps(self, edits: PassEdits, local: Tensor, entrance: Tensor, key: Key, replay: bool) -> Tensor:
        """The result of the editing functions; what they got if the package's own code fails."""
        editing, edited = self._editing, entrance
        editing.complete = True
        try:
            if edits.expecting:
                editing.check_shapes(edits.expecting, key, edits.full_size or entrance.shape)
            for step in edits.steps:
                edited = step(edited, key, replay)
            if edits.anchor is not None:
                edited = edits.anchor(edited)
        except Exception as error:  # recorded: what follows is collective
            editing.record_internal_error(edits.name, error)
            edited = entrance
        if not local.requires_grad:
            edited = self._gradients.settle(edits.name, local, edited)
        if edits.watch is not None and edited.requires_grad:
            edits.watch(key, edited)
        return edited


def _choose_exchange(edits: PassEdits, local: Tensor, route: Route | None) -> Exchange:
    tensor = local if edits.substitute is None else edits.substitute
    with guard_collective():
        return choose_exchange(edits.layout, edits.mesh, tensor, route)
