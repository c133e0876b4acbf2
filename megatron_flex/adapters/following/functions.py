"""Custom autograd.Functions whose effect on layouts is known, by their names."""

from __future__ import annotations

from collections.abc import Callable

from megatron_flex.adapters.spread import WHOLE, Spread, SpreadOrUnknown, Unknown

AXIS = "tp"


def _unchanged(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    return spread


def _reduced(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    return WHOLE


def _gather_last_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread == Spread(((dims - 1, AXIS),)):
        return WHOLE
    return spread if isinstance(spread, Unknown) else Unknown("it was gathered along a dim that was not cut")


def _scatter_last_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread == WHOLE:
        return Spread(((dims - 1, AXIS),))
    return spread if isinstance(spread, Unknown) else Unknown("it was scattered though it was cut already")


def _gather_first_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread == Spread(((0, AXIS),)):
        return WHOLE
    return spread if isinstance(spread, Unknown) else Unknown("it was gathered along a dim that was not cut")


def _scatter_first_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread in (WHOLE, Spread(partial=(AXIS,))):
        return Spread(((0, AXIS),))
    return spread if isinstance(spread, Unknown) else Unknown("it was scattered though it was cut already")


# Names that fairscale, apex and Megatron share for the ways into and out of tensor parallel regions. Backward
# they reduce, gather or split, so that the gradient of what they got is whole.
PARALLEL_REGIONS: dict[str, Callable[[SpreadOrUnknown, int], SpreadOrUnknown]] = {
    "_CopyToModelParallelRegion": _unchanged,
    "_ReduceFromModelParallelRegion": _reduced,
    "_GatherFromModelParallelRegion": _gather_last_dim,
    "_ScatterToModelParallelRegion": _scatter_last_dim,
    "_GatherFromSequenceParallelRegion": _gather_first_dim,
    "_ScatterToSequenceParallelRegion": _scatter_first_dim,
    "_ReduceScatterToSequenceParallelRegion": _scatter_first_dim,
}
# They return each tensor that they get, unchanged: wrappers learn from their backward pass.
IDENTITY_FUNCTIONS = frozenset(
    ("RegisterPostBackwardFunction", "_DDPSink", "PreBackwardFunctionForModule", "PostBackwardFunctionModule")
)
# They run what they are given, and what comes out is what that returned.
CHECKPOINT_FUNCTIONS = frozenset(("CheckpointFunction",))
