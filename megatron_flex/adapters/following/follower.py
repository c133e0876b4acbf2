"""Follows how tensors lie on the ranks through ordinary operations."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron_flex.adapters.base import Undo
from megatron_flex.adapters.rules import Rule
from megatron_flex.adapters.spread import Spread, Told, Unknown
from megatron_flex.layout import Layout
from megatron_flex.mesh import Mesh


class Follower:
    """Knows how the tensors of one model lie on the ranks."""

    def __init__(self, root: nn.Module, known: Mapping[nn.Module, Rule], mesh: Mesh) -> None:
        self.root, self.known, self.mesh = root, known, mesh

    def tell(self, site: str, rule: Spread | None, tensor: Tensor) -> Told:
        """How a tensor that passes a site lies on the ranks; `rule` is what its module's rule says."""
        return rule or Unknown("nothing was followed")

    def gradient(self, tensor: Tensor, layout: Layout) -> Layout:
        """The layout of the gradient of a tensor in that layout; asked for in the backward pass."""
        return layout.gradient()

    def watch(self) -> Undo:
        """Follow in every call of the model that passes a place not yet known, until that is undone."""
        return lambda: None
