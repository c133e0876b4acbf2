"""How DTensors lie on the ranks, which their placements tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_flex.adapters.following.marks import normalize_spread
from megatron_flex.adapters.spread import SpreadOrUnknown, Unknown

if TYPE_CHECKING:
    from megatron_flex.mesh import Mesh


def placements_of(tensor: Tensor) -> Any:
    """Those of a DTensor; None for others."""
    return getattr(tensor, "placements", None) if type(tensor).__name__ == "DTensor" else None


def spread_of_dtensor(tensor: Any, mesh: Mesh) -> SpreadOrUnknown:
    """How the local parts of a DTensor lie on the ranks."""
    from megatron_flex.adapters.dtensor import spread_of_placements  # which imports what imports this

    found = spread_of_placements(tensor.placements, tensor.device_mesh, mesh, tensor.shape)
    return found if isinstance(found, Unknown) else normalize_spread(found, tensor.ndim)
