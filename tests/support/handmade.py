"""A tensor parallel MLP written by hand, of no framework, and the same one for a single process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

IN, WIDE, OUT = 6, 16, 8
TOKENS, SAMPLES = 3, 4


class _Copy(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum over the group; its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Column(nn.Module):
    """A linear layer whose output features are cut."""

    def __init__(self, whole: nn.Linear, place: int, size: int, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 0)[place].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(size, 0)[place].clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(_Copy.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A linear layer whose input features are cut."""

    def __init__(self, whole: nn.Linear, place: int, size: int, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[place].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(nn.functional.linear(x, self.weight), self.group) + self.bias


class Mlp(nn.Module):
    """Two layers with a nonlinearity between."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(IN)
        self.up, self.act, self.down = up, nn.GELU(), down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x))))


def single() -> Mlp:
    """The model as one process has it, with the same weights each time."""
    torch.manual_seed(1)
    return Mlp(nn.Linear(IN, WIDE), nn.Linear(WIDE, OUT))


def parallel(tp: int) -> Mlp:
    """This rank's part of the same model; the ranks of a group are next to each other."""
    whole, rank = single(), dist.get_rank()
    groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, dist.get_world_size(), tp)]
    place, group = rank % tp, groups[rank // tp]
    return Mlp(Column(whole.up, place, tp, group), Row(whole.down, place, tp, group))


def batch(replica: int) -> Tensor:
    """The samples of one data parallel replica."""
    return torch.randn(TOKENS, SAMPLES, IN, generator=torch.Generator().manual_seed(10 + replica))
