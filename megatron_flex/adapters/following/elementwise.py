"""Rules of functions that treat each entry by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_flex.adapters.following.call import FunctionCall, LayoutUnknown, SpreadRule, split_words
from megatron_flex.adapters.spread import Spread

BROADCAST = split_words("""
add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power lerp
addcmul addcdiv maximum minimum fmax fmin clamp clip clamp_min clamp_max where masked_fill eq ne lt le gt
ge equal_nan isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
bitwise_left_shift bitwise_right_shift atan2 arctan2 hypot copysign xlogy nextafter heaviside ldexp
complex polar fill
""")
UNARY = split_words("""
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin
cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logsigmoid logit erf erfc erfinv sign sgn
floor ceil round trunc frac relu relu6 leaky_relu rrelu elu celu selu gelu silu mish hardtanh hardsigmoid
hardswish hardshrink softshrink softplus softsign tanhshrink threshold nan_to_num isnan isinf isfinite
isneginf isposinf isreal logical_not bitwise_not alpha_dropout feature_alpha_dropout clone contiguous
detach to type type_as float double half bfloat16 long int short char byte bool cpu cuda requires_grad_
requires_grad retain_grad alias conj conj_physical resolve_conj resolve_neg angle real imag real.get
imag.get data.get zeros_like ones_like full_like empty_like rand_like randn_like randint_like bernoulli
zero pin_memory dropout
""")


def join_cuts(
    call: FunctionCall, operands: Sequence[tuple[Tensor, dict[int, tuple[str, ...]]]], dims: int
) -> dict[int, tuple[str, ...]]:
    """The cuts of what comes of operands that are broadcast against each other.

    Args:
        call: for words, and for what is uniform.
        operands: tensors and their cuts.
        dims: how many dims the result has; the operands' are aligned at the end.

    Raises:
        Refusal: they do not lie alike on the ranks.
    """
    out: dict[int, tuple[str, ...]] = {}
    for tensor, cuts in operands:
        for dim, axes in cuts.items():
            at = dim + dims - tensor.ndim
            if out.setdefault(at, axes) != axes:
                raise LayoutUnknown(f"{call.name} combines tensors of which dim {at} is cut over different axes")
    for tensor, cuts in operands:
        for at, axes in out.items():
            dim = at - dims + tensor.ndim
            if dim < 0 or dim in cuts or tensor.shape[dim] == 1 or call.uniform(tensor):
                continue
            raise LayoutUnknown(
                f"{call.name} combines a tensor cut along dim {at} over {' and '.join(axes)} with one that "
                f"every rank holds and that has {tensor.shape[dim]} entries there, as if it were cut too"
            )
    return out


def broadcast(call: FunctionCall) -> Spread:
    """Entry by entry of all operands."""
    operands = [(t, call.cuts(t)) for t in call.operands()]
    if call.name == "where" and len(operands) == 1:
        raise LayoutUnknown("where looks for the places of entries of something cut")
    return call.result(join_cuts(call, operands, call.out.ndim))


def unary(call: FunctionCall) -> Spread:
    """As the first operand; further ones only tell a type."""
    return call.spread(call.first)


def overwrite(call: FunctionCall) -> Spread:
    """What is overwritten is cut as what it is overwritten by."""
    source = call.arg(1, "src")
    if call.first.shape == source.shape:
        return call.spread(source)
    return broadcast(call)


ELEMENTWISE_RULES: dict[str, SpreadRule] = {
    **dict.fromkeys(BROADCAST, broadcast),
    **dict.fromkeys(UNARY, unary),
    "copy": overwrite,
}
