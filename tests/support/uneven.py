"""A small model whose parameters do not divide by the number of ranks, and what training does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megatron_flex as mf

SET = "last.weight"  # which is set, its gradient too


class Uneven(nn.Module):
    """`[b, 6]` to `[b, 3]`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(torch.tanh(self.first(x))))


def batch(replica: int) -> Tensor:
    """One replica's samples."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(20 + replica))


def mean_loss(model: nn.Module, replicas: int) -> Tensor:
    """The mean of the replicas' losses."""
    return torch.stack([model(batch(r)).square().mean() for r in range(replicas)]).mean()


def trained(model: nn.Module, backward: Callable[[], None], change: Callable[[str], None]) -> None:
    """Steps of Adam, before and after a parameter and a gradient are set."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    backward()
    optimizer.step()
    optimizer.zero_grad()
    change("value")
    backward()
    change("gradient")
    optimizer.step()
    optimizer.zero_grad()
    backward()
    optimizer.step()


def truth(replicas: int) -> dict[str, Tensor]:
    """The parameters that one process comes to."""
    model = Uneven()

    def change(what: str) -> None:
        parameter = model.get_parameter(SET)
        assert parameter.grad is not None or what == "value"
        into = parameter.detach() if what == "value" else parameter.grad
        into.copy_(new(into))  # type: ignore[union-attr,arg-type]

    trained(model, lambda: mean_loss(model, replicas).backward(), change)
    return {n: p.detach() for n, p in model.named_parameters()}


def new(tensor: Tensor) -> Tensor:
    """What a whole is set to; its rows change places."""
    return tensor.flip(0) * 2 + 1


def answer(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """The parameters that ranks come to."""
    model = wrap(Uneven())
    flex = mf.FlexModel(model)
    mine = batch(flex.session.mesh["dp"].coord)

    def change(what: str) -> None:
        gradient = what == "gradient"
        if not gradient:  # what it leaves gathered must not outlive what is set
            with torch.no_grad():
                model(mine)
        whole = flex.get_module_parameter(SET, gradient=gradient, everywhere=True)
        assert whole is not None
        flex.set_module_parameter(SET, new(whole), gradient=gradient)
        assert flex.is_leader == (flex.get_module_parameter(SET, gradient=gradient) is not None)

    trained(model, lambda: model(mine).square().mean().backward(), change)
    flex.verify()
    model(mine)
    out = {n: t.clone() for n, t in flex.named_full_parameters(everywhere=True)}
    flex.restore()
    return out
