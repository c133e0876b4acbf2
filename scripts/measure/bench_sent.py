"""Counts what ranks of a benchmark send: calls of torch.distributed by name, bytes that leave a rank."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

LOOPBACK = "lo"


@dataclass
class Sent:
    """What one rank called, and the bytes that it sent by it.

    They are the least that any algorithm sends, summed over ranks: an all-gather sends each shard to each of
    the others, an all-reduce is a reduce-scatter and an all-gather.
    """

    calls: Counter[str] = field(default_factory=Counter)
    nbytes: float = 0.0


def _is(rank: int | None, index: int | None, group: Any) -> bool:
    """Whether this rank is the one that an argument names: globally, or within the group."""
    if index is not None:
        return dist.get_rank(group) == index
    return dist.get_rank() == (rank or 0)


def _to_one(tensor: Tensor, group: Any, more: dict[str, Any]) -> float:
    return 0.0 if _is(more.get("dst"), more.get("group_dst"), group) else float(tensor.nbytes)


def _from_one(nbytes: int, world: int, group: Any, more: dict[str, Any]) -> float:
    source = _is(more.get("src"), more.get("group_src"), group)
    return float(nbytes * (world - 1)) if source else 0.0


def _pickled(thing: Any) -> int:
    return len(pickle.dumps(thing))


# name -> the names of its arguments, and what a rank sends given them, the group's size, and the group
Rule = Callable[[dict[str, Any], int, Any], float]
RULES: dict[str, tuple[tuple[str, ...], Rule]] = {
    "all_reduce": (("tensor", "op"), lambda a, n, g: a["tensor"].nbytes * 2 * (n - 1) / n),
    "all_gather": (("tensor_list", "tensor"), lambda a, n, g: a["tensor"].nbytes * (n - 1)),
    "all_gather_into_tensor": (
        ("output_tensor", "input_tensor"),
        lambda a, n, g: a["input_tensor"].nbytes * (n - 1),
    ),
    "all_gather_object": (("object_list", "obj"), lambda a, n, g: _pickled(a["obj"]) * (n - 1)),
    "reduce_scatter_tensor": (("output", "input", "op"), lambda a, n, g: a["input"].nbytes * (n - 1) / n),
    "all_to_all_single": (
        ("output", "input", "output_split_sizes", "input_split_sizes"),
        lambda a, n, g: a["input"].nbytes * (n - 1) / n,
    ),
    "gather": (("tensor", "gather_list", "dst"), lambda a, n, g: _to_one(a["tensor"], g, a)),
    "reduce": (("tensor", "dst", "op"), lambda a, n, g: _to_one(a["tensor"], g, a)),
    "broadcast": (("tensor", "src"), lambda a, n, g: _from_one(a["tensor"].nbytes, n, g, a)),
    "broadcast_object_list": (
        ("object_list", "src"),
        lambda a, n, g: _from_one(_pickled(a["object_list"]), n, g, a),
    ),
    "send": (("tensor", "dst"), lambda a, n, g: a["tensor"].nbytes),
    "isend": (("tensor", "dst"), lambda a, n, g: a["tensor"].nbytes),
    "barrier": ((), lambda a, n, g: 0.0),
}
RULES["all_gather_single"] = RULES["all_gather_into_tensor"]  # since torch 2.13, which has both


@contextmanager
def counting() -> Iterator[Sent]:
    """Count the calls that are made through torch.distributed, whoever makes them."""
    sent = Sent()
    kept = {name: getattr(dist, name) for name in RULES if hasattr(dist, name)}

    def counted(name: str) -> Callable[..., Any]:
        names, rule = RULES[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group", args[len(names)] if len(args) > len(names) else None)
            sent.calls[name] += 1
            sent.nbytes += rule(
                dict(zip(names, args, strict=False)) | kwargs, dist.get_world_size(group), group
            )
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, counted(name))
    try:
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def on_loopback(text: str | None = None) -> int | None:
    """Bytes that went over this machine's own interface so far, by all of its processes; None if unknown."""
    if text is None:
        try:
            with open("/proc/net/dev", encoding="ascii") as file:
                text = file.read()
        except OSError:
            return None
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LOOPBACK:
            return int(numbers.split()[8])  # sent
    return None
