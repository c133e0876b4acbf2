"""Inference of the layout of a function's result from those of its arguments.

The functions are torch's, with a table of rules, and custom autograd.Functions with a known effect on
layouts, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_flex.adapters.layout_rules import (
    FULL,
    Spread,
    SpreadOrUnknown,
    UnknownLayout,
    differing_axes,
)
from megatron_flex.adapters.propagation import arithmetic_rules, shape_rules
from megatron_flex.adapters.propagation.function_call import (
    FunctionCall,
    LayoutUnknown,
    SpreadRule,
    split_words,
)

AXIS = "tp"


def _unchanged(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    return spread


def _reduced(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    return FULL


def _gather_last_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread == Spread(((dims - 1, AXIS),)):
        return FULL
    return (
        spread
        if isinstance(spread, UnknownLayout)
        else UnknownLayout("it was gathered along a dim that was not sharded")
    )


def _scatter_last_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread == FULL:
        return Spread(((dims - 1, AXIS),))
    return (
        spread
        if isinstance(spread, UnknownLayout)
        else UnknownLayout("it was scattered though it was sharded already")
    )


def _gather_first_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread == Spread(((0, AXIS),)):
        return FULL
    return (
        spread
        if isinstance(spread, UnknownLayout)
        else UnknownLayout("it was gathered along a dim that was not sharded")
    )


def _scatter_first_dim(spread: SpreadOrUnknown, dims: int) -> SpreadOrUnknown:
    if spread in (FULL, Spread(partial=(AXIS,))):
        return Spread(((0, AXIS),))
    return (
        spread
        if isinstance(spread, UnknownLayout)
        else UnknownLayout("it was scattered though it was sharded already")
    )


# Names that fairscale, apex and Megatron share for the functions at the borders of tensor parallel regions.
# In the backward pass they reduce, gather or split, so that the gradient of their input is replicated.
PARALLEL_REGIONS: dict[str, Callable[[SpreadOrUnknown, int], SpreadOrUnknown]] = {
    "_CopyToModelParallelRegion": _unchanged,
    "_ReduceFromModelParallelRegion": _reduced,
    "_GatherFromModelParallelRegion": _gather_last_dim,
    "_ScatterToModelParallelRegion": _scatter_last_dim,
    "_GatherFromSequenceParallelRegion": _gather_first_dim,
    "_ScatterToSequenceParallelRegion": _scatter_first_dim,
    "_ReduceScatterToSequenceParallelRegion": _scatter_first_dim,
}
# They return each input tensor unchanged: wrappers use their backward pass.
IDENTITY_FUNCTIONS = frozenset(
    ("RegisterPostBackwardFunction", "_DDPSink", "PreBackwardFunctionForModule", "PostBackwardFunctionModule")
)
# They multiply the first tensor by a weight, as torch's `linear` does.
LINEAR_FUNCTIONS = frozenset(("LinearFunctionForZeroStage3",))
# They call another function and return its result.
CHECKPOINT_FUNCTIONS = frozenset(("CheckpointFunction",))


FUNCTION_RULES: Mapping[str, SpreadRule] = {
    **arithmetic_rules.ELEMENTWISE_RULES,
    **shape_rules.INDEXING_RULES,
    **arithmetic_rules.PRODUCT_RULES,
    **shape_rules.SHAPE_RULES,
}

# Operands beside the first tensor give only a dtype or a shape.
TYPE_OR_SHAPE_OPERAND = split_words("to type_as view_as reshape_as expand_as")
# Their rules use all operands; others use only the first one, and no other operand may be sharded.
USES_ALL_OPERANDS = {
    *arithmetic_rules.BROADCAST,
    *arithmetic_rules.PRODUCT_RULES,
    *shape_rules.INDEXING_RULES,
    *[
        "copy",
        "cat",
        "concat",
        "concatenate",
        "stack",
        "layer_norm",
        "rms_norm",
        "gather",
        "take_along_dim",
        "max",
        "min",
    ],
    *["to", "type_as", "view_as", "reshape_as", "expand_as"],
}
# Functions that commute with the sum over ranks, so that they apply to partial tensors.
ON_PARTIAL_SUMS = frozenset(
    split_words("""
clone contiguous detach alias to float double neg view reshape flatten unflatten view_as unsqueeze squeeze
T.get mT.get t permute movedim transpose swapaxes expand select unbind chunk split narrow getitem
""")
)
# Always new: the arguments give only a dtype, or a device.
FACTORIES = {"new_zeros": True, "new_ones": True, "new_full": True, "new_empty": True, "new_tensor": False}
UNIFORM_RESULTS = frozenset(split_words("zeros ones full zeros_like ones_like full_like empty empty_like"))
# These reshape a tensor in place, before its rule is applied.
RESHAPING_IN_PLACE = frozenset(
    split_words("squeeze unsqueeze transpose t swapaxes swapdims resize resize_as set")
)


def infer_spread(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operand_spreads: Sequence[tuple[Tensor, SpreadOrUnknown, bool]],
    outs: Sequence[Tensor],
) -> tuple[SpreadOrUnknown, bool]:
    """Infer the sharding of the results of a torch function, and whether they are uniform.

    Args:
        name: its name.
        args: its positional arguments.
        kwargs: its keyword arguments.
        operand_spreads: the sharding of each tensor among the arguments, and whether its entries are equal.
        outs: the tensors that the function returned or wrote to.
    """
    if name in FACTORIES:
        return _spread_of_new(name, operand_spreads), FACTORIES[name]
    unknown = next((t for _, t, u in operand_spreads if isinstance(t, UnknownLayout) and not u), None)
    axes = None if name.startswith("c10d.") else _differing_axes([t for _, t, u in operand_spreads if not u])
    if unknown is not None:
        return UnknownLayout(unknown.why, axes), False
    uniform = name in UNIFORM_RESULTS or (
        name in ("expand", "clone", "to", "getitem") and bool(operand_spreads) and operand_spreads[0][2]
    )
    spreads = {id(t): s if isinstance(s, Spread) else FULL for t, s, _ in operand_spreads}
    if name.startswith("c10d."):
        return UnknownLayout(
            f"it went through {name.removeprefix('c10d.')}, a collective of torch.distributed"
        ), False
    if all(not s.cuts and not s.partial for s in spreads.values()):
        return next((t for _, t, _ in operand_spreads if isinstance(t, UnknownLayout)), FULL), uniform
    call = FunctionCall(
        name, args, kwargs, spreads, frozenset(id(t) for t, _, u in operand_spreads if u), outs[0]
    )
    try:
        return _apply_rule(call, outs), uniform
    except LayoutUnknown as why:
        return UnknownLayout(str(why), axes), False
    except Exception as error:
        # An unknown signature gives an unknown layout, which is an error only at a hook point with a hook.
        return UnknownLayout(
            f"{name} was called in a way that is not followed ({type(error).__name__})", axes
        ), False


def _differing_axes(spreads: Sequence[SpreadOrUnknown]) -> frozenset[str] | None:
    """The axes over which the result of a torch function of local tensors differs, whatever the function."""
    differing = [differing_axes(spread) for spread in spreads]
    return None if None in differing else frozenset[str]().union(*(axes for axes in differing if axes))


def _spread_of_new(
    name: str, operand_spreads: Sequence[tuple[Tensor, SpreadOrUnknown, bool]]
) -> SpreadOrUnknown:
    """A new tensor may have the size of a shard, unless nothing is sharded."""
    if all(isinstance(t, Spread) and not t.cuts for _, t, _ in operand_spreads):
        return FULL
    return UnknownLayout(f"{name} made it, and its shape does not show whether it is a full tensor")


def _apply_rule(call: FunctionCall, outs: Sequence[Tensor]) -> Spread:
    rule = FUNCTION_RULES.get(call.name)
    if rule is None:
        raise LayoutUnknown(f"what {call.name} does to sharded tensors is not known")
    operands = call.operands()
    if call.name in RESHAPING_IN_PLACE and any(outs[0] is t for t in operands):
        raise LayoutUnknown(f"{call.name}_ in place on a sharded tensor is not supported")
    if any(call.spread(t).partial for t in operands) and call.name not in ON_PARTIAL_SUMS:
        raise LayoutUnknown(f"{call.name} is done to a partial sum")
    others = [t for t in operands[1:] if t is not operands[0] and call.cuts(t)]
    if others and (
        call.name not in USES_ALL_OPERANDS
        or (call.name in TYPE_OR_SHAPE_OPERAND and not call.cuts(operands[0]))
    ):
        raise LayoutUnknown(f"{call.name} has a sharded argument in addition to its operand")
    return rule(call)
