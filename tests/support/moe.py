"""Layers of experts in tests: their settings, the names of their sites, and the single-process truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TOPK, WIDTH, SHARED = 2, 24, 40
Visit = Callable[[Tensor], Tensor]


def settings(case: Any) -> dict[str, Any]:
    """What the configuration says of experts."""
    return {
        "num_moe_experts": case.experts,
        "moe_router_topk": TOPK,
        "moe_ffn_hidden_size": WIDTH,
        "moe_token_dispatcher_type": case.dispatcher,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": case.grouped,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": SHARED if case.shared_experts else None,
    }


def sites_of(case: Any) -> list[str]:
    """The names of the sites of one layer, written down by hand."""
    out = [
        *(f"mlp:{p}" for p in ("input", "output")),
        *(f"mlp.router:{p}" for p in ("input", "logits", "probs", "map")),
        *(f"mlp.experts:{p}" for p in ("indices", "weights", "dispatched", "output")),
    ]
    if case.grouped:
        out += [f"mlp.experts.linear_fc{n}:{p}" for n in (1, 2) for p in ("input", "output")]
    for expert in range(0 if case.grouped else case.experts):
        at = f"mlp.experts.local_experts.{expert}"
        out += [f"{at}:{p}" for p in ("input", "output")]
        out += [f"{at}.linear_fc{n}:{p}" for n in (1, 2) for p in ("input", "output")]
        out += [f"{at}.linear_fc1:{p}" for p in ("gate", "up")]
    if case.shared_experts:
        at = "mlp.shared_experts"
        out += [f"{at}:{p}" for p in ("input", "output")]
        out += [f"{at}.linear_fc1:{p}" for p in ("input", "gemm_input", "output", "gate", "up")]
        out += [f"{at}.linear_fc2:{p}" for p in ("input", "partial", "output")]
    return out


def knows(site: str) -> bool:
    """Whether a site is one that plain hooks on a module do not give as it is."""
    path, _, point = site.partition(":")
    role = path.rpartition(".")[2]
    return (role == "router" and point != "input") or role == "experts" or ".experts.linear_fc" in path


def read_only(site: str) -> bool:
    """Whether a site cannot be edited."""
    return site.endswith((".router:map", ".experts:indices", "word_embeddings:input"))


def install(root: nn.Module, site: str, visit: Visit) -> None:
    """Put `visit` at such a site of a one-process model."""
    path, _, point = site.partition(":")
    layer: Any = root.get_submodule(path.partition(".mlp")[0] + ".mlp")
    if path.endswith(".router"):
        _router(layer.router, point, visit)
    else:
        _experts(layer, path.rpartition(".mlp.")[2], point, visit)


def _router(router: Any, point: str, visit: Visit) -> None:
    if point == "logits":
        gating = router.gating
        router.gating = lambda *a, **k: visit(gating(*a, **k))
        return
    index = ("probs", "map").index(point)

    def hook(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Any:
        sequence, batch = args[0].shape[:2]
        flat = output[index]
        new = visit(flat.view(sequence, batch, -1)).reshape(flat.shape)
        return tuple(new if i == index else item for i, item in enumerate(output))

    router.register_forward_hook(hook)


def _experts(layer: Any, path: str, point: str, visit: Visit) -> None:
    """One process sorts its rows by expert and then by token; here they go by token and then by expert.

    A token has `moe_router_topk` slots, of which dropping may leave some empty: zeros, or -1 for a number.
    """
    seen: dict[str, Any] = {}
    top_k = layer.config.moe_router_topk

    def slots() -> tuple[Tensor, Tensor, Tensor]:
        """Token, slot and expert of each row, by token; written apart from the library's way."""
        tokens, experts = seen["map"].nonzero(as_tuple=True)
        first = torch.searchsorted(tokens, tokens)
        return tokens, torch.arange(len(tokens), device=tokens.device) - first, experts

    def route(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        seen["shape"] = args[0].shape[:2]
        seen["map"] = output[1]
        if point == "indices":
            tokens, slot, experts = slots()
            dense = torch.full((len(output[1]), top_k), -1, device=tokens.device)
            dense[tokens, slot] = experts
            visit(dense.view(*seen["shape"], top_k))

    layer.router.register_forward_hook(route)

    def through(rows: Tensor) -> Tensor:
        tokens, slot, experts = slots()
        sorting = torch.argsort(experts * len(seen["map"]) + tokens)  # the layer's order, out of by-token
        dense = rows.new_zeros(len(seen["map"]), top_k, *rows.shape[1:])
        dense = dense.index_put((tokens, slot), rows[torch.argsort(sorting)])
        whole = visit(dense.view(*seen["shape"], top_k, *rows.shape[1:]))
        return whole.reshape(dense.shape)[tokens, slot][sorting]

    def before(_: nn.Module, args: tuple[Any, ...]) -> Any:
        place = 2 if point == "weights" else 0
        return tuple(through(item) if i == place else item for i, item in enumerate(args))

    def after(_: nn.Module, __: Any, output: tuple[Any, ...]) -> Any:
        return through(output[0]), *output[1:]

    module = layer.get_submodule(path)
    if point in ("dispatched", "weights", "input"):
        module.register_forward_pre_hook(before)
    elif point == "output":
        module.register_forward_hook(after)
