"""How a tensor lies on the ranks of one sample, whatever its number of dims; a Layout once that is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from megatron_flex.errors import LayoutError
from megatron_flex.layout import Cut, Dim, Layout


@dataclass(frozen=True, slots=True)
class Spread:
    """What a rule says of a tensor before anyone has seen it.

    Attributes:
        cuts: pairs of a dim, a negative one counted from the end, and the mesh axis that slices it in equal
            contiguous parts; of several for one dim the outermost axis comes first.
        partial: axes over which the whole is the sum.
        shared: axes over which ranks hold the whole and a share of its gradient each.
        uneven: whether the parts of what is cut may differ in length.
    """

    cuts: tuple[tuple[int, str], ...] = ()
    partial: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    uneven: bool = False

    def layout(self, dims: int) -> Layout:
        """The layout of a tensor of so many dims.

        Raises:
            LayoutError: it has not the dims that are cut.
        """
        at: dict[int, tuple[Cut, ...]] = {}
        for dim, axis in self.cuts:
            if not -dims <= dim < dims:
                raise LayoutError(f"dim {dim} of a tensor of {dims} dims cannot be cut over {axis}")
            at[dim % dims] = (*at.get(dim % dims, ()), Cut(axis))
        return Layout(
            tuple(Dim("", at.get(i, ()), uneven=self.uneven and i in at) for i in range(dims)),
            partial=self.partial,
            shared=self.shared,
        )


WHOLE = Spread()


@dataclass(frozen=True, slots=True)
class Unknown:
    """No rule tells how a tensor lies on the ranks.

    Attributes:
        why: in words: what made it, and what to do.
    """

    why: str


SpreadOrUnknown = Spread | Unknown


def spread_to_json(told: SpreadOrUnknown) -> dict[str, Any]:
    """In values of JSON's, which other ranks read."""
    return asdict(told)


def spread_from_json(values: Mapping[str, Any]) -> SpreadOrUnknown:
    """What `spread_to_json` gave, after JSON."""
    if "why" in values:
        return Unknown(values["why"])
    cuts = tuple((int(dim), str(axis)) for dim, axis in values["cuts"])
    return Spread(cuts, tuple(values["partial"]), tuple(values["shared"]), bool(values["uneven"]))


SpreadFunction = Callable[[Tensor], SpreadOrUnknown]  # asked for each tensor that passes
