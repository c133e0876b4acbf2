"""Megatron's RouterReplay on a rank: routes that it records and replays, with our hooks and plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import gpt, moe, ranks
from tests.support.gpt import Case
from tests.support.rank import changes

LAYERS = (0, 1)
ROUTERS = tuple(f"decoder.layers.{n}.mlp.router" for n in LAYERS)
SITES = tuple(f"{r}:{point}" for r in ROUTERS for point in ("logits", "probs", "map"))


class Asked(NamedTuple):
    """What RouterReplay does in a step, and what hooks do.

    Attributes:
        action: what RouterReplay does: "record" or "replay".
        hooks: whether hooks read `SITES`; plain hooks always do.
        edited: whether the logits of the routers are negated.
        backward: whether RouterReplay's own action for the backward pass replays in the recomputation.
    """

    action: str
    hooks: bool = True
    edited: bool = False
    backward: bool = False


def with_hooks(case: Case, state: dict[str, Tensor], asked: Asked) -> dict[str, Any]:
    """A step on this rank with our hooks: losses, captures, recorded routes and gradients."""
    import megatron_flex as mf
    from tests.distributed import matrix

    chunks = _start(case, state, asked)
    hooks = [mf.HookFunction(name) for name in (SITES if asked.hooks else ())]
    hooks += [mf.HookFunction(f"{r}:logits", _negate, save=False) for r in ROUTERS if asked.edited]
    with mf.attach(chunks, hooks) as flex:
        losses = gpt.step(case, chunks, ranks.mine(chunks))
        captures = {name: list(tensors) for name, tensors in flex.output_dict.items()}
        mesh = flex.session.mesh
        return {
            "losses": losses,
            "captures": captures,
            "routes": [_gather(case, t) for t in _recorded(asked)],
            "gradients": matrix._gradients(flex, chunks),
            **{"dp": mesh["dp"].coord, "sizes": dict(mesh.sizes), "coords": dict(mesh.coords)},
        }


def by_hand(case: Case, state: dict[str, Tensor], asked: Asked) -> dict[str, Any]:
    """The same step on one process without this package: torch's hooks, and a wrapper of `gating`."""
    (model,) = _start(case, state, asked)
    captures: dict[str, list[Tensor]] = {name: [] for name in SITES}

    def gate(gating: Any, name: str, inputs: Tensor) -> Tensor:
        logits: Tensor = gating(inputs)
        captures[f"{name}:logits"].append(logits.detach().clone())  # a capture is made before the edit
        return -logits if asked.edited else logits

    def choose(name: str, _: nn.Module, __: Any, result: tuple[Tensor, Tensor]) -> None:
        for point, tensor in zip(("probs", "map"), result, strict=True):
            captures[f"{name}:{point}"].append(tensor.detach().view(gpt.SEQUENCE, gpt.BATCH, -1).clone())

    for name in ROUTERS:
        router: Any = model.get_submodule(name)
        router.gating = partial(gate, router.gating, name)
        router.register_forward_hook(partial(choose, name))
    losses = gpt.step(case, [model], 0)
    return {
        "losses": losses,
        "captures": captures,
        "routes": [_gather(case, t) for t in _recorded(asked)],
        "gradients": {name: p.grad.clone() for name, p in gpt.global_names(model)},
    }


def routes(case: Case) -> list[list[Tensor]]:
    """Experts that no router chose, by microbatch and layer: `[s, b, k]`."""
    generator = torch.Generator().manual_seed(11)
    draw = partial(torch.rand, gpt.SEQUENCE, gpt.BATCH, case.experts, generator=generator)
    return [[draw().topk(moe.TOPK).indices for _ in LAYERS] for _ in range(case.microbatches)]


def _negate(current_module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return -inputs


def _start(case: Case, state: dict[str, Tensor], asked: Asked) -> list[nn.Module]:
    """The model with weights, and RouterReplay's action in each microbatch."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    changes.setattr(RouterReplay, "global_router_replay_instances", [])
    chunks = ranks.start(case)
    gpt.load(chunks, state)
    given, forward_step = iter(routes(case)), gpt.forward_step

    def act(iterator: Iterator[Any], model: nn.Module) -> Any:
        RouterReplay.clear_global_indices()
        if asked.action == "record":
            RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
            return forward_step(iterator, model)
        RouterReplay.set_replay_data([_local(case, t).flatten(0, 1) for t in next(given)])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        result = forward_step(iterator, model)
        if asked.backward:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return result

    changes.setattr(gpt, "forward_step", act)
    return chunks


def _recorded(asked: Asked) -> list[Tensor]:
    """The routes of the last microbatch, by layer, as RouterReplay holds them on this rank."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    held = RouterReplay.get_recorded_data() if asked.action == "record" else []
    return [tensor for tensor in held if tensor is not None]


def _local(case: Case, full: Tensor) -> Tensor:
    """This rank's rows of a tensor of tokens: sequence parallel ranks have parts of the sequence."""
    return full.chunk(case.tp)[dist.get_rank() % case.tp] if case.sp else full


def _gather(case: Case, local: Tensor) -> Tensor:
    """The routes `[s, b, k]` of all tokens of the replica, in ascending order of experts."""
    parts = [local]
    if case.sp:
        parts = [torch.empty_like(local) for _ in range(case.tp)]
        dist.all_gather(parts, local.contiguous())
    return torch.cat(parts).view(gpt.SEQUENCE, gpt.BATCH, -1).sort(-1).values
