"""The ways to read fc1 and fc2 that scripts/bench compares; each stands while its context is entered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FC1 = "decoder.layers.{}.mlp.linear_fc1"
FC2 = "decoder.layers.{}.mlp.linear_fc2"


@dataclass(frozen=True)
class Subject:
    """The model of this rank, and its tensor parallel group, which is the whole world.

    `ffn` is the MLP's width; fc1 returns `[s, b, gate|up]`, twice as wide, each half cut over the ranks.
    """

    model: nn.Module
    layers: int
    ffn: int
    group: Any

    @property
    def names(self) -> list[str]:
        """The modules whose outputs are read."""
        return [name.format(i) for name in (FC1, FC2) for i in range(self.layers)]


@dataclass(frozen=True)
class Standing:
    """A variant in place: how the model is called, what rank 0 read by name, how to forget it."""

    call: Callable[..., Tensor]
    read: Callable[[], dict[str, Tensor]]
    forget: Callable[[], None]


Variant = Callable[[], AbstractContextManager[Standing]]
Hook = Callable[[nn.Module, Any, Any], None]


@contextmanager
def nothing(subject: Subject) -> Iterator[Standing]:
    """(a) The model alone."""
    yield Standing(subject.model, dict, lambda: None)


@contextmanager
def idle(subject: Subject) -> Iterator[Standing]:
    """(b) FlexModel attached, no hook registered."""
    import megatron_flex

    with megatron_flex.attach(subject.model):
        yield Standing(subject.model, dict, lambda: None)


@contextmanager
def ours(subject: Subject) -> Iterator[Standing]:
    """(c) megatron_flex reads full tensors to rank 0."""
    import megatron_flex

    hooks = [megatron_flex.HookFunction(name.format("*")) for name in (FC1, FC2)]
    with megatron_flex.attach(subject.model, hooks) as flex:
        whole = flex.output_dict
        yield Standing(subject.model, lambda: {n: whole[n][0] for n in subject.names if whole}, whole.clear)


@contextmanager
def local_clone(subject: Subject) -> Iterator[Standing]:
    """(d) PyTorch hooks that clone what this rank holds: fc1's shard, on rank 0 fc2's replicated output."""
    kept: dict[str, Tensor] = {}

    def hook(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if "fc1" in name or dist.get_rank() == 0:
            kept[name] = output[0].detach().clone()

    with _hooked(subject, hook):
        yield Standing(subject.model, lambda: kept, kept.clear)


@contextmanager
def by_hand(subject: Subject) -> Iterator[Standing]:
    """(f) Hand-written: gather fc1 to rank 0 in the hook, put [gate|up] in order; clone fc2 there."""
    kept: dict[str, Tensor] = {}
    world, first = dist.get_world_size(subject.group), dist.get_rank() == 0

    def hook(name: str, _: nn.Module, __: Any, output: Any) -> None:
        local = output[0].detach()
        if "fc2" in name:
            if first:
                kept[name] = local.clone()
            return
        shards = [torch.empty_like(local) for _ in range(world)] if first else None
        dist.gather(local, shards, dst=0, group=subject.group)
        if shards is not None:
            halves = [s.chunk(2, dim=-1) for s in shards]
            kept[name] = torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=-1)

    with _hooked(subject, hook):
        yield Standing(subject.model, lambda: kept, kept.clear)


@contextmanager
def _hooked(subject: Subject, hook: Callable[..., None]) -> Iterator[None]:
    handles = [subject.model.get_submodule(n).register_forward_hook(partial(hook, n)) for n in subject.names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def predecessor(subject: Subject) -> Iterator[Standing]:
    """(e) flex-model 0.1.0, by its public interface, with nothing in it replaced.

    It would make an "nccl" group; it is handed the gloo world instead, and the groups that it makes besides
    have torch's default backend, gloo. It is made anew each time, since its hooks cannot be put in twice, and
    the groups that each wrap leaks are destroyed here. Megatron's schedule gets the bare model, whose
    attributes the wrapper does not pass on, and the wrapper is called inside the forward step.

    It reads to every rank. A gated fc1 comes in the order of the ranks: it does not know the two halves.
    """
    hooks = [(name, (None, None, 2 * subject.ffn if "fc1" in name else None), None) for name in subject.names]
    with flex_model(subject, hooks) as (flex, kept):
        yield Standing(flex, lambda: {n: t[0] for n, t in kept.items()}, kept.clear)


@contextmanager
def flex_model(subject: Subject, hooks: list[Any]) -> Iterator[tuple[Any, dict[str, list[Tensor]]]]:
    """The predecessor's wrapper with hooks (name, expected shape, editing function), and what it keeps."""
    with _transformers_or_its_one_class():
        from flex_model.core import FlexModel, HookFunction

    kept: dict[str, list[Tensor]] = {}
    world = dist.get_world_size()
    flex = FlexModel(subject.model, kept, tensor_parallel_size=world, process_group=dist.group.WORLD)
    for hook in hooks:
        flex.register_forward_hook(HookFunction(*hook))
    try:
        yield flex, kept
    finally:
        flex.restore()
        for axis in ("tensor", "pipeline", "data"):
            dist.destroy_process_group(getattr(flex.fmps, f"get_{axis}_parallel_group")())


@contextmanager
def _transformers_or_its_one_class() -> Iterator[None]:
    """Flex-model imports one class of transformers, to look for it in outputs; Megatron's outputs have none.

    Where transformers is not installed an empty class has that name while flex-model is imported.
    """
    if find_spec("transformers") is not None:
        yield
        return
    outputs = ModuleType("transformers.modeling_outputs")
    outputs.BaseModelOutputWithPast = type("BaseModelOutputWithPast", (), {})  # type: ignore[attr-defined]
    stand_ins = {"transformers": ModuleType("transformers"), outputs.__name__: outputs}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def in_order(rank_order: Tensor, world: int) -> Tensor:
    """[gate|up] of all ranks one after the other -> all of gate, then all of up."""
    pieces = rank_order.chunk(2 * world, dim=-1)
    return torch.cat([*pieces[0::2], *pieces[1::2]], dim=-1)


def variants(subject: Subject) -> dict[str, Variant]:
    """The variants that can be measured here, by letter: all, or all but the predecessor."""
    made = {"a": nothing, "b": idle, "c": ours, "d": local_clone, "e": predecessor, "f": by_hand}
    if find_spec("flex_model") is None:
        del made["e"]
    return {letter: partial(variant, subject) for letter, variant in made.items()}
