"""Rules of functions that move entries, reduce over dims, or index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from megatron_flex.adapters.layout_rules import Spread
from megatron_flex.adapters.propagation.arithmetic_rules import join_cuts
from megatron_flex.adapters.propagation.function_call import (
    FunctionCall,
    LayoutUnknown,
    SpreadRule,
    normalize_dims,
    unpack_sequence,
)

DimMap = Callable[[int], int | None]


def _move_dims(call: FunctionCall, to: DimMap, why: str = "") -> Spread:
    """The sharded dims of the first operand at their positions in the result; None where one is lost."""
    x = call.first
    out: dict[int, tuple[str, ...]] = {}
    for dim, axes in call.cuts(x).items():
        at = to(dim)
        if at is None:
            raise LayoutUnknown(
                why or f"{call.name} goes over dim {dim}, which is sharded over {' and '.join(axes)}"
            )
        if at in out:
            raise LayoutUnknown(f"{call.name} merges two sharded dims")
        out[at] = axes
    return call.result(out, call.spread(x).partial)


def reshape(call: FunctionCall) -> Spread:
    """A split dim is sharded in its leading part, a merged one if the sharded dim was leading."""
    shape, new = tuple(call.first.shape), tuple(call.out.shape)

    def to(dim: int) -> int | None:
        if (at := _repeated_dim(call.first, dim, new)) is not None:
            return at
        return target_dim(call.name, shape, dim, new, inferred_dim(call))

    return _move_dims(call, to)


def _repeated_dim(x: Tensor, dim: int, new: Sequence[int]) -> int | None:
    """The position of a sharded dim of one entry that is merged with the expanded dim after it.

    `expand` and `reshape` repeat each entry, as grouped-query attention repeats its key heads. On a rank with
    one key head the shapes do not show whether that head is merged with the batch before it or with its
    copies. The stride of zero shows the copies.
    """
    if x.shape[dim] != 1 or dim + 1 == x.ndim or x.shape[dim + 1] == 1 or x.stride(dim + 1) != 0:
        return None
    before = prod(x.shape[:dim])
    places = (at for at in range(len(new)) if prod(new[:at]) == before and new[at] == x.shape[dim + 1])
    return next(places, None)


def inferred_dim(call: FunctionCall) -> int | None:
    """The dim of the result that was given as -1."""
    given = call.args[1:] or (call.kwargs.get("shape", call.kwargs.get("size", ())),)
    lengths = unpack_sequence(given)
    return next((i for i, n in enumerate(lengths) if isinstance(n, int) and n == -1), None)


def target_dim(
    name: str, shape: Sequence[int], dim: int, new: Sequence[int], free: int | None = None
) -> int | None:
    """The position of a sharded dim when a tensor's entries are reshaped in the same order.

    The entries before the sharded dim must be the same before and after. Dims of one entry are ambiguous.

    Args:
        name: the function's name, for messages.
        shape: the local tensor's.
        dim: the sharded dim.
        new: the shape of the result.
        free: the dim that was given as -1.

    Returns:
        The dim of the result; None if the shards are not contiguous parts of it.

    Raises:
        LayoutUnknown: several positions are possible.
    """
    before, shape, new = prod(shape[:dim]), tuple(shape), tuple(new)
    if 0 in shape:
        raise LayoutUnknown(f"{name} of a tensor without entries is unknown")
    places = [j for j in range(len(new)) if prod(new[:j]) == before]
    at = len(new) - len(shape) + dim
    ones = sum(new[j] == 1 for j in places)
    if shape[dim] > 1 or len(new) <= len(shape) or ones == 1:
        stays = None
        if dim in places and new[: dim + 1] == shape[: dim + 1]:  # unchanged, like the dims before it
            stays = dim
        elif at in places and len(new) <= len(shape) and new[at:] == shape[dim:]:  # or the dims after it
            stays = at
        # A sharded dim of one entry may also have been merged with the dim before it, and another one kept.
        others = shape[dim + 1 :] if stays == dim else shape[:dim]
        open_ = shape[dim] == 1 and len(new) < len(shape) and 1 in others
        if stays is not None and not (open_ and free is not None and free < stays):
            return stays
        if stays is None and free in places:
            return free
    if shape[dim] > 1 and len(places) < 2:
        return places[0] if places else None
    if shape[dim] > 1 and dim in places and new[:dim] == shape[:dim] and new[dim] > 1:
        return dim
    if shape[dim] > 1 and len(new) <= len(shape) and new[places[-1]] > 1:
        return places[-1]
    raise LayoutUnknown(
        f"{name} from {shape} to {new} leaves open which dim is sharded, as some have one entry; give -1"
    )


def permutation(call: FunctionCall) -> tuple[int, ...]:
    """The operand's dims in the order of the result."""
    x = call.first
    count, order = x.ndim, list(range(x.ndim))
    if call.name in ("T.get", "H.get", "t", "adjoint", "mT.get", "mH.get", "numpy_T.get"):
        if call.name in ("T.get", "H.get"):
            return tuple(reversed(order))
        if count >= 2:
            order[-1], order[-2] = order[-2], order[-1]
        return tuple(order)
    if call.name == "permute":
        given = call.args[1:] if len(call.args) > 2 else (call.arg(1, "dims"),)
        return tuple(int(d) % count for d in unpack_sequence(given))
    if call.name in ("movedim", "moveaxis"):
        sources = normalize_dims(call.arg(1, "source"), count) or ()
        goals = normalize_dims(call.arg(2, "destination"), count) or ()
        rest = iter([d for d in order if d not in sources])
        at = dict(zip(goals, sources, strict=True))
        return tuple(at[i] if i in at else next(rest) for i in range(count))
    first = int(call.arg(1, ("dim0", "axis0"))) % count
    second = int(call.arg(2, ("dim1", "axis1"))) % count
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def permute(call: FunctionCall) -> Spread:
    """Dims permuted."""
    order = permutation(call)
    return _move_dims(call, order.index)


def unsqueeze(call: FunctionCall) -> Spread:
    """A new dim."""
    at = int(call.arg(1, "dim")) % (call.first.ndim + 1)
    return _move_dims(call, lambda d: d + (d >= at))


def squeeze(call: FunctionCall) -> Spread:
    """Dims of one entry removed."""
    x = call.first
    dims = normalize_dims(call.arg(1, "dim"), x.ndim)
    gone = {d for d in (range(x.ndim) if dims is None else dims) if x.shape[d] == 1}
    return _move_dims(call, lambda d: None if d in gone else d - sum(g < d for g in gone))


def expand(call: FunctionCall) -> Spread:
    """Dims repeated, and new leading dims; a sharded dim must keep its length."""
    x, out = call.first, call.out
    ahead = out.ndim - x.ndim
    return _move_dims(call, lambda d: d + ahead if out.shape[d + ahead] == x.shape[d] else None)


def repeat_interleave(call: FunctionCall) -> Spread:
    """Each entry repeated: a sharded dim stays sharded."""
    x = call.first
    dims, times = normalize_dims(call.arg(2, "dim"), x.ndim), call.arg(1, "repeats")
    if dims is None:
        raise LayoutUnknown("repeat_interleave without a dim flattens a sharded tensor")
    if isinstance(times, Tensor):
        return _move_dims(call, lambda d: None if d in dims else d)
    return _move_dims(call, lambda d: d)


def rule_along_dims(position: int, *names: str, default: Any = None) -> SpreadRule:
    """Functions that work along some dims and keep the other dims, and the number of dims."""

    def rule(call: FunctionCall) -> Spread:
        x = call.first
        dims = normalize_dims(call.arg(position, names, default), x.ndim)
        return _move_dims(call, lambda d: None if dims is None or d in dims else d)

    return rule


def reduction_rule(position: int, *names: str) -> SpreadRule:
    """Functions that remove dims, or keep them with one entry; all dims if none is given."""

    def rule(call: FunctionCall) -> Spread:
        x = call.first
        given = call.arg(position, names)
        if isinstance(given, Tensor) or (call.name in ("max", "min") and "other" in call.kwargs):
            both = [(t, call.cuts(t)) for t in call.operands()]
            return call.result(join_cuts(call, both, call.out.ndim))
        given = None if isinstance(given, bool) or not isinstance(given, (int, tuple, list)) else given
        dims = normalize_dims(given, x.ndim)
        gone = set(range(x.ndim)) if dims is None else set(dims)
        keeps_dims = call.out.ndim == x.ndim

        def to(d: int) -> int | None:
            return None if d in gone else d if keeps_dims else d - sum(g < d for g in gone)

        return _move_dims(call, to)

    return rule


def select(call: FunctionCall) -> Spread:
    """One entry of a dim."""
    dim = int(call.arg(1, "dim")) % call.first.ndim
    return _move_dims(call, lambda d: None if d == dim else d - (d > dim))


def unbind(call: FunctionCall) -> Spread:
    """All entries of a dim as separate tensors."""
    dim = int(call.arg(1, "dim", 0)) % call.first.ndim
    return _move_dims(call, lambda d: None if d == dim else d - (d > dim))


def concatenate(call: FunctionCall) -> Spread:
    """Tensors concatenated or stacked along a dim that is not sharded."""
    parts = call.arg(0, "tensors")
    stack = call.name == "stack"
    parts = [t for t in parts if not (t.ndim == 1 and t.numel() == 0)] or list(parts)
    dim = int(call.arg(1, ("dim", "axis"), 0)) % (parts[0].ndim + stack)
    cuts = {}
    for part in parts:
        for d, axes in call.cuts(part).items():
            if d == dim and not stack:
                raise LayoutUnknown(
                    f"{call.name} goes along dim {d}, which is sharded over {' and '.join(axes)}"
                )
    # Tensors may differ in length along the concatenated dim only.
    cuts = join_cuts(call, [(t, call.cuts(t)) for t in parts], parts[0].ndim)
    return call.result({d + (stack and d >= dim): a for d, a in cuts.items()})


def pad(call: FunctionCall) -> Spread:
    """Entries padded at the ends of dims."""
    x = call.first
    widths = list(call.arg(1, "pad"))
    padded = {x.ndim - 1 - i for i in range(len(widths) // 2) if any(widths[2 * i : 2 * i + 2])}
    return _move_dims(call, lambda d: None if d in padded else d)


def triangle(call: FunctionCall) -> Spread:
    """Functions that depend on the positions of entries in the last two dims."""
    last = call.first.ndim - 2
    return _move_dims(call, lambda d: None if d >= last else d)


def normalize_last_dims(call: FunctionCall) -> Spread:
    """Norms over the last dims, with replicated weights."""
    x = call.first
    shape = call.arg(1, "normalized_shape")
    last = x.ndim - (1 if isinstance(shape, int) else len(shape))
    for other in call.operands():
        if other is not x and call.cuts(other):
            raise LayoutUnknown(f"{call.name} has a sharded weight")
    return _move_dims(call, lambda d: None if d >= last else d)


def gather_entries(call: FunctionCall) -> Spread:
    """`gather`: entries of a dim by an index that is sharded as the tensor."""
    x, index = call.first, call.arg(2, "index")
    dim = int(call.arg(1, "dim")) % x.ndim
    if any(dim in call.cuts(t) for t in (x, index)) or call.cuts(x) != call.cuts(index):
        raise LayoutUnknown(f"{call.name} picks entries of a tensor that is not sharded as the index is")
    return call.result(call.cuts(x))


def one_hot(call: FunctionCall) -> Spread:
    """A new last dim."""
    return _move_dims(call, lambda d: d)


def view_as_complex(call: FunctionCall) -> Spread:
    """The last dim reduced."""
    last = call.first.ndim - 1
    return _move_dims(call, lambda d: None if d == last else d)


def flatten(call: FunctionCall) -> Spread:
    """Merged dims are sharded where the first of them was."""
    x = call.first
    count = x.ndim
    ravels = call.name == "ravel"
    first = 0 if ravels else int(call.arg(1, "start_dim", 0)) % count
    last = count - 1 if ravels else int(call.arg(2, "end_dim", -1)) % count

    def to(d: int) -> int | None:
        if first <= d <= last:
            return first if prod(x.shape[first:d]) == 1 else None
        return d if d < first else d - (last - first)

    return _move_dims(call, to)


def unflatten(call: FunctionCall) -> Spread:
    """A split dim is sharded in its leading part."""
    x, dim, sizes = call.first, int(call.arg(1, "dim")) % call.first.ndim, list(call.arg(2, "sizes"))
    free = sizes.index(-1) if -1 in sizes else None

    def to(d: int) -> int | None:
        if d != dim:
            return d if d < dim else d + len(sizes) - 1
        new = tuple(call.out.shape[dim : dim + len(sizes)])
        at = target_dim(call.name, (x.shape[dim],), 0, new, free)
        return None if at is None else dim + at

    return _move_dims(call, to)


def _rule_for_names(names: str, rule: SpreadRule) -> Mapping[str, SpreadRule]:
    return dict.fromkeys(names.split(), rule)


SHAPE_RULES: dict[str, SpreadRule] = {
    **_rule_for_names("view reshape view_as reshape_as", reshape),
    **_rule_for_names("flatten ravel", flatten),
    "unflatten": unflatten,
    **_rule_for_names(
        "T.get mT.get H.get mH.get t adjoint permute movedim moveaxis transpose swapaxes swapdims", permute
    ),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **_rule_for_names("expand expand_as broadcast_to repeat", expand),
    "repeat_interleave": repeat_interleave,
    "select": select,
    "unbind": unbind,
    **_rule_for_names("cat concat concatenate stack", concatenate),
    "pad": pad,
    **_rule_for_names("tril triu", triangle),
    **_rule_for_names("layer_norm rms_norm", normalize_last_dims),
    **_rule_for_names("gather take_along_dim", gather_entries),
    "one_hot": one_hot,
    **_rule_for_names(
        "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip",
        rule_along_dims(1, "dim", "dims"),
    ),
    **_rule_for_names("sort argsort glu narrow index_select", rule_along_dims(1, "dim", default=-1)),
    **_rule_for_names("chunk split tensor_split roll", rule_along_dims(2, "dim", "dims", "axis", default=0)),
    **_rule_for_names("topk kthvalue", rule_along_dims(2, "dim", default=-1)),
    "normalize": rule_along_dims(2, "dim", default=1),
    "view_as_complex": view_as_complex,
    "view_as_real": one_hot,
    **_rule_for_names(
        "sum mean prod max min amax amin aminmax argmax argmin any all median logsumexp std var nanmean"
        " nansum count_nonzero var_mean std_mean",
        reduction_rule(1, "dim", "axis"),
    ),
    **_rule_for_names("norm vector_norm linalg_vector_norm linalg_norm", reduction_rule(2, "dim")),
}


def dims_kept(x: Tensor, index: Any) -> list[int | None]:
    """For each dim of the selected result the full dim of the tensor that it equals; None for others.

    Raises:
        LayoutUnknown: this kind of index is not supported.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(_dims_consumed(i) for i in items)
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)  # the dims that no item consumes
    arrays = [i for i in items if isinstance(i, (Tensor, list)) and not _is_number(i)]
    # The place of the dims of their result depends on whether they stand side by side.
    if len(arrays) > 1 or (arrays and any(isinstance(i, int) for i in items)):
        raise LayoutUnknown("indexing by several tensors is not supported for sharded tensors")
    out: list[int | None] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            out += range(dim, dim + x.ndim - consumed)
            dim += x.ndim - consumed
        elif item is None:
            out.append(None)
        elif isinstance(item, slice):
            out.append(dim if _is_full_slice(item) else None)
            dim += 1
        elif _is_number(item):
            dim += 1
        elif isinstance(item, (Tensor, list)):
            width = item.ndim if isinstance(item, Tensor) else 1
            mask = isinstance(item, Tensor) and not item.dtype.is_floating_point and item.dtype.itemsize == 1
            out += [None] * (1 if mask else width)  # of a mask: the chosen entries, in one dim
            dim += _dims_consumed(item)
        else:
            raise LayoutUnknown(f"indexing by a {type(item).__name__} is not supported for sharded tensors")
    return out


def _is_number(item: Any) -> bool:
    return (isinstance(item, int) and not isinstance(item, bool)) or (
        isinstance(item, Tensor) and item.ndim == 0 and item.dtype.itemsize > 1
    )


def _dims_consumed(item: Any) -> int:
    """The number of dims that an item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype.itemsize == 1:  # a mask
        return item.ndim
    return 1


def _is_full_slice(item: slice) -> bool:
    return item.start in (None, 0) and item.stop is None and item.step in (None, 1)


def getitem(call: FunctionCall) -> Spread:
    """Indexing must select sharded dims completely."""
    x, index = call.first, call.args[1]
    _check_index(call, x)
    kept_dims = dims_kept(x, index)
    cuts = call.cuts(x)
    for dim, axes in cuts.items():
        if dim not in kept_dims:
            raise LayoutUnknown(
                f"getitem takes a part of dim {dim}, which is sharded over {' and '.join(axes)}"
            )
    return call.result({kept_dims.index(d): a for d, a in cuts.items()}, call.spread(x).partial)


def setitem(call: FunctionCall) -> Spread:
    """The value must be sharded as the destination."""
    x, index, value = call.args[:3]
    cuts = call.cuts(x)
    alone = not isinstance(value, Tensor) or (value.ndim == 0 and not call.cuts(value))
    if alone and isinstance(index, Tensor) and index.dtype.itemsize == 1 and call.cuts(index) == cuts:
        return call.result(cuts)  # elementwise
    _check_index(call, x, value)
    kept_dims = dims_kept(x, index)
    for dim, axes in cuts.items():
        if dim not in kept_dims:
            raise LayoutUnknown(
                f"setitem sets a part of dim {dim}, which is sharded over {' and '.join(axes)}"
            )
    if not isinstance(value, Tensor):
        return call.result(cuts)
    given: dict[int, tuple[str, ...]] = {}
    for dim, axes in call.cuts(value).items():
        at = kept_dims[dim + len(kept_dims) - value.ndim]
        if at is None:
            raise LayoutUnknown("setitem writes a sharded tensor where the tensor is not sharded")
        given[at] = axes
    if call.uniform(x) and not cuts:
        return call.result(given)
    for dim, axes in cuts.items():
        at = kept_dims.index(dim) - len(kept_dims) + value.ndim
        alone = at < 0 or value.shape[at] == 1 or call.uniform(value)
        if given.get(dim, axes if alone else None) != axes:
            raise LayoutUnknown(
                f"setitem puts something else where dim {dim} is sharded over {' and '.join(axes)}"
            )
    if set(given) - set(cuts):
        raise LayoutUnknown("setitem writes a sharded tensor to a replicated one")
    return call.result(cuts)


def _check_index(call: FunctionCall, *others: Any) -> None:
    """A sharded index has different entries on each rank."""
    for tensor in call.operands():
        if all(tensor is not o for o in others) and call.cuts(tensor):
            raise LayoutUnknown(f"{call.name} has a sharded index")


INDEXING_RULES: dict[str, SpreadRule] = {"getitem": getitem, "setitem": setitem}
