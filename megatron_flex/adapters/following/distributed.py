"""How DTensors lie on the ranks, which their placements tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_flex.adapters.following.marks import normal
from megatron_flex.adapters.spread import Told, Unknown

if TYPE_CHECKING:
    from megatron_flex.mesh import Mesh


def placements(tensor: Tensor) -> Any:
    """Those of a DTensor; None for others."""
    return getattr(tensor, "placements", None) if type(tensor).__name__ == "DTensor" else None


def spread_of_dtensor(tensor: Any, mesh: Mesh) -> Told:
    """How the local parts of a DTensor lie on the ranks."""
    from megatron_flex.adapters.dtensor import spread_of  # which imports what imports this

    found = spread_of(tensor.placements, tensor.device_mesh, mesh, tensor.shape)
    return found if isinstance(found, Unknown) else normal(found, tensor.ndim)
