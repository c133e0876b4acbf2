"""Rules of functions that move entries about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from megatron_flex.adapters.following.call import FunctionCall, LayoutUnknown, SpreadRule, normalize_dims
from megatron_flex.adapters.following.elementwise import join_cuts
from megatron_flex.adapters.spread import Spread

DimMap = Callable[[int], int | None]


def _move_dims(call: FunctionCall, to: DimMap, why: str = "") -> Spread:
    """Cut dims of the first operand at other places of the result; None where one is lost."""
    x = call.first
    out: dict[int, tuple[str, ...]] = {}
    for dim, axes in call.cuts(x).items():
        at = to(dim)
        if at is None:
            raise LayoutUnknown(why or f"{call.name} goes over dim {dim}, which is cut over {' and '.join(axes)}")
        if at in out:
            raise LayoutUnknown(f"{call.name} merges two dims that are both cut")
        out[at] = axes
    return call.result(out, call.spread(x).partial)


def reshape(call: FunctionCall) -> Spread:
    """A dim that is split is cut in its leading part, a merged one where the cut dim led."""
    x, out = call.first, call.out
    return _move_dims(call, lambda dim: target_dim(call.name, tuple(x.shape), dim, tuple(out.shape), _inferred_dim(call)))


def _inferred_dim(call: FunctionCall) -> int | None:
    """Which dim of the result was left to torch, as -1."""
    given: Any = list(call.args[1:]) or [call.kwargs.get("shape", call.kwargs.get("size", ()))]
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return next((i for i, n in enumerate(given) if isinstance(n, int) and n == -1), None)


def target_dim(
    name: str, shape: Sequence[int], dim: int, new: Sequence[int], free: int | None = None
) -> int | None:
    """Where a cut dim goes when a tensor's entries are arranged in another shape, in the same order.

    What lies in front of the cut must be the same before and after. Dims of one entry leave several places.

    Args:
        name: the function's, for words.
        shape: the local tensor's.
        dim: which is cut.
        new: the shape of the result.
        free: which dim of it was given as -1.

    Returns:
        The dim of the result; None if the parts are no contiguous parts of it.

    Raises:
        Refusal: several places are possible.
    """
    before, shape, new = prod(shape[:dim]), tuple(shape), tuple(new)
    if 0 in shape:
        raise LayoutUnknown(f"{name} of a tensor without entries tells nothing")
    places = [j for j in range(len(new)) if prod(new[:j]) == before]
    at = len(new) - len(shape) + dim
    ones = sum(new[j] == 1 for j in places)
    if shape[dim] > 1 or len(new) <= len(shape) or ones == 1:
        stays = None
        if dim in places and new[: dim + 1] == shape[: dim + 1]:  # it stays, and what is in front of it
            stays = dim
        elif at in places and len(new) <= len(shape) and new[at:] == shape[dim:]:  # or what is behind it
            stays = at
        # A cut dim of one entry may also have been joined with what is in front of it, and another one stay.
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
        f"{name} from {shape} to {new} leaves open which dim is cut, since some have one entry; give it as -1"
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
        given: Any = call.args[1:] if len(call.args) > 2 else (call.arg(1, "dims"),)
        given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        return tuple(int(d) % count for d in given)
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
    """Dims in another order."""
    order = permutation(call)
    return _move_dims(call, order.index)


def unsqueeze(call: FunctionCall) -> Spread:
    """A new dim."""
    at = int(call.arg(1, "dim")) % (call.first.ndim + 1)
    return _move_dims(call, lambda d: d + (d >= at))


def squeeze(call: FunctionCall) -> Spread:
    """Dims of one entry go."""
    x = call.first
    dims = normalize_dims(call.arg(1, "dim"), x.ndim)
    gone = {d for d in (range(x.ndim) if dims is None else dims) if x.shape[d] == 1}
    return _move_dims(call, lambda d: None if d in gone else d - sum(g < d for g in gone))


def expand(call: FunctionCall) -> Spread:
    """Dims of one entry repeated, new ones in front."""
    x, out = call.first, call.out
    ahead = out.ndim - x.ndim
    return _move_dims(call, lambda d: d + ahead if out.shape[d + ahead] == x.shape[d] else None)


def repeat_interleave(call: FunctionCall) -> Spread:
    """Each entry several times in a row: a cut dim stays cut."""
    x = call.first
    dims, times = normalize_dims(call.arg(2, "dim"), x.ndim), call.arg(1, "repeats")
    if dims is None:
        raise LayoutUnknown("repeat_interleave without a dim flattens what is cut")
    if isinstance(times, Tensor):
        return _move_dims(call, lambda d: None if d in dims else d)
    return _move_dims(call, lambda d: d)


def rule_along_dims(position: int, *names: str, default: Any = None) -> SpreadRule:
    """Functions that go over some dims and leave the others, and their number, as they are."""

    def rule(call: FunctionCall) -> Spread:
        x = call.first
        dims = normalize_dims(call.arg(position, names, default), x.ndim)
        return _move_dims(call, lambda d: None if dims is None or d in dims else d)

    return rule


def reduction_rule(position: int, *names: str) -> SpreadRule:
    """Functions that take dims away, or keep them with one entry; all of them where none is given."""

    def rule(call: FunctionCall) -> Spread:
        x = call.first
        given = call.arg(position, names)
        if isinstance(given, Tensor) or (call.name in ("max", "min") and "other" in call.kwargs):
            both = [(t, call.cuts(t)) for t in call.operands()]
            return call.result(join_cuts(call, both, call.out.ndim))
        given = None if isinstance(given, bool) or not isinstance(given, (int, tuple, list)) else given
        dims = normalize_dims(given, x.ndim)
        gone = set(range(x.ndim)) if dims is None else set(dims)
        kept = call.out.ndim == x.ndim

        def to(d: int) -> int | None:
            return None if d in gone else d if kept else d - sum(g < d for g in gone)

        return _move_dims(call, to)

    return rule


def select(call: FunctionCall) -> Spread:
    """One entry of a dim."""
    dim = int(call.arg(1, "dim")) % call.first.ndim
    return _move_dims(call, lambda d: None if d == dim else d - (d > dim))


def unbind(call: FunctionCall) -> Spread:
    """All entries of a dim, apart."""
    dim = int(call.arg(1, "dim", 0)) % call.first.ndim
    return _move_dims(call, lambda d: None if d == dim else d - (d > dim))


def concatenate(call: FunctionCall) -> Spread:
    """Tensors put together along a dim, an old or a new one, that is not cut."""
    parts = call.arg(0, "tensors")
    stack = call.name == "stack"
    parts = [t for t in parts if not (t.ndim == 1 and t.numel() == 0)] or list(parts)
    dim = int(call.arg(1, ("dim", "axis"), 0)) % (parts[0].ndim + stack)
    cuts = {}
    for part in parts:
        for d, axes in call.cuts(part).items():
            if d == dim and not stack:
                raise LayoutUnknown(f"{call.name} goes along dim {d}, which is cut over {' and '.join(axes)}")
    # What differs in length along the dim that they are put together in is alike in the others.
    cuts = join_cuts(call, [(t, call.cuts(t)) for t in parts], parts[0].ndim)
    return call.result({d + (stack and d >= dim): a for d, a in cuts.items()})


def pad(call: FunctionCall) -> Spread:
    """Entries added at the ends of dims."""
    x = call.first
    widths = list(call.arg(1, "pad"))
    padded = {x.ndim - 1 - i for i in range(len(widths) // 2) if any(widths[2 * i : 2 * i + 2])}
    return _move_dims(call, lambda d: None if d in padded else d)


def repeat(call: FunctionCall) -> Spread:
    """The whole tensor several times: not along a cut dim."""
    x, out = call.first, call.out
    ahead = out.ndim - x.ndim
    return _move_dims(call, lambda d: d + ahead if out.shape[d + ahead] == x.shape[d] else None)


def triangle(call: FunctionCall) -> Spread:
    """What looks at the places of entries in the last two dims."""
    last = call.first.ndim - 2
    return _move_dims(call, lambda d: None if d >= last else d)


def normalize_last_dims(call: FunctionCall) -> Spread:
    """Norms over the last dims, with whole weights."""
    x = call.first
    shape = call.arg(1, "normalized_shape")
    last = x.ndim - (1 if isinstance(shape, int) else len(shape))
    for other in call.operands():
        if other is not x and call.cuts(other):
            raise LayoutUnknown(f"{call.name} has a weight that is cut")
    return _move_dims(call, lambda d: None if d >= last else d)


def gather_entries(call: FunctionCall) -> Spread:
    """`gather`: entries of a dim by an index that is cut as the tensor is."""
    x, index = call.first, call.arg(2, "index")
    dim = int(call.arg(1, "dim")) % x.ndim
    if any(dim in call.cuts(t) for t in (x, index)) or call.cuts(x) != call.cuts(index):
        raise LayoutUnknown(f"{call.name} picks entries of a tensor that is not cut as the index is")
    return call.result(call.cuts(x))


def one_hot(call: FunctionCall) -> Spread:
    """A new last dim."""
    return _move_dims(call, lambda d: d)


def view_as_complex(call: FunctionCall) -> Spread:
    """The last dim becomes one number."""
    last = call.first.ndim - 1
    return _move_dims(call, lambda d: None if d == last else d)


def flatten(call: FunctionCall) -> Spread:
    """Dims that are merged are cut where the first of them was."""
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
    """A dim that is split is cut in its leading part."""
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
    **_rule_for_names("expand expand_as broadcast_to", expand),
    "repeat": repeat,
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
        "softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip", rule_along_dims(1, "dim", "dims")
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
