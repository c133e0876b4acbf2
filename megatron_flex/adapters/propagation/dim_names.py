"""The names of the dims of a tensor, propagated from the model's inputs through torch's functions.

A dim is known by the named dims that it consists of: `b` and `s` that a reshape has merged are two factors of
one dim, and another reshape gives them back. A dim of which nothing is known has an empty name; no name is
guessed from a length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from torch import Tensor

from megatron_flex.adapters.layout_rules import FULL, Spread
from megatron_flex.adapters.propagation.arithmetic_rules import BROADCAST, UNARY
from megatron_flex.adapters.propagation.function_call import (
    FunctionCall,
    LayoutUnknown,
    split_words,
    unpack_sequence,
)
from megatron_flex.adapters.propagation.shape_rules import INDEXING_RULES, SHAPE_RULES, inferred_dim

HEADS, GROUPS, WIDTH = "n", "g", "d"  # heads of queries, of keys and values, and the width of a head


class Factor(NamedTuple):
    """A dim, or one of the dims that were merged into it.

    Attributes:
        name: its name; empty if unknown.
        size: its length.
    """

    name: str
    size: int


DimFactors = tuple[Factor, ...]
NamedDims = tuple[DimFactors, ...]  # one for each dim of a tensor
HeadSizes = Mapping[tuple[int, int], str]  # from heads and their width to the name of the dim of heads


def name_dims(shape: Sequence[int], names: Sequence[str]) -> NamedDims:
    """The dims of a tensor of this shape; further dims than `names` are unknown."""
    padded = [*names, *[""] * (len(shape) - len(names))]
    return tuple((Factor(name, size),) for name, size in zip(padded, shape, strict=True))


def describe_dims(dims: NamedDims) -> tuple[str, ...]:
    """The names of dims; merged ones as `b*s`, empty where a part is unknown."""
    return tuple("*".join(f.name for f in d) if all(f.name for f in d) else "" for d in dims)


def _unknown(size: int) -> DimFactors:
    return (Factor("", size),)


def _is_named(dim: DimFactors) -> bool:
    return any(f.name for f in dim)


def keep_where_equal(dims: NamedDims, shape: Sequence[int]) -> NamedDims | None:
    """The dims of a tensor whose shards were gathered or scattered along some of them."""
    if len(dims) != len(shape):
        return None
    return tuple(
        d if _length(d) == n else (Factor(d[0].name, n),) if len(d) == 1 else _unknown(n)
        for d, n in zip(dims, shape, strict=True)
    )


def _length(dim: DimFactors) -> int:
    out = 1
    for factor in dim:
        out *= factor.size
    return out


Operands = Sequence[tuple[Tensor, NamedDims | None]]


def infer_names(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Operands,
    outs: Sequence[Tensor],
    heads: HeadSizes,
) -> list[NamedDims | None]:
    """The dims of the results of a torch function; None where nothing is known.

    Args:
        name: the function's name.
        args: its positional arguments.
        kwargs: its keyword arguments.
        operands: the tensors among the arguments, and their dims.
        outs: the tensors that the function returned or wrote to.
        heads: the sizes of heads of the model's configuration.
    """
    known = {id(t): dims for t, dims in operands if dims is not None and any(map(_is_named, dims))}
    if not known:
        return [None] * len(outs)
    spreads = {id(t): FULL for t, _ in operands}
    names_of_outs: list[NamedDims | None] = []
    for out in outs:
        call = NamedCall(FunctionCall(name, args, kwargs, spreads, frozenset(), out), known, heads)
        try:
            names_of_outs.append(_infer(call))
        except Exception:  # an unknown signature: the names are unknown, which is an error only where asked
            names_of_outs.append(None)
    return names_of_outs


class NamedCall(NamedTuple):
    """A call of a torch function, whose operands have names.

    Attributes:
        call: the call.
        known: the dims of its operands, by identity.
        heads: the sizes of heads of the model's configuration.
    """

    call: FunctionCall
    known: Mapping[int, NamedDims]
    heads: HeadSizes

    def dims(self, tensor: Tensor) -> NamedDims:
        return self.known.get(id(tensor)) or name_dims(tensor.shape, ())

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's."""
        return tuple(self.call.out.shape)


NameRule = Callable[[NamedCall], NamedDims | None]


def _infer(named: NamedCall) -> NamedDims | None:
    call = named.call
    if call.name.startswith("c10d."):
        return named.known.get(id(call.out))
    if call.name in REORDERING_IN_PLACE and any(call.out is t for t in call.operands()):
        return None
    rule = NAME_RULES.get(call.name)
    if rule is not None:
        return rule(named)
    return _move(named) if call.name in SHAPE_RULES or call.name in INDEXING_RULES else None


def _keep(named: NamedCall) -> NamedDims | None:
    """Of the first operand: functions that change values, and along no dim their order."""
    first = named.call.first
    return named.dims(first) if tuple(first.shape) == named.shape else None


def _join(named: NamedCall, operands: Sequence[Tensor] | None = None) -> NamedDims:
    """Of operands that are broadcast against each other: a name that one of them has, if no other differs.

    A dim of which only a part is known, as of key heads that were repeated, counts where no other is known.
    """
    out = []
    if named.call.name == "where" and len(named.call.operands()) == 1:
        return name_dims(named.shape, ())  # the positions of its entries
    for at, size in enumerate(named.shape):
        factors = set()
        for tensor in named.call.operands() if operands is None else operands:
            dim = at - len(named.shape) + tensor.ndim
            if dim >= 0 and tensor.shape[dim] == size and _is_named(product := named.dims(tensor)[dim]):
                factors.add(product)
        factors = {dim for dim in factors if all(f.name for f in dim)} or factors
        out.append(factors.pop() if len(factors) == 1 else _unknown(size))
    return tuple(out)


def _move(named: NamedCall) -> NamedDims | None:
    """By the rule that says where a sharded dim goes: each dim of the operand, sharded over its own axis."""
    call, first = named.call, named.call.first
    rule = SHAPE_RULES.get(call.name) or INDEXING_RULES[call.name]
    if call.name == "setitem":
        return named.dims(first)
    out = list(name_dims(named.shape, ()))
    for at, dim in enumerate(named.dims(first)):
        if not _is_named(dim):
            continue
        spreads = {id(t): FULL for t in call.operands()} | {id(first): Spread(((at, "dim"),))}
        try:
            cuts = rule(FunctionCall(call.name, call.args, call.kwargs, spreads, frozenset(), call.out)).cuts
        except LayoutUnknown:
            continue
        for goal, _ in cuts:
            if named.shape[goal] == _length(dim):
                out[goal] = dim
    return tuple(out)


def _concatenate(named: NamedCall) -> NamedDims:
    """All dims but the one along which tensors are concatenated; of stacked tensors all."""
    call = named.call
    parts = [t for t in call.arg(0, "tensors") if t.numel() or t.ndim > 1]
    dim = int(call.arg(1, ("dim", "axis"), 0)) % len(named.shape)
    if call.name == "stack":
        joined = _join(named._replace(call=_with_out(call, parts[0])), parts)
        return (*joined[:dim], _unknown(named.shape[dim]), *joined[dim:])
    joined = _join(named, parts)
    return joined if len(parts) == 1 else (*joined[:dim], _unknown(named.shape[dim]), *joined[dim + 1 :])


def _with_out(call: FunctionCall, out: Tensor) -> FunctionCall:
    spreads = {id(t): FULL for t in call.operands()}
    return FunctionCall(call.name, call.args, call.kwargs, spreads, frozenset(), out)


def _expand(named: NamedCall) -> NamedDims:
    """Dims that are not repeated."""
    return _join(named, [named.call.first])


def _project(named: NamedCall) -> NamedDims:
    """`linear`: all dims but the last."""
    return (*named.dims(named.call.first)[:-1], _unknown(named.shape[-1]))


def _look_up(named: NamedCall) -> NamedDims | None:
    """`embedding`: those of the indices, and the width of the table."""
    if len(named.shape) != named.call.first.ndim + 1:
        return None
    return (*named.dims(named.call.first), (Factor("h", named.shape[-1]),))


def _multiply(named: NamedCall) -> NamedDims | None:
    """`a @ b`, also with a tensor added: rows of `a`, columns of `b`."""
    call = named.call
    added = call.name in ("addmm", "baddbmm")
    a, b = (
        (call.arg(1, ("mat1", "batch1")), call.arg(2, ("mat2", "batch2")))
        if added
        else (call.first, call.arg(1, ("other", "mat2", "tensor")))
    )
    if call.name == "rmatmul":
        a, b = b, a
    if min(a.ndim, b.ndim) < 2:
        return None
    batch = _join(named, [a, b])[:-2]
    return (*batch, named.dims(a)[-2], named.dims(b)[-1])


def _sum_products(named: NamedCall) -> NamedDims | None:
    """`einsum`: by the letters of its equation."""
    equation, *given = named.call.args
    operands = unpack_sequence(given)
    terms, arrow, out = str(equation).replace(" ", "").partition("->")
    if not arrow or "." in terms:
        return None
    by_letter: dict[str, set[DimFactors]] = {}
    for term, tensor in zip(terms.split(","), operands, strict=True):
        for letter, dim in zip(term, named.dims(tensor), strict=True):
            if _is_named(dim):
                by_letter.setdefault(letter, set()).add(dim)
    unambiguous = {letter: dims.pop() for letter, dims in by_letter.items() if len(dims) == 1}
    return tuple(unambiguous.get(letter) or _unknown(n) for letter, n in zip(out, named.shape, strict=True))


def _attend(named: NamedCall) -> NamedDims:
    """Scaled dot products of torch: `[batch, heads, tokens, width]`, if there are four dims."""
    out = (*named.dims(named.call.first)[:-1], _unknown(named.shape[-1]))
    if len(out) != 4:
        return out
    heads = out[1] if _is_named(out[1]) else (Factor(HEADS, named.shape[1]),)
    return out[0], heads, out[2], (Factor(WIDTH, named.shape[3]),)


def _convolve(named: NamedCall) -> NamedDims:
    """The batch dim."""
    return (named.dims(named.call.first)[0], *map(_unknown, named.shape[1:]))


def _reshape(named: NamedCall) -> NamedDims | None:
    """Dims merged and split in the order of their entries."""
    call, first = named.call, named.call.first
    if first.numel() != call.out.numel():  # a view in another dtype
        return None
    free = inferred_dim(call) if call.name in ("view", "reshape") else None
    return regroup(named.dims(first), named.shape, free, named.heads)


def regroup(
    dims: NamedDims, shape: Sequence[int], free: int | None = None, heads: HeadSizes | None = None
) -> NamedDims | None:
    """The dims of a reshaped tensor.

    Args:
        dims: the dims of the tensor before.
        shape: the new shape.
        free: the new dim that was given as -1, which takes dims of one entry that have no other place.
        heads: sizes of heads, by which parts of an unknown dim are named.

    Returns:
        The new dims: where a named dim was cut into several they are unknown. None if the tensor is empty.
    """
    if 0 in shape:
        return None
    factors = [f for dim in dims for f in dim]
    out: list[list[Factor]] = [[] for _ in shape]
    i = j = 0
    while i < len(factors) or j < len(shape):
        ones = list(takewhile(lambda f: f.size == 1, factors[i:]))
        new = len(list(takewhile(lambda n: n == 1, shape[j:])))
        if ones or new:
            _place_ones(ones, j, new, free, out)
            i, j = i + len(ones), j + new
            continue
        # The fewest dims on both sides that have the same number of entries.
        first, start = i, j
        old_length, new_length, i, j = factors[i].size, shape[j], i + 1, j + 1
        while old_length != new_length:
            if old_length < new_length:
                old_length, i = old_length * factors[i].size, i + 1
            else:
                new_length, j = new_length * shape[j], j + 1
        if j - start == 1:  # dims that were merged keep their names
            out[start] += factors[first:i]
            continue
        parts = list(shape[start:j])
        unknown = i - first == 1 and factors[first].name in ("", "h")
        name = (heads or {}).get((parts[0], parts[-1])) if unknown and len(parts) == 2 else None
        names = (name, WIDTH) if name else [""] * len(parts)
        for at, (factor_name, n) in enumerate(zip(names, parts, strict=True)):
            out[start + at].append(Factor(factor_name, n))
    return tuple(tuple(dim) for dim in out)


def _place_ones(ones: list[Factor], at: int, new: int, free: int | None, out: list[list[Factor]]) -> None:
    """Place dims of one entry among as many new ones, or in the free dim beside or among them."""
    if len(ones) == new:
        for offset, factor in enumerate(ones):
            out[at + offset].append(factor)
    elif new == 0 and free in (at - 1, at) and free is not None and free < len(out):
        out[free] += ones
    elif new == 1 and free == at:
        out[at] += ones
    else:
        for offset in range(new):
            out[at + offset].append(Factor("", 1))


# They change a tensor's dims in place, before a rule sees them.
REORDERING_IN_PLACE = frozenset(
    split_words("squeeze unsqueeze transpose t swapaxes swapdims resize resize_as set")
)
KEEPING = split_words("""
softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin normalize layer_norm rms_norm
group_norm instance_norm batch_norm tril triu
""")

NAME_RULES: dict[str, NameRule] = {
    **dict.fromkeys([*UNARY, *KEEPING], _keep),
    **dict.fromkeys([*BROADCAST, "copy"], _join),
    **dict.fromkeys(split_words("view reshape view_as reshape_as flatten ravel unflatten"), _reshape),
    **dict.fromkeys(split_words("cat concat concatenate stack"), _concatenate),
    **dict.fromkeys(split_words("expand expand_as broadcast_to"), _expand),
    **dict.fromkeys(split_words("matmul rmatmul bmm mm addmm baddbmm"), _multiply),
    **dict.fromkeys(split_words("conv1d conv2d conv3d"), _convolve),
    "linear": _project,
    "embedding": _look_up,
    "einsum": _sum_products,
    "scaled_dot_product_attention": _attend,
}
