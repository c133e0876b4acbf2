"""What is handed each tensor that passes its hooks, and keeps what it wants of it: a dump, statistics."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_flex.collectives import Route
from megatron_flex.layout import Layout
from megatron_flex.runtime.captures import Key


class TensorSink(Protocol):
    """Something at work on this rank that hooks stand for.

    Attributes:
        first: whether no step has been taken to its end.
    """

    first: bool

    def take(self, key: Key, local: Tensor, layout: Layout, route: Route | None, factor: float = 1.0) -> str:
        """Record what is wanted of a local tensor. Nothing is communicated, and no error is raised.

        Args:
            key: which tensor it is; a gradient's site ends with GRAD.
            local: this rank's shard; it may be overwritten later.
            layout: of it.
            route: of experts' rows, whose layout is that of each row.
            factor: what a gradient is to be divided by, to be that of the microbatch's own loss.

        Returns:
            Why the tensor cannot be recorded, if that is an error of the step (`leaves_out`); else empty.
        """

    def omits_site(self, name: str, why: str) -> bool:
        """Whether a place that cannot be taken is left out, with a warning; else it is an error."""
