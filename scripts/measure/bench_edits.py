"""The ways to edit fc1 that scripts/bench --edit compares; each stands while its context is entered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from bench_variants import (
    FC1,
    Standing,
    Subject,
    Variant,
    flex_model,
    in_order,
    nothing,
)
from torch import Tensor, nn

from megatron_flex.collectives.gather_scatter import GATHER

FACTOR = 1.01


def edit(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """What each variant but the bare gather does; it gives the same in whatever order features come."""
    return inputs * FACTOR


class _Bare(torch.autograd.Function):
    """The collectives that an edit of a sharded tensor needs, their results unused."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        _all_gather(local, group)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _all_gather(grad, ctx.group)
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _whole(local, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _part(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _part(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _whole(grad, ctx.group), None


def _all_gather(local: Tensor, group: Any) -> Tensor:
    out = local.new_empty((dist.get_world_size(group), *local.shape))
    getattr(dist, GATHER)(out.view(-1), local.contiguous().view(-1), group=group)
    return out


def _whole(local: Tensor, group: Any) -> Tensor:
    return in_order(torch.cat(list(_all_gather(local, group)), dim=-1), dist.get_world_size(group))


def _part(whole: Tensor, group: Any) -> Tensor:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    return torch.cat([half.chunk(world, dim=-1)[rank] for half in whole.chunk(2, dim=-1)], dim=-1)


@contextmanager
def bare(subject: Subject) -> Iterator[Standing]:
    """(g) The bare all-gathers that an edit needs, one forward and one backward."""
    with _around(subject, lambda local: _Bare.apply(local, subject.group)) as standing:
        yield standing


@contextmanager
def by_hand(subject: Subject) -> Iterator[Standing]:
    """(h) Hand-written: gather, put in order, edit, take the own part; likewise backward."""

    def change(local: Tensor) -> Tensor:
        return _Scatter.apply(edit(None, _Gather.apply(local, subject.group), None, None), subject.group)

    with _around(subject, change) as standing:
        yield standing


@contextmanager
def _around(subject: Subject, change: Callable[[Tensor], Tensor]) -> Iterator[Standing]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return change(output[0]), *output[1:]

    names = [FC1.format(i) for i in range(subject.layers)]
    handles = [subject.model.get_submodule(n).register_forward_hook(hook) for n in names]
    try:
        yield _watched(subject.model)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def ours(run: Literal["replicated", "once"], subject: Subject) -> Iterator[Standing]:
    """(i), (j) megatron_flex edits, on every rank alike or on one."""
    import megatron_flex

    hook = megatron_flex.HookFunction(FC1.format("*"), editing_function=edit, save=False, run=run)
    with megatron_flex.attach(subject.model, [hook]):
        yield _watched(subject.model)


@contextmanager
def predecessor(subject: Subject) -> Iterator[Standing]:
    """(e) flex-model 0.1.0 edits; it keeps on every rank what it saw, which is forgotten after each step."""
    width = (None, None, 2 * subject.ffn)
    hooks = [(FC1.format(i), width, edit) for i in range(subject.layers)]
    with flex_model(subject, hooks) as (flex, kept):
        standing = _watched(flex)

        def forget() -> None:
            standing.forget()
            kept.clear()

        yield Standing(standing.call, standing.read, forget)


def _watched(call: Callable[..., Tensor]) -> Standing:
    """A variant whose result is the model's output."""
    last: dict[str, Tensor] = {}

    def model(**batch: Any) -> Tensor:
        last["output"] = call(**batch)
        return last["output"]

    return Standing(model, lambda: {n: t.detach() for n, t in last.items()}, last.clear)


def variants(subject: Subject) -> dict[str, Variant]:
    """The variants that can be measured here, by letter: all, or all but the predecessor."""
    made: dict[str, Any] = {
        "a": nothing,
        "e": predecessor,
        "g": bare,
        "h": by_hand,
        "i": partial(ours, "replicated"),
        "j": partial(ours, "once"),
    }
    if find_spec("flex_model") is None:
        del made["e"]
    return {letter: partial(variant, subject) for letter, variant in made.items()}
