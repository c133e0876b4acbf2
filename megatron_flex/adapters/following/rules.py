"""How the layout of what a torch function returns follows from those of what it got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_flex.adapters.propagation import elementwise, indexing, products, shapes
from megatron_flex.adapters.following.call import FunctionCall, LayoutUnknown, SpreadRule, split_words
from megatron_flex.adapters.spread import WHOLE, Spread, SpreadOrUnknown, Unknown

FUNCTION_RULES: Mapping[str, SpreadRule] = {**elementwise.ELEMENTWISE_RULES, **indexing.INDEXING_RULES, **products.PRODUCT_RULES, **shapes.SHAPE_RULES}

# What they get beside the first tensor tells a type or a shape.
TYPE_OR_SHAPE_OPERAND = split_words("to type_as view_as reshape_as expand_as")
# Whose rules look at all operands; others' results follow from the first one, and no other may be cut.
USES_ALL_OPERANDS = {
    *elementwise.BROADCAST,
    *products.PRODUCT_RULES,
    *indexing.INDEXING_RULES,
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
# What may be done to summands, of which the sum is then what has been done to it.
ON_PARTIAL_SUMS = frozenset(
    split_words("""
clone contiguous detach alias to float double neg view reshape flatten unflatten view_as unsqueeze squeeze
T.get mT.get t permute movedim transpose swapaxes expand select unbind chunk split narrow getitem
""")
)
# Always new: what they get tells only a type, or a device.
FACTORIES = {"new_zeros": True, "new_ones": True, "new_full": True, "new_empty": True, "new_tensor": False}
UNIFORM_RESULTS = frozenset(split_words("zeros ones full zeros_like ones_like full_like empty empty_like"))
# These shape a tensor in place, before its rule sees it.
RESHAPING_IN_PLACE = frozenset(split_words("squeeze unsqueeze transpose t swapaxes swapdims resize resize_as set"))


def infer_spread(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operand_spreads: Sequence[tuple[Tensor, SpreadOrUnknown, bool]],
    outs: Sequence[Tensor],
) -> tuple[SpreadOrUnknown, bool]:
    """How the results of a torch function lie on the ranks, and whether they are uniform.

    Args:
        name: its name.
        args: what it got.
        kwargs: likewise.
        told: the tensors among that: how each lies on the ranks, and whether all of its entries are equal.
        outs: the tensors that it returned or wrote to.
    """
    if name in FACTORIES:
        return _spread_of_new(name, operand_spreads), FACTORIES[name]
    unknown = next((t for _, t, u in operand_spreads if isinstance(t, Unknown) and not u), None)
    if unknown is not None:
        return unknown, False
    uniform = name in UNIFORM_RESULTS or (name in ("expand", "clone", "to", "getitem") and bool(operand_spreads) and operand_spreads[0][2])
    spreads = {id(t): s if isinstance(s, Spread) else WHOLE for t, s, _ in operand_spreads}
    if name.startswith("c10d."):
        return Unknown(
            f"it went through {name.removeprefix('c10d.')}, a collective of torch.distributed"
        ), False
    if all(not s.cuts and not s.partial for s in spreads.values()):
        return next((t for _, t, _ in operand_spreads if isinstance(t, Unknown)), WHOLE), uniform
    call = FunctionCall(name, args, kwargs, spreads, frozenset(id(t) for t, _, u in operand_spreads if u), outs[0])
    try:
        return _apply_rule(call, outs), uniform
    except LayoutUnknown as why:
        return Unknown(str(why)), False
    except Exception as error:
        # A way to call it that its rule does not know: unknown, which is an error wherever a hook stands.
        return Unknown(f"{name} was called in a way that is not followed ({type(error).__name__})"), False


def _spread_of_new(name: str, operand_spreads: Sequence[tuple[Tensor, SpreadOrUnknown, bool]]) -> SpreadOrUnknown:
    """What is made anew may be as large as a part of something, unless there are no parts."""
    if all(isinstance(t, Spread) and not t.cuts for _, t, _ in operand_spreads):
        return WHOLE
    return Unknown(f"{name} made it, of which the shape does not tell whether it is whole")


def _apply_rule(call: FunctionCall, outs: Sequence[Tensor]) -> Spread:
    rule = FUNCTION_RULES.get(call.name)
    if rule is None:
        raise LayoutUnknown(f"what {call.name} does to tensors that are cut is not known")
    operands = call.operands()
    if call.name in RESHAPING_IN_PLACE and any(outs[0] is t for t in operands):
        raise LayoutUnknown(f"{call.name}_ in place on something cut is not followed")
    if any(call.spread(t).partial for t in operands) and call.name not in ON_PARTIAL_SUMS:
        raise LayoutUnknown(f"{call.name} is done to a partial sum")
    others = [t for t in operands[1:] if t is not operands[0] and call.cuts(t)]
    if others and (call.name not in USES_ALL_OPERANDS or (call.name in TYPE_OR_SHAPE_OPERAND and not call.cuts(operands[0]))):
        raise LayoutUnknown(f"{call.name} gets something cut beside what it works on")
    return rule(call)
