"""The ways that scripts/bench --hooks compares at the output of each layer's fc1, cut over all ranks.

Each is active while its context is entered. By hand: a PyTorch hook without this package, and the floor.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_edits import _watched, edit
from bench_variants import FC1, Standing, Subject, flex_model, idle, nothing
from torch import Tensor, nn

import megatron_flex as mf

FACTOR = 1.01
RANK = 8  # of the module that is trained
SITES = FC1.format("*")

Way = Callable[[Subject], AbstractContextManager[Standing]]


@dataclass(frozen=True)
class Place:
    """Where dumps and statistics write: a folder of this machine, None for a temporary one."""

    folder: str | None

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        """A folder of its own that all ranks see. Collective over the world."""
        told = [tempfile.mkdtemp(dir=self.folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told)
        path = Path(str(told[0]))
        try:
            yield path
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)


# -- by hand -------------------------------------------------------------------------------------------


@contextmanager
def seeing(take: Callable[[Tensor, Any], Tensor | None], subject: Subject) -> Iterator[Standing]:
    """Hooks keep what `take(shard, group)` makes of this rank's shard; nothing where it is None."""
    kept: dict[str, Tensor] = {}

    def hook(name: str, _: nn.Module, __: Any, output: Any) -> None:
        taken = take(output[0].detach(), subject.group)
        if taken is not None:
            kept[name] = taken

    with _hooked(subject, hook):
        yield Standing(subject.model, lambda: kept, kept.clear)


@contextmanager
def changing(change: Callable[[Tensor, Any], Tensor], subject: Subject) -> Iterator[Standing]:
    """Hooks replace the shard by what `change(shard, group)` makes of it."""

    def hook(name: str, _: nn.Module, __: Any, output: Any) -> Any:
        return change(output[0], subject.group), *output[1:]

    with _hooked(subject, hook):
        yield _watched(subject.model)


@contextmanager
def _hooked(subject: Subject, hook: Callable[..., Any]) -> Iterator[None]:
    names = [FC1.format(i) for i in range(subject.layers)]
    handles = [subject.model.get_submodule(n).register_forward_hook(partial(hook, n)) for n in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def clone(shard: Tensor, group: Any) -> Tensor:
    """The raw read of what this rank has."""
    return shard.clone()


def clone_of_one(shard: Tensor, group: Any) -> Tensor:
    """The same of the last position alone."""
    return shard[-1:].clone()


def gather(shard: Tensor, group: Any) -> Tensor | None:
    """Gather to rank 0, which puts the features one behind the other."""
    first = dist.get_rank() == 0
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))] if first else None
    dist.gather(shard, shards, dst=0, group=group)
    return None if shards is None else torch.cat(shards, dim=-1)


def scaled(shard: Tensor, group: Any) -> Tensor:
    """The local edit."""
    return shard * FACTOR


def in_place(shard: Tensor, group: Any) -> Tensor:
    """The local edit of whoever knows that nobody needs what was there."""
    return shard.mul_(FACTOR)


def gathered(shard: Tensor, group: Any) -> Tensor:
    """The general edit: all-gather, edit the whole, take the own part; likewise backward."""
    return _Part.apply(edit(None, _Whole.apply(shard, group), None, None), group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _whole(shard, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _part(grad, ctx.group), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _part(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _whole(grad, ctx.group), None


def _whole(shard: Tensor, group: Any) -> Tensor:
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, dim=-1)


def _part(whole: Tensor, group: Any) -> Tensor:
    return whole.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


# -- megatron_flex -------------------------------------------------------------------------------------


@contextmanager
def reads(options: dict[str, Any], subject: Subject) -> Iterator[Standing]:
    """HookFunction that saves; rank 0 has what it read when the step is over."""
    with mf.attach(subject.model, [mf.HookFunction(SITES, **options)]) as flex:
        found = flex.output_dict
        names = [FC1.format(i) for i in range(subject.layers)]
        yield Standing(subject.model, lambda: {n: found[n][0] for n in names if found}, found.clear)


@contextmanager
def edits(make: Callable[[Subject], Any], subject: Subject) -> Iterator[Standing]:
    """HookFunction that edits."""
    hook = mf.HookFunction(SITES, editing_function=make(subject), save=False)
    with mf.attach(subject.model, [hook]):
        yield _watched(subject.model)


@contextmanager
def trains(subject: Subject) -> Iterator[Standing]:
    """A module of low rank, trained in the hook."""
    hook = mf.HookFunction(SITES, editing_function=mf.edits.low_rank("added"), save=False)
    with mf.attach(subject.model, [hook]) as flex:
        flex.register_trainable_module("added", mf.edits.LowRank(subject.ffn, RANK))
        standing = _watched(subject.model)

        def forget() -> None:
            standing.forget()
            for parameter in flex.trainable_parameters():
                parameter.grad = None

        yield Standing(standing.call, standing.read, forget)


@contextmanager
def detached(subject: Subject) -> Iterator[Standing]:
    """A FlexModel that read was attached, and is detached again."""
    mf.attach(subject.model, [mf.HookFunction(SITES)]).restore()
    with nothing(subject) as standing:
        yield standing


@contextmanager
def statistics(place: Place, sites: list[str], subject: Subject) -> Iterator[Standing]:
    """Statistics into JSON lines."""
    with place.fresh() as path, mf.attach(subject.model, statistics=mf.Statistics(path, sites)):
        yield Standing(subject.model, dict, lambda: None)


@contextmanager
def dumps(place: Place, subject: Subject) -> Iterator[Standing]:
    """A dump, written in the background while steps go on."""
    with place.fresh() as path, mf.attach(subject.model, dumps=mf.Dump(path / "dump", [SITES])):
        yield Standing(subject.model, dict, lambda: None)


# -- the predecessor -----------------------------------------------------------------------------------


@contextmanager
def predecessor(change: Any, subject: Subject) -> Iterator[Standing]:
    """flex-model 0.1.0 with an editing function or None. It reads to every rank, under each hook."""
    width = (None, None, subject.ffn)
    hooks = [(FC1.format(i), width, change) for i in range(subject.layers)]
    with flex_model(subject, hooks) as (flex, kept):
        if change is None:
            yield Standing(flex, lambda: {n: t[0] for n, t in kept.items()}, kept.clear)
            return
        standing = _watched(flex)

        def forget() -> None:
            standing.forget()
            kept.clear()

        yield Standing(standing.call, standing.read, forget)


def direction(subject: Subject) -> Tensor:
    """What is projected out: `[ffn]`, the same on all ranks."""
    return torch.randn(subject.ffn, generator=torch.Generator().manual_seed(5))


def ways(place: Place) -> dict[str, Way]:
    """All that can be measured here, by name; those that are compared with each other stand side by side."""
    made: dict[str, Way] = {
        "none": nothing,
        "idle": idle,
        "detached": detached,
        "clone": partial(seeing, clone),
        "read": partial(reads, {}),
        "gather": partial(seeing, gather),
        "clone of one": partial(seeing, clone_of_one),
        "local by hand": partial(changing, scaled),
        "local in place": partial(changing, in_place),
        "local": partial(edits, lambda _: mf.edits.scale(FACTOR)),
        "linear": partial(edits, lambda subject: mf.edits.project_out(direction(subject))),
        "all-gather": partial(changing, gathered),
        "general": partial(edits, lambda _: edit),
        "statistics": partial(statistics, place, [SITES]),
        "dump": partial(dumps, place),
        "trainable": trains,
    }
    if (select := getattr(mf, "Select", None)) is not None:
        made["selected"] = partial(reads, {"select": select(positions=-1)})
    if find_spec("flex_model") is not None:
        made |= {"flex-model read": partial(predecessor, None), "flex-model edit": partial(predecessor, edit)}
    return made
