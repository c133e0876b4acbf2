"""A local shard of a tensor, for local edits: constants sharded alike, and sums over sharded dims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_flex.collectives.edit_exchange import enter
from megatron_flex.collectives.edit_sums import EditSums
from megatron_flex.collectives.meter import call_metered
from megatron_flex.layout import Cut, Dim, Layout, extract, full_order, full_shape, inverse_order, is_partial
from megatron_flex.mesh import Axis, Mesh


class ShardSum(NamedTuple):
    """A sum over the shards of some dims.

    Attributes:
        axes: to sum over; without any nothing is sent.
        contributes: whether this rank's partial sum is included.
        receives: whether this rank continues with the sum.
    """

    axes: list[Axis]
    contributes: bool
    receives: bool


@dataclass(frozen=True, slots=True)
class Shard:
    """The position of a local shard in the full tensor; dims in the full tensor's order, as edits see them.

    Attributes:
        layout: the layout of the shard, without a permutation of dims.
        mesh: the run's axes.
        shape: the shape of the shard, padding included.
        full_size: the shape of the full tensor, padding stripped.
    """

    layout: Layout
    mesh: Mesh
    shape: tuple[int, ...]
    full_size: tuple[int, ...]

    @classmethod
    def from_local(cls, local: Tensor, layout: Layout, mesh: Mesh) -> Shard:
        """The shard of a local tensor; no dim that is sharded on this mesh may be uneven."""
        order = full_order(layout)
        inner = replace(layout, dims=tuple(layout.dims[i] for i in order), permute=None)
        full_size = tuple(full_shape(layout, local.shape, mesh.sizes))
        return cls(inner, mesh, tuple(local.shape[i] for i in order), full_size)

    def axes(self, dims: Iterable[int]) -> list[Axis]:
        """The axes of size above one that shard any of these dims; negative dims count from the end."""
        return [self.mesh[c.axis] for c in self._cuts(dims)]

    @property
    def cut(self) -> tuple[int, ...]:
        """The dims that are sharded on this mesh."""
        return tuple(i for i in range(len(self.full_size)) if self.axes([i]))

    @property
    def summed(self) -> bool:
        """Whether the local tensor is partial: the full tensor is a sum over ranks."""
        return is_partial(self.layout, self.mesh.sizes)

    def part(self, constant: Tensor) -> Tensor:
        """The shard of a constant that broadcasts to the full tensor; it broadcasts to the local shard.

        Args:
            constant: of the full tensor's shape or of its last dims. A dim of length one is not sharded,
                unless the full tensor's dim also has length one and is sharded or padded.

        Returns:
            The entries at this rank's positions; zeros at padding. The constant itself if none of its dims is
            sharded.
        """
        first = len(self.full_size) - constant.ndim
        along = {
            at: first + at for at, n in enumerate(constant.shape) if n != 1 or self._divides_one(first + at)
        }
        return self._part(constant, along)

    def _divides_one(self, dim: int) -> bool:
        """Whether a dim of the full tensor with one entry is another on this rank: sharded, or padded."""
        return self.full_size[dim] == 1 and (self.shape[dim] != 1 or bool(self.axes([dim])))

    def rows(self, constant: Tensor, dim: int = -1) -> Tensor:
        """This rank's rows of a constant matrix whose rows are the full tensor's entries along a dim.

        Args:
            constant: `[n, ...]`, such as `[h, k]` for the last dim.
            dim: the dim of the tensor; a negative dim counts from the end.

        Returns:
            `[local n, ...]`, zeros at padding; the constant itself if the dim is not sharded.
        """
        return self._part(constant, {0: dim % len(self.full_size)})

    def sum(self, tensor: Tensor, dims: Iterable[int]) -> Tensor:
        """The sum over the shards of these dims, each shard counted once. Differentiable.

        Collective over the axes that shard the dims, forward and backward: one all-reduce of `tensor` for
        each axis; without such axes nothing is sent. Of replicated shards the first is counted. Each rank
        continues with the sum for its own shard, so that the sum's gradient is the sum of the ranks'
        gradients. Where ranks hold partial sums of a shard, only the first continues with the sum, and the
        others with zeros.

        Args:
            tensor: a linear function of the local shard, of the same shape on all ranks.
            dims: dims of the shard; negative dims count from the end.
        """
        cuts = self._cuts(dims)
        if not cuts:
            return tensor
        axes, running = [self.mesh[c.axis] for c in cuts], EditSums.running
        if running is not None:
            running.begin(axes)
        total = enter(tensor, PartialSum(axes, *self._first(cuts)))
        if running is not None:
            running.note(tensor, total, axes)
        return total

    def plan_sum(self, dims: Iterable[int]) -> ShardSum:
        """The sum over the shards of these dims, worked out once. No communication."""
        cuts = self._cuts(dims)
        return ShardSum([self.mesh[c.axis] for c in cuts], *self._first(cuts))

    def add_low_rank(
        self, tensor: Tensor, down: Tensor, up: Tensor, factor: float, total: ShardSum
    ) -> Tensor:
        """`tensor + factor * (tensor @ down @ up)`, along the last dim. Differentiable in `tensor`.

        Collective over the axes that shard that dim, forward and backward, like `sum` of `[..., k]`. The
        forward and the backward pass each allocate one tensor of the shard's size and no other.

        Args:
            tensor: the local shard, of fp32 or fp64.
            down: this rank's rows, `[h here, k]`.
            up: this rank's columns, `[k, h here]`.
            factor: the scale of the update.
            total: the sum over the shards of the last dim.
        """
        running = EditSums.running
        if running is not None:
            running.begin(total.axes)
        # torch does not annotate Function.apply
        out: Tensor = _LowRankUpdate.apply(tensor, down, up, factor, total)  # type: ignore[no-untyped-call]
        if running is not None:
            running.note(tensor[..., :1].expand(*tensor.shape[:-1], down.shape[-1]), out, total.axes)
        return out

    def _first(self, cuts: Iterable[Cut]) -> tuple[bool, bool]:
        """Whether a sum over these cuts includes this rank's partial sum, and whether it receives the sum."""
        first = dict.fromkeys((False, True), True)
        for c in cuts:
            first[c.partial] &= self.mesh[c.axis].coord % c.copies == 0
        return first[False], first[True]

    def _cuts(self, dims: Iterable[int]) -> list[Cut]:
        """The cuts of these dims over axes of size above one."""
        indices = sorted({d % len(self.full_size) for d in dims})
        cuts = [c for d in indices for c in self.layout.dims[d].cuts]
        return [c for c in cuts if self.mesh[c.axis].size > c.copies]

    def _part(self, constant: Tensor, along: dict[int, int]) -> Tensor:
        """This rank's entries of a constant, some of whose dims are dims of the tensor."""
        if all(not self.axes([i]) and constant.shape[at] == self.shape[i] for at, i in along.items()):
            return constant
        dims = tuple([along.get(at) for at in range(constant.ndim)])
        shape = [n if i is None else self.shape[i] for n, i in zip(constant.shape, dims, strict=True)]
        layout = _constant_layout(self.layout, dims)
        return extract(layout, constant, self.mesh.coords, self.mesh.sizes, shape)


@lru_cache(1024)
def _constant_layout(layout: Layout, dims: tuple[int | None, ...]) -> Layout:
    """The layout of a constant, of which these dims of a tensor are dims; the others are not sharded."""
    return Layout(
        tuple(
            Dim()
            if i is None
            else replace(layout.dims[i], cuts=tuple(replace(c, partial=False) for c in layout.dims[i].cuts))
            for i in dims
        )
    )


class ShardExchange:
    """This rank's shard as the tensor that local edits see: nothing is sent.

    Args:
        shard: the shard.
        layout: its layout, with the order of the local dims.
        padded: whether some entries of the ranks are padding, which the full tensor lacks.
        copies: whether an edit may change its input in place, or keep a reference to its result.

    Attributes:
        plain: whether edits see the local tensor itself.
    """

    joint_entrance = joint_exit = zeros_count = False

    def __init__(self, shard: Shard, layout: Layout, padded: bool, copies: bool) -> None:
        self._shard, self._padded, self._copies = shard, padded, copies
        self._order = layout.permute
        order = self._order
        self._inverse = None if order is None else inverse_order(order)
        self._real: dict[torch.device, Tensor] = {}
        self.plain = not padded and not copies and self._order is None

    def enter(self, local: Tensor) -> Tensor:
        """The shard: dims in the order of the full tensor, zeros for padding."""
        part = local if self._order is None else local.permute(self._order)
        if self._padded:
            return torch.where(self._mask(local.device), part, 0).contiguous()
        return part.clone(memory_format=torch.contiguous_format) if self._copies else part

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """The tensor that replaces the local tensor: contiguous, and shared with no other code."""
        if edited is local:  # every edit has failed
            return local
        shared = self._copies or edited._is_view()
        if self._padded:
            part = local if self._order is None else local.permute(self._order)
            edited, shared = torch.where(self._mask(local.device), edited, part), False
        out = edited if self._inverse is None else edited.permute(self._inverse)
        return out.clone(memory_format=torch.contiguous_format) if shared or not out.is_contiguous() else out

    def enter_gradient(self, grad: Tensor) -> Tensor:
        part = torch.where(self._mask(grad.device), grad, 0) if self._padded else grad
        return part if self._inverse is None else part.permute(self._inverse)

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradient of the edited shard, and that of its padding."""
        part = grad if self._order is None else grad.permute(self._order)
        if not self._padded:
            return part, None
        real = self._mask(grad.device)
        padding = torch.where(real, 0, part)
        return torch.where(real, part, 0), (
            padding if self._inverse is None else padding.permute(self._inverse)
        )

    def _mask(self, device: torch.device) -> Tensor:
        """A boolean mask, broadcastable to the shard, of the entries that are not padding."""
        if device not in self._real:
            shard = self._shard
            shape = [n if d.keep else 1 for n, d in zip(shard.full_size, shard.layout.dims, strict=True)]
            with torch.inference_mode(False):
                self._real[device] = shard.part(torch.ones(shape, dtype=torch.bool, device=device))
        return self._real[device]


def join_sum(zeros: Tensor, axes: list[Axis]) -> Tensor:
    """A sum to which this rank contributes zeros, forward and backward, as its edit failed."""
    return enter(zeros, PartialSum(axes, False, False))


class PartialSum:
    """Sums over ranks: whether this rank's partial sum is included, and whether it receives the sum."""

    joint_entrance, joint_exit, zeros_count = True, False, True

    def __init__(self, axes: list[Axis], contributes: bool, receives: bool) -> None:
        self._axes, self._contributes, self._receives = axes, contributes, receives

    def enter(self, local: Tensor) -> Tensor:
        """The sum. Collective over the axes."""
        return _reduce_partial_sums(local, self._axes, self._contributes, self._receives)

    def enter_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of this rank's partial sum. Collective over the axes."""
        return _reduce_partial_sums(grad, self._axes, self._receives, self._contributes)

    def exit(self, edited: Tensor, local: Tensor) -> Tensor:
        """A sum stays with the edit."""
        return edited

    def exit_gradient(self, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _LowRankUpdate(torch.autograd.Function):
    """A low-rank linear update; the backward pass is the same update with transposed matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        down: Tensor,
        up: Tensor,
        factor: float,
        total: ShardSum,
    ) -> Tensor:
        ctx.save_for_backward(down, up)
        ctx.factor, ctx.total = factor, total
        return _add_low_rank(tensor, down, up, factor, total.axes, total.contributes, total.receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        down, up = ctx.saved_tensors
        total: ShardSum = ctx.total
        grad_in = _add_low_rank(grad, up.T, down.T, ctx.factor, total.axes, total.receives, total.contributes)
        return grad_in, None, None, None, None


def _add_low_rank(
    tensor: Tensor,
    down: Tensor,
    up: Tensor,
    factor: float,
    axes: list[Axis],
    contributes: bool,
    receives: bool,
) -> Tensor:
    flat = tensor.detach().reshape(-1, tensor.shape[-1])
    inside = _reduce_partial_sums(flat @ down, axes, contributes, receives)
    out = flat.new_empty(tensor.shape)  # not a view of `addmm`'s result, which would have to be copied
    torch.addmm(flat, inside, up, alpha=factor, out=out.view(flat.shape))
    return out


def _reduce_partial_sums(tensor: Tensor, axes: list[Axis], contributes: bool, receives: bool) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if not contributes:  # zeros instead of a product with zero: entries may be NaN
        total.zero_()
    for axis in axes:
        call_metered("all_reduce", axis, total, dist.all_reduce, total)
    return total if receives else total.zero_()
