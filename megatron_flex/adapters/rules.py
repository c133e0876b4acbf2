"""What a framework tells of its parallel modules: how their tensors and parameters lie on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from megatron_flex.adapters.spread import Spread
from megatron_flex.layout import Layout
from megatron_flex.sites import Tap


@dataclass(frozen=True)
class Point:
    """A place inside a module's forward.

    Attributes:
        name: `gemm_input`, `partial`, ...
        spread: how its tensor lies on the ranks.
        tap: how to get at it.
    """

    name: str
    spread: Spread
    tap: Tap


@dataclass(frozen=True)
class Rule:
    """What is known of one module.

    Attributes:
        inputs: how its first tensor lies on the ranks; None if that depends on where it comes from.
        outputs: likewise of what it returns.
        parameters: the layouts of its own parameters by their names in it; those not here every rank holds.
        points: what there is inside.
        hidden: why neither input nor output can be had; empty if they can.
        beside: how further tensors that it returns lie on the ranks, in their order.
        follows: along how many last dims it works, if it works along these only, so that what it returns lies
            as what it gets; of a norm whose inside is one fused operation.
    """

    inputs: Spread | None = None
    outputs: Spread | None = None
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    hidden: str = ""
    beside: tuple[Spread, ...] = ()
    follows: int = 0

    @property
    def places(self) -> bool:
        """Whether it tells of tensors; one that does not is of the parameters alone."""
        known_ends = self.inputs is not None or self.outputs is not None
        return known_ends or self.follows > 0 or bool(self.hidden)


class Rules(Protocol):
    """One framework's rules."""

    def of(self, path: str, module: nn.Module) -> Rule | None:
        """What is known of a module; None of one that is not the framework's.

        What happens inside of a known module is its own; between known modules, layouts are followed.
        Rules may have two methods more: `opened(tap)`, the tap as tensors that tell their layouts want it,
        and `sums_gradients(module)`, whether the gradients of a module's parameters are summed over the
        tensor parallel ranks behind the backward pass.
        """


class NoRules:
    """Of modules that no framework made: their layouts follow from what a person says."""

    def of(self, path: str, module: nn.Module) -> Rule | None:
        """Nothing."""
        return None
