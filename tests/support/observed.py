"""Megatron's tensor_observation on a rank: what its observer receives, with our hooks and with plain ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import gpt, ranks
from tests.support.gpt import Case

KINDS = ("residual_accumulator", "residual_contribution", "router_logits", "output_logits")
EDITED = ("decoder.layers.0:output", "decoder.layers.1.mlp.router:logits", "output_layer:output")


class Asked(NamedTuple):
    """What hooks do in a step.

    Attributes:
        reads: whether hooks read all sites that the observer sees, with their gradients.
        edits: whether the tensors of `EDITED` are halved.
    """

    reads: bool = False
    edits: bool = False


def with_hooks(case: Case, state: dict[str, Tensor], asked: Asked) -> dict[str, Any]:
    """A step on this rank with our hooks: what the observer received, in full, and gradients."""
    import megatron_flex as mf
    from tests.distributed import matrix

    chunks = ranks.start(case)
    gpt.load(chunks, state)
    names = [
        "decoder.layers.*:input",
        "decoder.layers.*:output",
        "decoder.layers.*.mlp.router:logits",
        "output_layer:output",
    ]
    hooks = [mf.HookFunction(name) for name in (names if asked.reads else ())]
    hooks += [mf.HookFunction(name, hook_type="tensor") for name in (names if asked.reads else ())]
    hooks += [mf.HookFunction(name, _halve, save=False) for name in EDITED if asked.edits]
    with mf.attach(chunks, hooks) as flex:
        observed = _observe(case, chunks)
        mesh = flex.session.mesh
        return {
            "observed": observed,
            "captures": {name: list(tensors) for name, tensors in flex.output_dict.items()},
            "gradients": matrix._gradients(flex, chunks),
            **{"dp": mesh["dp"].coord, "sizes": dict(mesh.sizes), "coords": dict(mesh.coords)},
        }


def by_hand(case: Case, state: dict[str, Tensor], asked: Asked) -> dict[str, Any]:
    """The same step on one process without this package."""
    (model,) = chunks = ranks.start(case)
    gpt.load(chunks, state)
    if asked.edits:
        layer, router, output = (model.get_submodule(name.partition(":")[0]) for name in EDITED)
        for module in (layer, output):
            module.register_forward_hook(lambda _, __, result: (result[0] * 0.5, *result[1:]))
        gating: Any = router.gating
        router.gating = lambda inputs: gating(inputs) * 0.5
    return {
        "observed": _observe(case, chunks),
        "gradients": {name: p.grad.clone() for name, p in gpt.global_names(model)},
    }


def _halve(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 0.5


def _observe(case: Case, chunks: list[nn.Module]) -> list[tuple[str, Tensor]]:
    """What the observer receives in a step: a name and the full tensor, in order."""
    from megatron.core.tensor_observation import capture_tensor_observations

    received: list[tuple[str, Tensor]] = []
    paths = {id(m): p for chunk in chunks for p, m in chunk.named_modules()}

    def observer(owner: object, name: str, kind: str, tensor: Tensor, shard_dim: int | None, *_: Any) -> None:
        local = tensor.detach().clone()
        parts = [local]
        if shard_dim is not None and case.tp > 1:
            parts = [torch.empty_like(local) for _ in range(case.tp)]
            dist.all_gather(parts, local)
        received.append((f"{paths[id(owner)]} {kind}", torch.cat(parts, shard_dim or 0)))

    with capture_tensor_observations(observer, frozenset(KINDS)):
        gpt.step(case, chunks, ranks.mine(chunks))
    return received
