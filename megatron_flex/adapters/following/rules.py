"""How the layout of what a torch function returns follows from those of what it got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_flex.adapters.following import elementwise, indexing, products, shapes
from megatron_flex.adapters.following.call import Call, Refusal, Rule, words
from megatron_flex.adapters.spread import WHOLE, Spread, Told, Unknown

RULES: Mapping[str, Rule] = {**elementwise.RULES, **indexing.RULES, **products.RULES, **shapes.RULES}

# What they get beside the first tensor tells a type or a shape.
BESIDE = words("to type_as view_as reshape_as expand_as")
# Whose rules look at all operands; others' results follow from the first one, and no other may be cut.
ALL = {
    *elementwise.BROADCAST,
    *products.RULES,
    *indexing.RULES,
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
TO_SUMMANDS = frozenset(
    words("""
clone contiguous detach alias to float double neg view reshape flatten unflatten view_as unsqueeze squeeze
T.get mT.get t permute movedim transpose swapaxes expand select unbind chunk split narrow getitem
""")
)
# Always new: what they get tells only a type, or a device.
FACTORIES = {"new_zeros": True, "new_ones": True, "new_full": True, "new_empty": True, "new_tensor": False}
UNIFORM = frozenset(words("zeros ones full zeros_like ones_like full_like empty empty_like"))
# These shape a tensor in place, before its rule sees it.
RESHAPING = frozenset(words("squeeze unsqueeze transpose t swapaxes swapdims resize resize_as set"))


def follow(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    told: Sequence[tuple[Tensor, Told, bool]],
    outs: Sequence[Tensor],
) -> tuple[Told, bool]:
    """How the results of a torch function lie on the ranks, and whether they are uniform.

    Args:
        name: its name.
        args: what it got.
        kwargs: likewise.
        told: the tensors among that: how each lies on the ranks, and whether all of its entries are equal.
        outs: the tensors that it returned or wrote to.
    """
    if name in FACTORIES:
        return _new(name, told), FACTORIES[name]
    unknown = next((t for _, t, u in told if isinstance(t, Unknown) and not u), None)
    if unknown is not None:
        return unknown, False
    uniform = name in UNIFORM or (name in ("expand", "clone", "to", "getitem") and bool(told) and told[0][2])
    spreads = {id(t): s if isinstance(s, Spread) else WHOLE for t, s, _ in told}
    if name.startswith("c10d."):
        return Unknown(
            f"it went through {name.removeprefix('c10d.')}, a collective of torch.distributed"
        ), False
    if all(not s.cuts and not s.partial for s in spreads.values()):
        return next((t for _, t, _ in told if isinstance(t, Unknown)), WHOLE), uniform
    call = Call(name, args, kwargs, spreads, frozenset(id(t) for t, _, u in told if u), outs[0])
    try:
        return _by_rule(call, outs), uniform
    except Refusal as why:
        return Unknown(str(why)), False
    except Exception as error:
        # A way to call it that its rule does not know: unknown, which is an error wherever a hook stands.
        return Unknown(f"{name} was called in a way that is not followed ({type(error).__name__})"), False


def _new(name: str, told: Sequence[tuple[Tensor, Told, bool]]) -> Told:
    """What is made anew may be as large as a part of something, unless there are no parts."""
    if all(isinstance(t, Spread) and not t.cuts for _, t, _ in told):
        return WHOLE
    return Unknown(f"{name} made it, of which the shape does not tell whether it is whole")


def _by_rule(call: Call, outs: Sequence[Tensor]) -> Spread:
    rule = RULES.get(call.name)
    if rule is None:
        raise Refusal(f"what {call.name} does to tensors that are cut is not known")
    operands = call.operands()
    if call.name in RESHAPING and any(outs[0] is t for t in operands):
        raise Refusal(f"{call.name}_ in place on something cut is not followed")
    if any(call.spread(t).partial for t in operands) and call.name not in TO_SUMMANDS:
        raise Refusal(f"{call.name} is done to a partial sum")
    others = [t for t in operands[1:] if t is not operands[0] and call.cuts(t)]
    if others and (call.name not in ALL or (call.name in BESIDE and not call.cuts(operands[0]))):
        raise Refusal(f"{call.name} gets something cut beside what it works on")
    return rule(call)
