"""Stretches of a tensor's life, and what its uses in them make of its gradient."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_flex.adapters.following.marks import Axes, GradientNode

GradientEnds = frozenset[Axes | str]


class UseWindow:
    """The uses of a tensor that begin when it passes a place, and end with the module that gets it."""

    def __init__(self, node: GradientNode, module: nn.Module | None, tensor: Tensor) -> None:
        self.node, self.module, self._tensor = node, module, id(tensor)
        self.first = len(node.uses), len(node.ends)
        self.last: tuple[int, int] | None = None

    def close(self, outputs: list[Tensor]) -> None:
        """The module is through; what it hands on as it got it goes on being used."""
        if all(id(t) != self._tensor for t in outputs):
            self.last = len(self.node.uses), len(self.node.ends)

    def found(self) -> GradientEnds:
        """What those uses make of its gradient."""
        uses, ends = self.last or (None, None)
        return self.node.among(slice(self.first[0], uses), slice(self.first[1], ends))
