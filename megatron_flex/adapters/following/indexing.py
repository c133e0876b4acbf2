"""Rules of square brackets."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_flex.adapters.following.call import FunctionCall, LayoutUnknown, SpreadRule
from megatron_flex.adapters.spread import Spread


def dims_kept(call: FunctionCall, x: Tensor, index: Any) -> list[int | None]:
    """For each dim of what an index selects the dim of the tensor that it is, whole; None for others.

    Raises:
        Refusal: the index is of a kind that is not followed.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(_dims_consumed(i) for i in items)
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    arrays = [i for i in items if isinstance(i, (Tensor, list)) and not _is_number(i)]
    if len(arrays) > 1 or (arrays and any(isinstance(i, int) for i in items)):
        raise LayoutUnknown("indexing by several tensors is not followed where something is cut")
    out: list[int | None] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            out += range(dim, dim + x.ndim - consumed)
            dim += x.ndim - consumed
        elif item is None:
            out.append(None)
        elif isinstance(item, slice):
            out.append(dim if _is_full_slice(item, x.shape[dim]) else None)
            dim += 1
        elif _is_number(item):
            dim += 1
        elif isinstance(item, (Tensor, list)):
            width = item.ndim if isinstance(item, Tensor) else 1
            mask = isinstance(item, Tensor) and not item.dtype.is_floating_point and item.dtype.itemsize == 1
            out += [None] * (1 if mask else width)
            dim += _dims_consumed(item)
        else:
            raise LayoutUnknown(f"indexing by a {type(item).__name__} is not followed where something is cut")
    return out


def _is_number(item: Any) -> bool:
    return (isinstance(item, int) and not isinstance(item, bool)) or (
        isinstance(item, Tensor) and item.ndim == 0 and item.dtype.itemsize > 1
    )


def _dims_consumed(item: Any) -> int:
    """How many dims of the tensor an item of an index speaks of."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype.itemsize == 1:  # a mask
        return item.ndim
    return 1


def _is_full_slice(item: slice, length: int) -> bool:
    return item.start in (None, 0) and item.stop is None and item.step in (None, 1)


def getitem(call: FunctionCall) -> Spread:
    """Cut dims may be taken whole only."""
    x, index = call.first, call.args[1]
    _check_index(call, x)
    found = dims_kept(call, x, index)
    cuts = call.cuts(x)
    for dim, axes in cuts.items():
        if dim not in found:
            raise LayoutUnknown(f"getitem takes a part of dim {dim}, which is cut over {' and '.join(axes)}")
    return call.result({found.index(d): a for d, a in cuts.items()}, call.spread(x).partial)


def setitem(call: FunctionCall) -> Spread:
    """What is set must be cut as the place is where it goes."""
    x, index, value = call.args[:3]
    cuts = call.cuts(x)
    alone = not isinstance(value, Tensor) or (value.ndim == 0 and not call.cuts(value))
    if alone and isinstance(index, Tensor) and index.dtype.itemsize == 1 and call.cuts(index) == cuts:
        return call.result(cuts)  # entry by entry
    _check_index(call, x, value)
    found = dims_kept(call, x, index)
    for dim, axes in cuts.items():
        if dim not in found:
            raise LayoutUnknown(f"setitem sets a part of dim {dim}, which is cut over {' and '.join(axes)}")
    if not isinstance(value, Tensor):
        return call.result(cuts)
    given: dict[int, tuple[str, ...]] = {}
    for dim, axes in call.cuts(value).items():
        at = found[dim + len(found) - value.ndim]
        if at is None:
            raise LayoutUnknown("setitem puts something cut where the tensor is not cut")
        given[at] = axes
    if call.uniform(x) and not cuts:
        return call.result(given)
    for dim, axes in cuts.items():
        at = found.index(dim) - len(found) + value.ndim
        alone = at < 0 or value.shape[at] == 1 or call.uniform(value)
        if given.get(dim, axes if alone else None) != axes:
            raise LayoutUnknown(f"setitem puts something else where dim {dim} is cut over {' and '.join(axes)}")
    if set(given) - set(cuts):
        raise LayoutUnknown("setitem puts something cut into a tensor that every rank holds")
    return call.result(cuts)


def _check_index(call: FunctionCall, *others: Any) -> None:
    """An index that is itself cut tells different entries on each rank."""
    for tensor in call.operands():
        if all(tensor is not o for o in others) and call.cuts(tensor):
            raise LayoutUnknown(f"{call.name} has an index that is cut")


INDEXING_RULES: dict[str, SpreadRule] = {"getitem": getitem, "setitem": setitem}
