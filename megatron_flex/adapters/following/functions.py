"""Custom autograd.Functions whose effect on layouts is known, by their names."""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.adapters.spread import WHOLE, Spread, Told, Unknown

AXIS = "tp"


def _same(told: Told, dims: int) -> Told:
    return told


def _whole(told: Told, dims: int) -> Told:
    return WHOLE


def _gathered(told: Told, dims: int) -> Told:
    if told == Spread(((dims - 1, AXIS),)):
        return WHOLE
    return told if isinstance(told, Unknown) else Unknown("it was gathered along a dim that was not cut")


def _scattered(told: Told, dims: int) -> Told:
    if told == WHOLE:
        return Spread(((dims - 1, AXIS),))
    return told if isinstance(told, Unknown) else Unknown("it was scattered though it was cut already")


# Names that fairscale, apex and Megatron share for the ways into and out of tensor parallel regions. Backward
# they reduce, gather or split, so that the gradient of what they got is whole.
REGIONS: dict[str, Callable[[Told, int], Told]] = {
    "_CopyToModelParallelRegion": _same,
    "_ReduceFromModelParallelRegion": _whole,
    "_GatherFromModelParallelRegion": _gathered,
    "_ScatterToModelParallelRegion": _scattered,
}
# They run what they are given, and what comes out is what that returned.
TRANSPARENT = frozenset(("CheckpointFunction",))
