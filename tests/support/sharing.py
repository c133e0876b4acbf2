"""Edits that share values through save_ctx, run by the library and by one process of plain Megatron."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support import gpt, oracle

FIRST, SECOND, THIRD, LAST = (f"decoder.layers.{n}:output" for n in range(4))


def save(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.stream = inputs
    return oracle.edit(inputs)


def patch(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return torch.cat([save_ctx.stream[:5].detach(), inputs[5:]])


def skip(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + 0.3 * oracle.edit(save_ctx.stream)


def instead(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Reads what came alone, and so has no path back through its input."""
    return 0.7 * save_ctx.stream


def change(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Reads what came, and puts something made of it in its place."""
    save_ctx.before = save_ctx.stream
    save_ctx.stream = save_ctx.stream * 1.1 + 0.2 * inputs.roll(1, 0)
    return inputs


def both(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + 0.2 * save_ctx.stream - 0.1 * save_ctx.before.roll(1, -1)


def count(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.n = getattr(save_ctx, "n", 0) + 1
    return inputs * (1 + 0.1 * save_ctx.n)


def nest(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.all = {"parts": [inputs, 2 * inputs], "note": ("double", None), "weights": np.array([0.5, 0.25])}
    return inputs


def append(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.all["parts"].append(inputs.mean(0))
    save_ctx.all["weights"] = np.append(save_ctx.all["weights"], 0.125)
    return inputs


def unnest(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    assert save_ctx.all["note"] == ("double", None)
    for part, weight in zip(save_ctx.all["parts"], save_ctx.all["weights"], strict=True):
        inputs = inputs + float(weight) * part
    return inputs


def scale(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.scale = inputs.detach().abs().mean()
    return inputs


def note_gradient(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.size = inputs.norm()
    return inputs * save_ctx.scale


def use_gradient(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * (1 + save_ctx.size) + save_ctx.scale * inputs.roll(1, 0)


def inside(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """What one place in a layer saves the next place in the same layer reads."""
    save_ctx.gate = inputs
    return inputs * 0.9


def inside_read(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + 0.5 * save_ctx.gate


def inside_region(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Reads what was saved outside of a recomputed region, and saves what is read outside of it."""
    save_ctx.mean = inputs.mean()
    return inputs * (1 + save_ctx.stream.std())


def outside_region(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * (1 + save_ctx.mean)


Placed = tuple[str, str, Any]  # site, hook_type (forward or tensor), function

SCENARIOS: dict[str, list[Placed]] = {
    "patch": [(FIRST, "forward", save), (LAST, "forward", patch)],
    "skip": [(FIRST, "forward", save), (LAST, "forward", skip)],
    "skip to the loss": [(SECOND, "forward", save), ("decoder:output", "forward", skip)],
    "from the embedding": [("embedding:output", "forward", save), (THIRD, "forward", skip)],
    "at one place": [
        (SECOND, "forward", save),
        (SECOND, "forward", skip),
        (THIRD, "forward", save),
        (THIRD, "forward", instead),
    ],
    "chain": [(FIRST, "forward", save), (SECOND, "forward", change), (LAST, "forward", both)],
    "count": [(site, "forward", count) for site in (FIRST, SECOND, THIRD, LAST)],
    "nest": [(FIRST, "forward", nest), (THIRD, "forward", append), (LAST, "forward", unnest)],
    "gradients": [
        (THIRD, "forward", scale),
        (LAST, "tensor", note_gradient),
        (FIRST, "tensor", use_gradient),
    ],
    "attention": [
        (FIRST, "forward", save),
        ("decoder.layers.1.self_attention.core_attention:scores", "forward", inside_region),
        (SECOND, "forward", outside_region),
        (LAST, "forward", outside_region),
    ],
    "inside": [
        ("decoder.layers.1.mlp.linear_fc1:gate", "forward", inside),
        ("decoder.layers.1.mlp.linear_fc1:up", "forward", inside_read),
        ("decoder.layers.1.mlp.linear_fc2:output", "forward", save),
        ("decoder.layers.2.self_attention.linear_proj:output", "forward", skip),
    ],
}


def weights(case: gpt.Case) -> dict[str, Tensor]:
    """The weights of a model of one process."""
    gpt.runtime(case)
    gpt.initialize(case)
    return gpt.randomize(gpt.build(case)[0])


def truth(case: gpt.Case, names: list[str]) -> dict[str, Any]:
    """Losses and parameter gradients of each scenario on one process, the context a Namespace."""
    gpt.runtime(case)
    gpt.initialize(case)
    found: dict[str, Any] = {}
    for name in names:
        fresh = gpt.build(case)
        gpt.randomize(fresh[0])
        _install(fresh[0], SCENARIOS[name])
        losses = gpt.step(case, fresh, 0)
        found[name] = losses, {n: p.grad.clone() for n, p in gpt.global_names(fresh[0]) if p.grad is not None}
    return found


def _install(root: nn.Module, placed: list[Placed]) -> None:
    now = [Namespace()]

    def begin(*_: Any) -> None:
        now[0] = Namespace()

    root.register_forward_pre_hook(begin)

    def visit(function: Any, kind: str, tensor: Tensor) -> Tensor:
        if kind == "forward":
            return function(None, tensor, now[0], None)
        tensor = tensor.clone()
        tensor.register_hook(lambda grad: function(None, grad, now[0], None))
        return tensor

    for site, kind, function in placed:
        oracle.install(root, site, partial(visit, function, kind))


def hooks(name: str, run: list[str]) -> list[Any]:
    """The hooks of a scenario; `run` says for each of them in turn, and then over again, where it runs."""
    import megatron_flex as mf

    return [
        mf.HookFunction(site, editing_function=function, hook_type=kind, run=run[i % len(run)], save=False)
        for i, (site, kind, function) in enumerate(SCENARIOS[name])
    ]
