"""What runs on the ranks in tests of behaviour: a small GPT under Megatron's schedule, and what to count."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support import gpt

MOVING = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
SAME = {"all_gather_single": "all_gather_into_tensor"}  # since torch 2.13, which has both


def start(case: gpt.Case) -> list[nn.Module]:
    """Megatron on CPU with a case's model of random, but everywhere equal, replicated parts."""
    from megatron_flex import cpu

    cpu.enable()
    gpt.initialize(case)
    return gpt.build(case)


def mine(chunks: list[nn.Module]) -> int:
    """This rank's place among the data parallel ranks."""
    from megatron_flex.adapters import detect

    return detect(chunks).mesh["dp"].coord


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of torch.distributed's functions, whoever makes them; by one name those with two.

    Not `isend` and `irecv`, which Megatron compares by identity.
    """
    counts: Counter[str] = Counter()
    kept = {name: getattr(dist, name) for name in (*MOVING, *SAME) if hasattr(dist, name)}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[SAME.get(name, name)] += 1
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def fingerprint(chunks: list[nn.Module]) -> dict[str, Any]:
    """Every attribute of every module, and the schedule's functions, by identity."""
    from megatron.core.pipeline_parallel import schedules

    out: dict[str, Any] = {}
    for number, root in enumerate(chunks):
        for path, module in root.named_modules():
            out[f"{number}/{path}/class"] = type(module)
            for name, value in vars(module).items():
                if name == "input_tensor":  # the schedule sets it at each microbatch
                    continue
                plain = isinstance(value, (dict, set)) and name.startswith("_")
                out[f"{number}/{path}/{name}"] = tuple(value) if plain else id(value)
    for name, value in vars(schedules).items():
        if isinstance(value, types.FunctionType) or not name.startswith("__"):
            out[f"schedules/{name}"] = id(value)
    return out


def call(chunks: list[nn.Module], **kwargs: Any) -> torch.Tensor:
    """Call a model of one chunk by itself."""
    batch = gpt.data(1)[0]
    positions = torch.arange(gpt.SEQUENCE).expand(gpt.BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
    model = kwargs.pop("model", chunks[0])
    return model(batch["tokens"], positions, mask, labels=batch["labels"])


def step_says(case: gpt.Case, chunks: list[nn.Module], flex: Any) -> str:
    """The error of hooks that a step raises, empty if none; the hooks are taken out."""
    from megatron_flex import HookError

    try:
        gpt.step(case, chunks, 0)
    except HookError as error:
        return str(error)
    finally:
        flex.session.close()
    return ""
