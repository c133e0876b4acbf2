"""A rank's part of a tensor, for edits that run on it: constants cut alike, sums over what is cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.meter import call_metered
from megatron_flex.layout import Cut, Dim, Layout, extract, full_shape
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
        whole = tuple(full_shape(layout, local.shape, mesh.sizes))
        return cls(inner, mesh, tuple(local.shape[i] for i in order), whole)

    def axes(self, dims: Iterable[int]) -> list[Axis]:
        """The axes that cut any of these dims into more than one part; negative dims count from the end."""
        return [self.mesh[c.axis] for c in self._cuts(dims)]

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
            constant: of the whole's shape or of its last dims; dims of length one stay, unless the whole's
                are that long too and are cut.

        Returns:
            Its entries that belong to this rank's; zeros beside padding. The constant itself if no dim of it
            is cut.
        """
        first = len(self.whole) - constant.ndim
        along = {
            at: first + at
            for at, n in enumerate(constant.shape)
            if n != 1 or (self.whole[first + at] == 1 and self.axes([first + at]))
        }
        return self._part(constant, along)

    def rows(self, constant: Tensor, dim: int = -1) -> Tensor:
        """This rank's rows of a constant matrix whose rows are the whole's entries along a dim.

        Args:
            constant: `[n, ...]`, such as `[h, k]` for the last dim.
            dim: of the tensor; negative ones count from the end.

        Returns:
            `[n here, ...]`, zeros beside padding; the constant itself if the dim is not cut.
        """
        return self._part(constant, {0: dim % len(self.whole)})

    def sum(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        """The sum over the parts into which these dims are cut, each of them once. Differentiable.

        Collective over the axes that cut them, forward and backward: one all-reduce of `tensor` for each.
        Nothing is sent where none does. Of equal copies of a part the first counts. Each rank goes on with
        the sum for its own part, so that the sum's gradient is the sum of the ranks'; where ranks hold
        summands of a part, the first alone goes on with it, and the others with zeros.

        Args:
            tensor: what comes of this rank's part, of the same shape on all ranks; of a linear function.
            dims: of the part; negative ones count from the end.
        """
        cuts = self._cuts(dims)
        if not cuts:
            return tensor
        axes = [self.mesh[c.axis] for c in cuts]
        # torch does not type `apply`
        return cast(Tensor, _PartialSum.apply(tensor, axes, *self._first(cuts)))  # type: ignore[no-untyped-call]

    def onto(self, tensor: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
        """`tensor + factor * (tensor @ down @ up)`, of the whole's last dim. Differentiable in `tensor`.

        Collective over the axes that cut that dim, forward and backward, as `sum` of `[..., k]` is. Forward
        and backward each make one tensor of the part's size and none beside it.

        Args:
            tensor: the part, of fp32 or fp64.
            down: this rank's rows, `[h here, k]`.
            up: this rank's columns, `[k, h here]`.
            factor: a number.
        """
        cuts = self._cuts([-1])
        counts, keeps = self._first(cuts)
        axes = [self.mesh[c.axis] for c in cuts]
        # torch does not type `apply`
        return cast(Tensor, _LowRankUpdate.apply(tensor, down, up, factor, axes, counts, keeps))  # type: ignore[no-untyped-call]

    def _first(self, cuts: Iterable[Cut]) -> tuple[bool, bool]:
        """Whether this rank's summand is in a sum over these cuts, and whether it goes on with it."""
        first = dict.fromkeys((False, True), True)
        for c in cuts:
            first[c.partial] &= self.mesh[c.axis].coord % c.copies == 0
        return first[False], first[True]

    def _cuts(self, dims: Iterable[int]) -> list[Cut]:
        """What cuts these dims into more than one part on this mesh."""
        wanted = sorted({d % len(self.whole) for d in dims})
        found = [c for d in wanted for c in self.layout.dims[d].cuts]
        return [c for c in found if self.mesh[c.axis].size > c.copies]

    def _part(self, constant: Tensor, along: dict[int, int]) -> Tensor:
        """This rank's entries of a constant, some of whose dims are the tensor's."""
        if all(not self.axes([i]) and constant.shape[at] == self.shape[i] for at, i in along.items()):
            return constant
        dims, shape = [], list(constant.shape)
        for at in range(constant.ndim):
            dim = self.layout.dims[along[at]] if at in along else Dim()
            dims.append(replace(dim, cuts=tuple(replace(c, partial=False) for c in dim.cuts)))
            shape[at] = self.shape[along[at]] if at in along else shape[at]
        return extract(Layout(tuple(dims)), constant, self.mesh.coords, self.mesh.sizes, shape)


class _PartialSum(torch.autograd.Function):
    """Sums over ranks; `counts` are those whose summand is in the sum, `keeps` those who go on with it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axes: list[Axis], counts: bool, keeps: bool) -> Tensor:
        ctx.axes, ctx.counts, ctx.keeps = axes, counts, keeps
        return _reduce_summands(tensor, axes, counts, keeps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_summands(grad, ctx.axes, ctx.keeps, ctx.counts), None, None, None


class _LowRankUpdate(torch.autograd.Function):
    """What is linear of low rank, on top of what there is; backward is the same with its matrices turned."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        down: Tensor,
        up: Tensor,
        factor: float,
        axes: list[Axis],
        counts: bool,
        keeps: bool,
    ) -> Tensor:
        ctx.save_for_backward(down, up)
        ctx.factor, ctx.axes, ctx.counts, ctx.keeps = factor, axes, counts, keeps
        return _add_low_rank(tensor, down, up, factor, axes, counts, keeps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        down, up = ctx.saved_tensors
        made = _add_low_rank(grad, up.T, down.T, ctx.factor, ctx.axes, ctx.keeps, ctx.counts)
        return made, *[None] * 6


def _add_low_rank(
    tensor: Tensor, down: Tensor, up: Tensor, factor: float, axes: list[Axis], counts: bool, keeps: bool
) -> Tensor:
    flat = tensor.detach().reshape(-1, tensor.shape[-1])
    inside = _reduce_summands(flat @ down, axes, counts, keeps)
    out = flat.new_empty(tensor.shape)  # and not a view of what `addmm` would make, which had to be copied
    torch.addmm(flat, inside, up, alpha=factor, out=out.view(flat.shape))
    return out


def _reduce_summands(tensor: Tensor, axes: list[Axis], counts: bool, keeps: bool) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not counts:  # zeros, and not times zero: there may be no number in it
        total.zero_()
    for axis in axes:
        call_metered("all_reduce", axis, total, dist.all_reduce, total)
    return total if keeps else total.zero_()
