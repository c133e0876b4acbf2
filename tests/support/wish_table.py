"""Selections and reductions that random cases draw, beside the same in plain code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.support.edit_table import directions
from tests.support.site_forms import form_of


@dataclass(frozen=True)
class Wish:
    """What is kept of a tensor.

    Attributes:
        forms: the dims of the tensors that it is for, as `form_of` has them.
        select: what `Select` is given.
        reduce: the reduction, made of `megatron_flex.reduce` and the number of features.
        plainly: the same of one process's tensor.
    """

    forms: tuple[str, ...]
    select: dict[str, Any]
    reduce: Callable[[Any, int], Any]
    plainly: Callable[[Tensor], Tensor]


def _nothing(reduce: Any, width: int) -> None:
    return None


def _dots(tensor: Tensor) -> Tensor:
    return (tensor.float() @ directions(tensor.shape[-1]).T).to(tensor.dtype)


STREAM, HEADS = ("sbh",), ("sbh", "sbnd")
TABLE: dict[str, Wish] = {
    "last": Wish(HEADS, {"positions": -1}, _nothing, lambda t: t[-1:]),
    "few": Wish(HEADS, {"positions": [3, 12, 3], "samples": 1}, _nothing, lambda t: t[[3, 12, 3]][:, 1:2]),
    "back": Wish(HEADS, {"positions": slice(None, None, -3)}, _nothing, lambda t: t.flip(0)[::3]),
    "neurons": Wish(STREAM, {"neurons": slice(1, 3)}, _nothing, lambda t: t[..., 1:3]),
    "heads": Wish(("sbnd",), {"heads": [-1, 0]}, _nothing, lambda t: t[:, :, [-1, 0]]),
    "row": Wish(("bnss",), {"heads": 1, "positions": -1}, _nothing, lambda t: t[:, 1:2, -1:]),
    "sample": Wish(("bs",), {"samples": 1}, _nothing, lambda t: t[1:2]),
    "mean": Wish(HEADS, {}, lambda r, w: r.mean("s"), lambda t: t.mean(0)),
    "sum": Wish(
        HEADS, {"positions": slice(2, 11)}, lambda r, w: r.sum("s", "b"), lambda t: t[2:11].sum((0, 1))
    ),
    "norm": Wish(STREAM, {}, lambda r, w: r.norm(-1), lambda t: t.norm(dim=-1)),
    "norms": Wish(
        STREAM, {"positions": slice(4, 12)}, lambda r, w: r.norm("s"), lambda t: t[4:12].norm(dim=0)
    ),
    "top": Wish(
        STREAM, {}, lambda r, w: r.topk(2, -1), lambda t: t.sort(-1, descending=True).values[..., :2]
    ),
    "dot": Wish(STREAM, {}, lambda r, w: r.dot(directions(w)), _dots),
}


def possible(site: str, kind: str) -> list[str]:
    """The names of what can be wanted of a site."""
    form = form_of(site, kind)
    found = [name for name, wish in TABLE.items() if form in wish.forms]
    # The outputs of the predictions follow one another in a dim of their own, which is no `s`.
    return [n for n in found if n in ("neurons", "norm", "top", "dot")] if site == "mtp:output" else found


def hook_arguments(name: str, width: int) -> dict[str, Any]:
    """What HookFunction is given."""
    import megatron_flex as mf

    if not name:
        return {}
    wish = TABLE[name]
    select = mf.Select(**wish.select) if wish.select else None
    return {"select": select, "reduce": wish.reduce(mf.reduce, width), "keep_as": name}


def plainly(name: str, tensor: Tensor) -> Tensor:
    """The same of one process's tensor; all of it without a name."""
    return TABLE[name].plainly(tensor) if name else tensor
