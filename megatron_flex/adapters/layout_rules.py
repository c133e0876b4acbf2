"""Rules of a framework's parallel modules: how their tensors and parameters are sharded over the ranks.

A `Spread` describes a tensor of any number of dims; it becomes a Layout once that number is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from megatron_flex.errors import LayoutError
from megatron_flex.layout import Cut, Dim, Layout
from megatron_flex.sites import Tap


@dataclass(frozen=True, slots=True)
class Spread:
    """The sharding that a rule declares for a tensor before its number of dims is known.

    Attributes:
        cuts: pairs of a dim, a negative one counted from the end, and the mesh axis that shards it in equal
            contiguous parts; if several shard one dim the outermost axis comes first.
        partial: axes over which the full tensor is the sum.
        shared: axes over which the tensor is replicated and its gradient is partial.
        uneven: whether shards may differ in length.
    """

    cuts: tuple[tuple[int, str], ...] = ()
    partial: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    uneven: bool = False

    def layout(self, dims: int) -> Layout:
        """The layout of a tensor of `dims` dims.

        Raises:
            LayoutError: it lacks a sharded dim.
        """
        at: dict[int, tuple[Cut, ...]] = {}
        for dim, axis in self.cuts:
            if not -dims <= dim < dims:
                raise LayoutError(
                    f"dim {dim} of a tensor of {dims} dims cannot be sharded over {axis}", dim=dim
                )
            at[dim % dims] = (*at.get(dim % dims, ()), Cut(axis))
        return Layout(
            tuple(Dim("", at.get(i, ()), uneven=self.uneven and i in at) for i in range(dims)),
            partial=self.partial,
            shared=self.shared,
        )


FULL = Spread()


@dataclass(frozen=True, slots=True)
class UnknownLayout:
    """The layout of a tensor is unknown.

    Attributes:
        why: as text: the function or module that made it, and what to do.
        axes: the axes over which its local tensors differ, along unknown dims; None if these are unknown,
            too. They suffice to find the layouts of the gradients of the tensors that it was made of.
    """

    why: str
    axes: frozenset[str] | None = None


SpreadOrUnknown = Spread | UnknownLayout


def differing_axes(spread: SpreadOrUnknown) -> frozenset[str] | None:
    """The axes over which local tensors differ; None if unknown."""
    if isinstance(spread, UnknownLayout):
        return spread.axes
    return frozenset(axis for _, axis in spread.cuts) | set(spread.partial)


def spread_to_json(spread: SpreadOrUnknown) -> dict[str, Any]:
    """The attributes as JSON values, for other ranks."""
    return {"why": spread.why} if isinstance(spread, UnknownLayout) else asdict(spread)


def spread_from_json(values: Mapping[str, Any]) -> SpreadOrUnknown:
    """The object from values that `spread_to_json` returned, after a JSON round trip."""
    if "why" in values:
        return UnknownLayout(values["why"])
    cuts = tuple((int(dim), str(axis)) for dim, axis in values["cuts"])
    return Spread(cuts, tuple(values["partial"]), tuple(values["shared"]), bool(values["uneven"]))


SpreadFunction = Callable[[Tensor], SpreadOrUnknown]  # called with each tensor at the hook point


@dataclass(frozen=True)
class Point:
    """A hook point inside a module's forward.

    Attributes:
        name: `gemm_input`, `partial`, ...
        spread: the sharding of its tensor.
        tap: access to it.
    """

    name: str
    spread: Spread
    tap: Tap


@dataclass(frozen=True)
class Rule:
    """The rule of one module.

    Attributes:
        inputs: the sharding of its first input; None if that depends on the previous module.
        outputs: likewise of its output.
        parameters: the layouts of its own parameters by name; others are replicated.
        points: its inner hook points.
        hidden: why neither input nor output can be hooked; empty if they can.
        beside: the sharding of further output tensors, in their order.
        follows: the number of last dims that it works along, if only these, so that its output is sharded
            like its input; for a norm that is one fused operation.
    """

    inputs: Spread | None = None
    outputs: Spread | None = None
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    hidden: str = ""
    beside: tuple[Spread, ...] = ()
    follows: int = 0

    @property
    def has_activations(self) -> bool:
        """Whether it describes activations; otherwise it describes the parameters alone."""
        known_ends = self.inputs is not None or self.outputs is not None
        return known_ends or self.follows > 0 or bool(self.hidden)


class Rules(Protocol):
    """One framework's rules."""

    def find_rule(self, path: str, module: nn.Module) -> Rule | None:
        """The rule of a module; None if it is not the framework's.

        A rule covers the inside of its module; between modules with rules, layouts are propagated. Rules may
        have two more methods: `opened(tap)`, the tap adapted to tensors with their own layouts, and
        `sums_gradients(module)`, whether the gradients of a module's parameters are summed over the tensor
        parallel ranks after the backward pass.
        """


class NoRules:
    """Plain modules: their layouts follow from the user's declarations."""

    def find_rule(self, path: str, module: nn.Module) -> Rule | None:
        return None
