"""Tensors of torch.distributed.tensor."""

from __future__ import annotations

from typing import Any

from megatron_flex.adapters.spread import Spread, Unknown
from megatron_flex.mesh import Mesh


def spread_of(placements: Any, device_mesh: Any, mesh: Mesh) -> Spread | Unknown:
    """How the local parts of a DTensor lie on the ranks, by its placements."""
    cuts, partial = [], []
    for placement, group in zip(placements, device_mesh.get_all_groups(), strict=True):
        axis = next((a.name for a in mesh if a.size > 1 and _same(a.group, group)), None)
        if placement.is_replicate() or axis == "dp":
            continue
        if axis is None:
            return Unknown("it is a DTensor on a mesh of other ranks")
        if placement.is_shard():
            cuts.append((placement.dim, axis))
        elif placement.is_partial():
            partial.append(axis)
        else:
            return Unknown(f"its placement {placement} has no rule")
    return Spread(tuple(cuts), tuple(partial))


def _same(one: Any, other: Any) -> bool:
    import torch.distributed as dist

    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)
