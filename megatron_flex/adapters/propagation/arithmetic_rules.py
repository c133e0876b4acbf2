"""Rules of arithmetic: elementwise functions with broadcasting, and products that sum over dims."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_flex.adapters.layout_rules import Spread
from megatron_flex.adapters.propagation.function_call import (
    FunctionCall,
    LayoutUnknown,
    SpreadRule,
    split_words,
)

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
    """The sharded dims of the result of broadcast operands.

    Args:
        call: the call, for messages and uniform operands.
        operands: tensors and their sharded dims.
        dims: the number of dims of the result; the operands' are aligned at the end.

    Raises:
        LayoutUnknown: their shardings differ.
    """
    out: dict[int, tuple[str, ...]] = {}
    for tensor, cuts in operands:
        for dim, axes in cuts.items():
            at = dim + dims - tensor.ndim
            if out.setdefault(at, axes) != axes:
                raise LayoutUnknown(
                    f"{call.name} combines tensors of which dim {at} is sharded over different axes"
                )
    for tensor, cuts in operands:
        for at, axes in out.items():
            dim = at - dims + tensor.ndim
            if dim < 0 or dim in cuts or tensor.shape[dim] == 1 or call.uniform(tensor):
                continue
            raise LayoutUnknown(
                f"{call.name} combines a tensor sharded along dim {at} over {' and '.join(axes)} with one "
                f"that every rank holds and that has {tensor.shape[dim]} entries there, as if sharded too"
            )
    return out


def broadcast(call: FunctionCall) -> Spread:
    """Elementwise over all operands."""
    operands = [(t, call.cuts(t)) for t in call.operands()]
    if call.name == "where" and len(operands) == 1:
        raise LayoutUnknown("where looks for the positions of entries of a sharded tensor")
    return call.result(join_cuts(call, operands, call.out.ndim))


def unary(call: FunctionCall) -> Spread:
    """Sharded as the first operand; further ones give only a dtype or shape."""
    return call.spread(call.first)


def overwrite(call: FunctionCall) -> Spread:
    """The destination is sharded as the source."""
    source = call.arg(1, "src")
    if call.first.shape == source.shape:
        return call.spread(source)
    return broadcast(call)


ELEMENTWISE_RULES: dict[str, SpreadRule] = {
    **dict.fromkeys(BROADCAST, broadcast),
    **dict.fromkeys(UNARY, unary),
    "copy": overwrite,
}


Labels = Sequence[str]  # one for each dim; a dim whose label starts with `*` may have one entry in an operand


def contract(call: FunctionCall, operands: Sequence[tuple[Tensor, Labels]], out: Labels) -> Spread:
    """The layout of a product of tensors whose dims are labelled.

    Args:
        call: the call.
        operands: the operands with their labels.
        out: the result's labels; others are reduced.

    Raises:
        LayoutUnknown: the operands' shardings differ.
    """
    cut: dict[str, tuple[str, ...]] = {}
    for tensor, labels in operands:
        for dim, axes in call.cuts(tensor).items():
            if cut.setdefault(labels[dim], axes) != axes:
                raise LayoutUnknown(f"{call.name} combines tensors that are sharded over different axes")
    for tensor, labels in operands:
        sharded_labels = {labels[d] for d in call.cuts(tensor)}
        for dim, label in enumerate(labels):
            if label not in cut or label in sharded_labels or call.uniform(tensor):
                continue
            if not (label.startswith("*") and tensor.shape[dim] == 1):
                raise LayoutUnknown(
                    f"{call.name} combines a tensor sharded over {' and '.join(cut[label])} with one that "
                    f"every rank holds and that has {tensor.shape[dim]} entries in the dim that belongs to it"
                )
    summed = [a for label, axes in cut.items() if label not in out for a in axes]
    if summed:
        raise LayoutUnknown(
            f"{call.name} sums over a dim that is sharded over {' and '.join(summed)}: each rank has a "
            "partial sum"
        )
    return call.result({out.index(label): axes for label, axes in cut.items() if label in out})


def _batch(tensor: Tensor, last: int) -> list[str]:
    """Labels of the leading dims, aligned at the end."""
    count = tensor.ndim - last
    return [f"*{i - count}" for i in range(count)]


def product(call: FunctionCall, a: Tensor, b: Tensor) -> Spread:
    """`a @ b`."""
    if a.ndim == 1:
        left: list[str] = ["k"]
    else:
        left = [*_batch(a, 2), "m", "k"]
    right = ["k"] if b.ndim == 1 else [*_batch(b, 2), "k", "n"]
    batch = max(_batch(a, 2) if a.ndim > 1 else [], _batch(b, 2) if b.ndim > 1 else [], key=len)
    out = [*batch, *(["m"] if a.ndim > 1 else []), *(["n"] if b.ndim > 1 else [])]
    return contract(call, [(a, left), (b, right)], out)


def matmul(call: FunctionCall) -> Spread:
    """`@` and related functions."""
    a, b = call.first, call.arg(1, ("other", "mat2", "vec", "tensor"))
    return product(call, b, a) if call.name == "rmatmul" else product(call, a, b)


def outer(call: FunctionCall) -> Spread:
    """All pairs of entries."""
    return contract(call, [(call.first, "m"), (call.arg(1, ("vec2", "other")), "n")], "mn")


def linear(call: FunctionCall) -> Spread:
    """`x @ w.T + b`."""
    x, weight, bias = call.first, call.arg(1, "weight"), call.arg(2, "bias")
    batch = [f"b{i}" for i in range(x.ndim - 1)]
    operands: list[tuple[Tensor, Labels]] = [(x, [*batch, "k"]), (weight, ["n", "k"])]
    return contract(call, [*operands, *([] if bias is None else [(bias, ["n"])])], [*batch, "n"])


def add_product(call: FunctionCall) -> Spread:
    """`baddbmm` and `addmm`: a product plus a tensor."""
    x, a, b = call.first, call.arg(1, ("batch1", "mat1")), call.arg(2, ("batch2", "mat2"))
    batch = [f"*{i}" for i in range(a.ndim - 2)]
    labels = [*batch, "*m", "*n"]
    operands: list[tuple[Tensor, Labels]] = [(a, [*batch, "*m", "k"]), (b, [*batch, "k", "*n"])]
    return contract(call, [*operands, (x, labels[len(labels) - x.ndim :])], labels)


def einsum(call: FunctionCall) -> Spread:
    """By its equation."""
    equation = call.args[0]
    operands = list(call.args[1]) if isinstance(call.args[1], (tuple, list)) else list(call.args[1:])
    if not isinstance(equation, str):
        raise LayoutUnknown("einsum by lists of dims is not followed")
    equation = equation.replace(" ", "")
    given, arrow, out = equation.partition("->")
    terms = given.split(",")
    longest = max(
        (t.ndim - len(e.replace("...", "")) for e, t in zip(terms, operands, strict=True)), default=0
    )

    def labels(term: str, count: int) -> list[str]:
        ahead, dots, after = term.partition("...")
        return [*ahead, *([f"*{i - count}" for i in range(count)] if dots else []), *after]

    if not arrow:
        letters = sorted(c for c in set(given) if c.isalpha() and given.count(c) == 1)
        out = ("..." if "..." in given else "") + "".join(letters)
    named = [(t, labels(e, t.ndim - len(e.replace("...", "")))) for e, t in zip(terms, operands, strict=True)]
    return contract(call, named, labels(out, longest))


def attention(call: FunctionCall) -> Spread:
    """Scaled dot products: all sharded over the same batch dims or heads; queries also further."""
    q, k, v = (call.arg(i, n) for i, n in enumerate(("query", "key", "value")))
    mask, causal = call.arg(3, "attn_mask"), call.arg(5, "is_causal", False)
    if causal and q.ndim - 2 in call.cuts(q):
        raise LayoutUnknown(f"{call.name} masks by positions, over which its queries are sharded")
    operands: list[tuple[Tensor, Labels]] = [
        (q, [*_batch(q, 2), "l", "e"]),
        (k, [*_batch(k, 2), "s", "e"]),
        (v, [*_batch(v, 2), "s", "f"]),
    ]
    if mask is not None:
        labels = [*_batch(q, 2), "*l", "*s"]
        mask_labels = labels[len(labels) - mask.ndim :]
        if (mask.ndim >= 1 and call.cuts(mask)) or q.ndim - 2 in call.cuts(q):
            mask_labels = [
                x.strip("*") if x in ("*l", "*s") and mask.shape[i] != 1 else x
                for i, x in enumerate(mask_labels)
            ]
        operands.append((mask, mask_labels))
    return contract(call, operands, [*_batch(q, 2), "l", "f"])


def embedding(call: FunctionCall) -> Spread:
    """Rows of a table: positions may be sharded, and the width."""
    index, table = call.first, call.arg(1, "weight")
    cuts = dict(call.cuts(index))
    if 0 in call.cuts(table):
        raise LayoutUnknown("embedding looks up in a table of which each rank has some rows")
    if 1 in call.cuts(table):
        cuts[index.ndim] = call.cuts(table)[1]
    return call.result(cuts)


PRODUCT_RULES: dict[str, SpreadRule] = {
    **dict.fromkeys(("matmul", "rmatmul", "bmm", "mm", "mv", "dot", "inner_"), matmul),
    **dict.fromkeys(("outer", "ger"), outer),
    **dict.fromkeys(("addmm", "baddbmm"), add_product),
    "linear": linear,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
}
