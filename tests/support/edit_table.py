"""Edits that random cases draw: each as a hook has it, and the plain formula on one process's tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import megatron_flex as mf
from megatron_flex import edits
from tests.support import oracle
from tests.support.site_forms import form_of

Width = int
LOW, HIGH = -0.75, 0.8


@dataclass(frozen=True)
class Row:
    """An edit.

    Attributes:
        make: the editing function, for a tensor of so many features.
        formula: what it is, of one process's tensor.
        forms: the dims of the tensors that it is for, as `form_of` has them; all if empty.
    """

    make: Callable[[Width], Any]
    formula: Callable[[Tensor], Tensor]
    forms: tuple[str, ...] = ()


def mixed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """The edit that no shard can do alone."""
    return oracle.edit(inputs)


def softened(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """An edit that treats entries apart."""
    return 3.0 * torch.tanh(inputs / 3.0)


def turned(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """An edit that treats tokens apart."""
    return inputs + 0.2 * inputs.roll(1, -1)


def vector(width: int) -> Tensor:
    """A direction that tells features apart."""
    return torch.cos(torch.arange(width, dtype=torch.float32))


def directions(width: int) -> Tensor:
    """Two of them."""
    return torch.stack([vector(width), torch.sin(2.0 + 1.7 * torch.arange(width, dtype=torch.float32))])


def onto(x: Tensor) -> Tensor:
    """By the normal equations, and not by an orthogonal basis."""
    a = directions(x.shape[-1]).double()
    return (x.double() @ a.T @ torch.linalg.inv(a @ a.T) @ a).to(x.dtype)


def put(x: Tensor, where: Any, new: Tensor) -> Tensor:
    """`x` with the entries of `new` there."""
    out = x.clone()
    out[where] = new[where]
    return out


def _first_heads(x: Tensor) -> Tensor:
    return put(x, (slice(None), slice(None), [0, -1]), torch.zeros_like(x))


def _first_heads_of_scores(x: Tensor) -> Tensor:
    return put(x, (slice(None), [0, -1]), torch.zeros_like(x))


def _swapped(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:2], x[:, :1], x[:, 2:]], 1)


STREAM, HEADS = ("sbh",), ("sbh", "sbnd")
TABLE: dict[str, Row] = {
    "mixed": Row(lambda w: mixed, oracle.edit),
    "softened": Row(lambda w: mf.local()(softened), lambda x: softened(None, x, None, None)),
    "turned": Row(lambda w: mf.local("s b")(turned), lambda x: turned(None, x, None, None), HEADS),
    "scale": Row(lambda w: edits.scale(1.25), lambda x: 1.25 * x),
    "scale some": Row(
        lambda w: edits.scale(1.5, positions=[0, -1, 5], samples=1),
        lambda x: put(x, (torch.tensor([[0], [15], [5]]), [1]), 1.5 * x),
        HEADS,
    ),
    "zero": Row(
        lambda w: edits.zero(features=slice(None, None, 2)),
        lambda x: put(x, (..., slice(None, None, 2)), torch.zeros_like(x)),
        STREAM,
    ),
    "clamp": Row(lambda w: edits.clamp(LOW, HIGH), lambda x: x.clamp(LOW, HIGH)),
    "steer": Row(
        lambda w: edits.steer(vector(w), 0.5, positions=slice(-4, None)),
        lambda x: put(x, slice(12, 16), x + 0.5 * vector(x.shape[-1])),
        STREAM,
    ),
    "add": Row(lambda w: edits.steer(vector(w)), lambda x: x + vector(x.shape[-1]), STREAM),
    "project out": Row(lambda w: edits.project_out(directions(w)), lambda x: x - onto(x), STREAM),
    "linear map": Row(
        lambda w: edits.linear_map(directions(w).T / w, directions(w), add=True),
        lambda x: x + x @ directions(x.shape[-1]).T / x.shape[-1] @ directions(x.shape[-1]),
        STREAM,
    ),
    "mean of tokens": Row(
        lambda w: edits.mean("s", positions=slice(0, 9)),
        lambda x: put(x, slice(0, 9), x.mean(0, keepdim=True).expand_as(x)),
        HEADS,
    ),
    "given mean": Row(
        lambda w: edits.mean(value=vector(w), samples=1),
        lambda x: put(x, (slice(None), 1), vector(x.shape[-1]).expand_as(x)),
        STREAM,
    ),
    "neurons": Row(
        lambda w: edits.ablate_neurons([0, 3, -1]),
        lambda x: put(x, (..., [0, 3, -1]), torch.zeros_like(x)),
        STREAM,
    ),
    "heads": Row(lambda w: edits.ablate_heads([0, -1]), _first_heads, ("sbnd",)),
    "heads of scores": Row(
        lambda w: edits.scale(0.5, heads=[0, -1], positions=-1),
        lambda x: put(x, (slice(None), [0, -1], -1), 0.5 * x),
        ("bnss",),
    ),
    "swap": Row(lambda w: edits.swap(0, 1), _swapped, HEADS),
    "chain": Row(lambda w: edits.scale(1.5) | edits.clamp(LOW, HIGH), lambda x: (1.5 * x).clamp(LOW, HIGH)),
}


def possible(site: str, backward: bool, kind: str) -> list[str]:
    """The names of the edits that can be at a site."""
    form = form_of(site, kind)
    return [name for name, row in TABLE.items() if not row.forms or form in row.forms]
