"""A microbatch on this rank, and the ways back of gradients to tensors that other graphs have read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_flex.runtime.sharing.values import ContextEntry, TensorTicket, ValueVersion


@dataclass(slots=True)
class MicrobatchValues:
    """A microbatch on this rank.

    Attributes:
        training: whether its forward pass began with gradients.
        state: the values that are there now, by name.
        held: all values that this stage has had, if another stage may refer to them.
        account: gradients that have come for tensors lent to other graphs.
        snapshots: values, of the microbatch and of the run, before a call in a first pass.
        made: tensors that the running replay has made again.
    """

    training: bool = True
    state: dict[str, ContextEntry] = field(default_factory=dict)
    held: dict[ValueVersion, ContextEntry] = field(default_factory=dict)
    account: dict[TensorTicket, Tensor] = field(default_factory=dict)
    snapshots: dict[tuple[str, int, int], tuple[dict[str, ContextEntry], dict[str, Any]]] = field(
        default_factory=dict
    )
    made: dict[TensorTicket, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Let go of everything."""
        self.state, self.held, self.account, self.snapshots, self.made = {}, {}, {}, {}, {}

    def credit(self, ticket: TensorTicket, grad: Tensor) -> None:
        """Put a gradient to a tensor's account."""
        known = self.account.get(ticket)
        self.account[ticket] = grad if known is None else known + grad


class TensorLoan(torch.autograd.Function):
    """A tensor without its graph, whose gradient is told to a function.

    Called with a token that needs a gradient, the tensor in a list, and the function.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, lent: list[Tensor], credit: Callable[[Tensor], None]) -> Tensor:
        ctx.credit = credit
        return lent[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.credit(grad)
        return None, None, None


class GradientAnchor(torch.autograd.Function):
    """A tensor whose backward pass sends what a function takes to further tensors, saved before it.

    Called with the tensor, the function (a gradient or None for each of the further ones), and those.
    """

    @staticmethod
    def forward(ctx: Any, full: Tensor, take: Callable[[], list[Tensor | None]], *saved: Tensor) -> Tensor:
        ctx.take = take
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.take()
