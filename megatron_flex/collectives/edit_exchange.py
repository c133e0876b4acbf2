"""The tensor at a hook point on its way to the edits there and back, forward and backward.

An `Exchange` says how a local tensor becomes the tensor that editing functions see, how their result becomes
a local tensor again, and what becomes of both gradients. `Enter` and `Exit` are the nodes of an exchange in
the autograd graph.

    local ── enter ──► full ── editing functions ──► edited ── exit ──► local
    grad  ◄─ enter_gradient ── grad ◄─ autograd ── grad ◄─ exit_gradient ── grad

Every rank that holds a shard runs the same edit on the same full tensor. The gradient of the full tensor is
therefore equal on all ranks, and `enter_gradient` takes this rank's shard of the gradient instead of a sum.

An editing function may return a tensor that does not depend on its input. On one device the backward pass
ends there; on several ranks others wait for this one. `Enter` therefore always propagates a gradient, zeros
if there is no other (`autograd_graph` follows these zeros).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, cast

import torch
from torch import Tensor

from megatron_flex.collectives.autograd_graph import follow_zeros, running_transform
from megatron_flex.collectives.expert_route import Route
from megatron_flex.collectives.gather_scatter import (
    EqualShards,
    assemble_uneven,
    broadcast_from_first,
    gather_shapes,
    has_uneven_shards,
)
from megatron_flex.collectives.host_groups import global_rank
from megatron_flex.errors import BrokenError, FlexError, describe_error
from megatron_flex.layout import Layout, extract, uneven_lengths
from megatron_flex.layout.gradient_layout import conjugate_layout
from megatron_flex.mesh import Mesh


class Exchange(Protocol):
    """How a local tensor reaches editing functions, and how their result comes back.

    The four methods take and return tensors without a graph of their own; those of one rank are called in
    the order of the pass, and collective ones by all ranks that hold the tensor.
    """

    @property
    def joint_entrance(self) -> bool:
        """Whether `enter_gradient` is collective: zeros take the place of a gradient that is missing here."""

    @property
    def joint_exit(self) -> bool:
        """The same for `exit_gradient`."""

    @property
    def zeros_count(self) -> bool:
        """Whether such zeros are a gradient of the local tensor: other ranks cannot know that it is missing
        here. Otherwise parameters that get no other gradient have none.
        """

    def enter(self, local: Tensor) -> Tensor:
        """The tensor that editing functions see."""

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """The local tensor that continues in the model, of the shape of `local`, the one before the edits."""

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the local tensor before the edits; the result may share memory with `grad`."""

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of the edited tensor, and that of entries of `local` which no edit sees, if any."""


def enter(local: Tensor, exchange: Exchange) -> Tensor:
    """The tensor that editing functions see of a local tensor.

    Collective as `exchange.enter` is. In a transform of `torch.func` the exchange computes with tensors of
    the transform, and no other rank waits for a backward pass.

    Raises:
        FlexError: the tensor does not fit its layout, on all ranks that hold shards of it.
        BrokenError: the collective failed on this rank, which cannot continue: others are in it.
    """
    try:
        if not (local.requires_grad and torch.is_grad_enabled()) or running_transform() is not None:
            return exchange.enter(local)
        # torch does not type `apply`
        return cast(Tensor, Enter.apply(local, exchange))  # type: ignore[no-untyped-call]
    except Exception as error:  # raised again: as it is, or as BrokenError
        raise_broken(error)


def exit(edited: Tensor, entrance: Tensor, local: Tensor, exchange: Exchange) -> Tensor:
    """The local tensor that continues in the model; errors as for `enter`.

    Args:
        edited: the result of the edits.
        entrance: the result of `enter`, which the backward pass reaches whatever the edits returned.
        local: the local tensor before the edits.
        exchange: that of `enter`.
    """
    try:
        linked = torch.is_grad_enabled() and (edited.requires_grad or entrance.requires_grad)
        if not linked or running_transform() is not None:
            return exchange.exit(edited, local)
        # torch does not type `apply`
        return cast(Tensor, Exit.apply(edited, entrance, local, exchange))  # type: ignore[no-untyped-call]
    except Exception as error:  # raised again, as in `enter`
        raise_broken(error)


def run_beside(tensor: Tensor, *others: Tensor) -> Tensor:
    """The tensor; its backward pass also runs the graphs of the others, on zeros."""
    # torch does not type `apply`
    return cast(Tensor, Exit.apply(tensor, others, tensor, IDENTITY, *others))  # type: ignore[no-untyped-call]


def require_gradient(tensor: Tensor) -> Tensor:
    """A tensor without a graph as one that requires a gradient, where those of other ranks do."""
    return exit(tensor, torch.empty(0, requires_grad=True), tensor, IDENTITY)


class Enter(torch.autograd.Function):
    """The node of `enter`: its gradient is that of the local tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, exchange: Exchange) -> Tensor:
        ctx.set_materialize_grads(False)
        # `detach`, as the result must not be a view of an input: such a view cannot be edited in place.
        full = exchange.enter(local.detach())
        ctx.exchange = exchange
        like = full if exchange.joint_entrance else local
        ctx.like = like.shape, like.dtype, like.device
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        exchange: Exchange = ctx.exchange
        if grad is not None:
            return exchange.enter_gradient(grad), None
        shape, dtype, device = ctx.like
        zeros = torch.zeros(shape, dtype=dtype, device=device)
        local = exchange.enter_gradient(zeros) if exchange.joint_entrance else zeros
        return local if exchange.zeros_count else follow_zeros(ctx, local), None


class Exit(torch.autograd.Function):
    """The node of `exit`: its gradients are those of the edited tensor and of what no edit sees.

    `entrance` gets none; it is an input so that its node runs in every backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, edited: Tensor, entrance: Any, local: Tensor, exchange: Exchange, *others: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        shard = exchange.exit(edited.detach(), local.detach())
        ctx.exchange, ctx.count = exchange, len(others)
        ctx.like = shard.shape, shard.dtype, shard.device
        return shard

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        rest = (None,) * (1 + ctx.count)
        if grad is None:
            if not exchange.joint_exit:
                return None, None, None, *rest
            shape, dtype, device = ctx.like
            grad = torch.zeros(shape, dtype=dtype, device=device)
        # Even where the edit's result needs no gradient: if each rank decided by itself, a rank whose edit
        # failed would leave the others waiting.
        full, unseen = exchange.exit_gradient(grad)
        edited, _, local, *_ = ctx.needs_input_grad
        return full if edited else None, None, unseen if local else None, *rest


class Identity:
    """The tensor itself, which a node of the graph is made of."""

    joint_entrance = joint_exit = zeros_count = False

    def enter(self, local: Tensor) -> Tensor:
        return local

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        return edited

    def enter_gradient(self, grad: Tensor) -> Tensor:
        return grad

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


IDENTITY = Identity()


@dataclass(frozen=True, slots=True)
class FullTensor:
    """The full tensor on every rank, from equal shards of one shape without padding.

    Collective over the axes that the tensor is sharded or partial over; `exit` sends nothing, and its
    gradient is collective over the axes that shard the gradient.

    Attributes:
        shards: of the tensor.
        gradients: of its gradient.
    """

    joint_entrance: ClassVar[bool] = False
    joint_exit: ClassVar[bool] = True
    zeros_count: ClassVar[bool] = False
    shards: EqualShards
    gradients: EqualShards

    def enter(self, local: Tensor) -> Tensor:
        """The full tensor, contiguous, in separate memory."""
        return self.shards.assemble(local, alias=False)

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """This rank's shard of the edited tensor, contiguous, in separate memory."""
        return self.shards.extract(edited)

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """This rank's shard of the full tensor's gradient."""
        return self.gradients.extract(grad, alias=True)

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, None]:
        """The full gradient from the shards of all ranks."""
        return self.gradients.assemble(grad, alias=True), None


class UnevenTensor:
    """The full tensor from shards that differ in length, or have padding that the full tensor lacks.

    Made for one pass: where lengths may differ the ranks exchange them, once for both directions.
    """

    joint_entrance, joint_exit, zeros_count = False, True, False

    def __init__(
        self, layout: Layout, mesh: Mesh, local: Tensor, shapes: list[tuple[int, ...]] | None = None
    ) -> None:
        """Collective over the axes of uneven dims, unless the shapes of all ranks are given."""
        self._layout, self._mesh, self._shape = layout, mesh, local.shape
        self._shapes = gather_shapes(local, layout, mesh) if shapes is None else shapes
        self._lengths = uneven_lengths(Layout(layout.dims), self._shapes, mesh.sizes) if self._shapes else {}
        self._padded = any(d.keep is not None for d in layout.dims)

    def enter(self, local: Tensor) -> Tensor:
        """The full tensor, contiguous, in separate memory."""
        return self._assemble(self._layout, local, alias=False)

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """This rank's shard of the edited tensor, with the padding of `local`."""
        return self._extract(self._layout, edited, local)

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """This rank's shard of the full tensor's gradient; zeros at padding."""
        return self._extract(conjugate_layout(self._layout), grad, self._shape, alias=True)

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The full gradient from the shards of all ranks, and the gradient of this rank's padding."""
        unseen = None
        full = self._assemble(conjugate_layout(self._layout), grad, alias=True)
        if self._padded:
            nothing = full.new_zeros(1).expand(full.shape)
            unseen = self._extract(self._layout, nothing, grad)
        return full, unseen

    def _extract(
        self, layout: Layout, full: Tensor, local: Tensor | torch.Size, alias: bool = False
    ) -> Tensor:
        return extract(layout, full, self._mesh.coords, self._mesh.sizes, local, self._lengths, alias)

    def _assemble(self, layout: Layout, tensor: Tensor, alias: bool) -> Tensor:
        if self._shapes:
            return assemble_uneven(tensor, layout, self._mesh, self._shapes)
        return EqualShards.from_layout(layout, self._mesh, tensor.shape).assemble(tensor, alias)


class ExpertRows:
    """The full tensor of experts, in the order of their tokens, for the tokens of this rank's replica.

    `[s, b, slots, ...]`, or `[rows, ...]` of one expert by token. Every step is collective over `ep` and
    `etp`, then over the axes that shard the tokens. Made for one pass, as a router decides which rank holds
    which row.
    """

    joint_entrance = joint_exit = True
    zeros_count = False

    def __init__(self, route: Route) -> None:
        self._route, self._gradient_route = route, route.for_gradient()
        self._tokens: Exchange | None = None  # between the rows of this rank's tokens and those of all

    def enter(self, local: Tensor) -> Tensor:
        """The rows of all experts, by token."""
        route = self._route
        rows = route.to_tokens(local)
        layout, mesh = route.token_layout, route.mesh
        if route.expert is not None and has_uneven_shards(layout, mesh):
            self._tokens = UnevenTensor(layout, mesh, rows, route.list_shapes(layout, rows))
        else:
            self._tokens = choose_exchange(layout, mesh, rows)
        gathered = self._tokens.enter(rows)
        order = route.gather_order()
        return gathered if order is None else gathered[order]

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """The rows of this rank's experts."""
        assert self._tokens is not None, "rows leave after they have entered"
        route = self._route
        rows = self._tokens.exit(self._unsorted(edited), route.empty_at_tokens(local))
        return route.to_experts(rows)

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the rows of this rank's experts."""
        assert self._tokens is not None
        return self._gradient_route.to_experts(self._tokens.enter_gradient(self._unsorted(grad)))

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of the rows of all experts, by token."""
        assert self._tokens is not None
        full, _ = self._tokens.exit_gradient(self._gradient_route.to_tokens(grad))
        order = self._route.gather_order()
        return full if order is None else full[order], None

    def _unsorted(self, full: Tensor) -> Tensor:
        order = self._route.gather_order()
        return full if order is None else full[order.argsort()]


class Substitute:
    """Zeros instead of a local tensor that does not fit its layout, which continues unedited.

    Other ranks wait in the collectives of the edit, forward and backward.
    """

    def __init__(self, zeros: Tensor, inner: Exchange) -> None:
        self._zeros, self._inner = zeros, inner
        self.joint_entrance, self.joint_exit = inner.joint_entrance, inner.joint_exit
        self.zeros_count = inner.zeros_count
        self._shape: torch.Size | None = None

    def enter(self, local: Tensor) -> Tensor:
        """The full tensor with zeros for this rank's shard."""
        self._shape = local.shape
        return self._inner.enter(self._zeros)

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """The local tensor. No exchange sends anything here."""
        return local

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """Zeros: the edit did not see the local tensor."""
        assert self._shape is not None
        return self._inner.enter_gradient(grad).new_zeros(self._shape)

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of zeros, and the gradient itself for the local tensor."""
        full, _ = self._inner.exit_gradient(grad.new_zeros(self._zeros.shape))
        return full, grad


class OneRank:
    """A full tensor that one rank edits for all ranks that hold it.

    Args:
        holders: the result of `replica_mesh`.
    """

    joint_entrance, joint_exit, zeros_count = True, False, True

    def __init__(self, holders: Mesh) -> None:
        self._holders = holders

    def enter(self, local: Tensor) -> Tensor:
        return local

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """The result of the rank that edits. Collective over the holders.

        `edited` is that result, of the shape and dtype of `local`; on the other ranks it is ignored.
        """
        return broadcast_from_first(edited.clone(memory_format=torch.contiguous_format), self._holders)

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the rank that edits. Collective over the holders."""
        return broadcast_from_first(grad.clone(memory_format=torch.contiguous_format), self._holders)

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, which is the same on all holders."""
        return grad, None


def plan_exchange(layout: Layout, mesh: Mesh, shape: torch.Size) -> FullTensor | None:
    """The exchange of local tensors of this shape; None where it is another one in each pass.

    No communication.

    Raises:
        LayoutError: the shape does not fit the layout.
    """
    if has_uneven_shards(layout, mesh) or any(d.keep is not None for d in layout.dims):
        return None
    return FullTensor(
        EqualShards.from_layout(layout, mesh, shape),
        EqualShards.from_layout(conjugate_layout(layout), mesh, shape),
    )


def choose_exchange(layout: Layout, mesh: Mesh, local: Tensor, route: Route | None = None) -> Exchange:
    """The exchange of one local tensor: expert rows by their route, others by the layout.

    Collective where the shards may differ in length.

    Raises:
        LayoutError: the tensor does not fit its layout.
    """
    if route is not None:
        return ExpertRows(route)
    return plan_exchange(layout, mesh, local.shape) or UnevenTensor(layout, mesh, local)


def gather_full(local: Tensor, layout: Layout, mesh: Mesh, route: Route | None = None) -> Tensor:
    """The full tensor of one local tensor, on every rank; errors and collectives as for `enter`."""
    with guard_collective():
        exchange = choose_exchange(layout, mesh, local, route)
    return enter(local, exchange)


@contextmanager
def guard_collective() -> Iterator[None]:
    """Raise errors of a collective at once: if only this rank has the error, the others wait for this rank.

    Raises:
        FlexError: an error that follows from the layout.
        BrokenError: any other exception from inside.
    """
    try:
        yield
    except Exception as error:  # raised again: as it is, or as BrokenError
        raise_broken(error)


def raise_broken(error: Exception) -> NoReturn:
    """Raise an error that was raised inside a collective, so that this rank does not go on.

    Raises:
        FlexError: the error, if it follows from the layout.
        BrokenError: otherwise.
    """
    if isinstance(error, FlexError):
        raise error
    raise BrokenError(
        f"a collective of a hook failed, {describe_error(error)}; this rank cannot continue",
        ranks=[global_rank()],
    ) from error
