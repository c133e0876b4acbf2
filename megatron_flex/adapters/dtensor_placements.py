"""The layout of a DTensor's placements, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_flex.adapters.layout_rules import Spread, SpreadOrUnknown, UnknownLayout
from megatron_flex.adapters.mesh_axes import axes_of_device_mesh
from megatron_flex.mesh import Mesh


def spread_of_placements(
    placements: Sequence[Any],
    device_mesh: Any,
    mesh: Mesh,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Any] | None = None,
) -> SpreadOrUnknown:
    """The layout of a DTensor's local tensor over the ranks of one sample.

    Args:
        placements: the DTensor's.
        device_mesh: likewise.
        mesh: the axes of the run.
        shape: the DTensor's, where it is known: shards of an uneven dim differ in length.
        grad_placements: the argument of `to_local` for the gradient.

    Raises:
        FlexError: the DeviceMesh has a dim that is not an axis of the run.
    """
    cuts: list[tuple[int, str]] = []
    partial_: list[str] = []
    shared: list[str] = []
    uneven = False
    back = grad_placements or (None,) * len(placements)
    for axis, placement, grad in zip(axes_of_device_mesh(device_mesh, mesh), placements, back, strict=True):
        if not axis:
            continue
        why = _why_no_layout(axis, placement)
        if why:
            return UnknownLayout(f"it is a DTensor with {placement!r} over {axis}, {why}")
        if placement.is_partial():
            partial_.append(axis)
        elif placement.is_shard() and axis != "dp":
            cuts.append((placement.dim, axis))
            uneven = uneven or (shape is not None and shape[placement.dim] % mesh[axis].size != 0)
        elif axis != "dp" and grad is not None and grad.is_partial():
            shared.append(axis)
    return Spread(tuple(cuts), tuple(partial_), tuple(shared), uneven)


def _why_no_layout(axis: str, placement: Any) -> str:
    """Why a placement over an axis has no layout; empty if it has one."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, Replicate):
        return ""
    if isinstance(placement, _StridedShard):
        return "whose shards have several pieces each, which no rule describes; redistribute it to a Shard"
    if isinstance(placement, Shard):
        if axis == "pp" or (axis == "dp" and placement.dim != 0):
            return "which cannot shard the tensors of one sample"
        return ""
    if type(placement) is Partial and placement.reduce_op == "sum":
        return "" if axis != "dp" else "a sum over replicas, not one replica's own tensor; redistribute it"
    if isinstance(placement, Partial):
        return "which becomes a tensor of its own only when it is reduced; redistribute it first"
    return f"a {type(placement).__name__} without a rule"
