"""A rank's part of a tensor, for edits that run on it: constants cut alike, sums over what is cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.meter import counted
from megatron_flex.layout import Layout, extract, whole_shape
from megatron_flex.mesh import Axis, Mesh


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a rank's part lies in the whole; dims in the whole's order, as an edit is given them.

    Attributes:
        layout: of the part, without a change of order.
        mesh: the run's axes.
        shape: of the part, padding included.
        whole: of the whole, padding stripped.
    """

    layout: Layout
    mesh: Mesh
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, local: Tensor, layout: Layout, mesh: Mesh) -> Shard:
        """The part that a local tensor is; no dim that is cut on this mesh may be uneven."""
        order = layout.permute or tuple(range(len(layout.dims)))
        inner = replace(layout, dims=tuple(layout.dims[i] for i in order), permute=None)
        whole = tuple(whole_shape(layout, local.shape, mesh.sizes))
        return cls(inner, mesh, tuple(local.shape[i] for i in order), whole)

    def axes(self, dims: Iterable[int]) -> list[Axis]:
        """The axes with more than one rank that cut any of these dims."""
        found = [self.mesh[c.axis] for d in dims for c in self.layout.dims[d].cuts]
        return [a for a in found if a.size > 1]

    @property
    def cut(self) -> tuple[int, ...]:
        """The dims that are cut on this mesh."""
        return tuple(i for i in range(len(self.whole)) if self.axes([i]))

    @property
    def summed(self) -> bool:
        """Whether the whole is a sum over ranks."""
        copies = any(c.partial for d in self.layout.dims for c in d.cuts if self.mesh[c.axis].size > 1)
        return copies or any(self.mesh[a].size > 1 for a in self.layout.partial)

    def part(self, constant: Tensor) -> Tensor:
        """This rank's part of a constant that stands for a whole by broadcasting, to stand for the part.

        Args:
            constant: of the whole's shape or of its last dims; dims of length one stay.

        Returns:
            Its entries that belong to this rank's; zeros beside padding. The constant itself if no dim of it
            is cut.
        """
        first = len(self.whole) - constant.ndim
        cut = [i for i in self.cut if i >= first and constant.shape[i - first] != 1]
        padded = [i for i, d in enumerate(self.layout.dims) if d.keep is not None and i >= first]
        if not cut and not [i for i in padded if constant.shape[i - first] != self.shape[i] != 1]:
            return constant
        dims = tuple(
            replace(d, cuts=tuple(replace(c, partial=False) for c in d.cuts))
            if constant.shape[i] != 1
            else replace(d, cuts=(), segments=(1,), keep=None)
            for i, d in enumerate(self.layout.dims[first:])
        )
        shape = [1 if n == 1 else self.shape[first + i] for i, n in enumerate(constant.shape)]
        return extract(Layout(dims), constant, self.mesh.coords, self.mesh.sizes, shape)

    def sum(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        """The sum over the ranks among which these dims are cut. Differentiable.

        Collective over those axes, forward and backward. Each rank goes on with the sum for its own part, so
        that the sum's gradient is the sum of the ranks'.
        """
        axes = self.axes(dims)
        return cast(Tensor, _Sum.apply(tensor, axes)) if axes else tensor  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axes: list[Axis]) -> Tensor:
        ctx.axes = axes
        return _added(tensor, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _added(grad, ctx.axes), None


def _added(tensor: Tensor, axes: list[Axis]) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    for axis in axes:
        counted("all_reduce", axis, total, dist.all_reduce, total)
    return total
