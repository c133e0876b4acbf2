"""Causes in routers and experts: another order, other weights of the chosen, a missing bias or scaling."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_flex.alignment.evidence import Evidence
from megatron_flex.alignment.tensor_causes import match_columns


def router_order(e: Evidence) -> str:
    """The router's experts are in another order."""
    pair = e.pair(e.site)
    if pair is None or pair[0].shape != pair[1].shape:
        return ""
    order = match_columns(pair[0].flatten(0, 1), pair[1].flatten(0, 1), e.tolerance)
    return "" if order is None else f"the experts are in another order in the router: {order}"


def other_expert(e: Evidence) -> str:
    """An expert has the weights of another expert."""
    path = f"{e.layer}.mlp.experts.local_experts.{e.match.expert}"
    module = e.module(e.match.row.other[0].partition(":")[0].rpartition(".")[0])
    weights = getattr(module, "gate_up_proj", None)
    rows, gate, up = (e.megatron(f"{path}.linear_fc1:{point}") for point in ("input", "gate", "up"))
    if not isinstance(weights, Tensor) or rows is None or gate is None or up is None or not len(rows):
        return ""
    megatron = torch.cat([gate, up], -1)
    for expert, weight in enumerate(weights.detach().float().cpu()):
        projected = rows @ weight.T
        if e.equal(megatron, projected) and expert != e.match.expert:
            return (
                f"the experts are in another order: expert {e.match.expert} has the weights of expert "
                f"{expert}"
            )
        if e.equal(megatron, torch.cat(projected.chunk(2, -1)[::-1], -1)):
            return "gate and up are swapped in linear_fc1 of the experts"
    return ""


def missing_router_scaling(e: Evidence) -> str:
    """The weights of the chosen experts are not multiplied by the factor of the configuration."""
    factor = getattr(e.hf_model.config, "routed_scaling_factor", None)
    pair = e.pair(e.site)
    if not factor or factor == 1 or pair is None or not e.equal(pair[0] * factor, pair[1]):
        return ""
    megatron_factor = getattr(e.config, "moe_router_topk_scaling_factor", None)
    return (
        f"the router's scaling is missing in Megatron: routed_scaling_factor={factor:g} in Hugging Face, "
        f"moe_router_topk_scaling_factor={megatron_factor} in Megatron"
    )


def missing_expert_bias(e: Evidence) -> str:
    """Experts are chosen without the correction of their scores."""
    path = f"{e.layer}.mlp.router"
    chosen, logits = e.pair(f"{path}:map"), e.pair(f"{path}:logits")
    if chosen is None or logits is None or bool((chosen[0].bool() == chosen[1].bool()).all()):
        return ""
    if not e.equal(*logits):
        return ""
    count = int(chosen[0][0, 0].sum())
    scores = logits[1].sigmoid()
    module = e.module(e.matches[f"{path}:logits"].row.other[0])
    bias = getattr(module, "e_score_correction_bias", None)
    if (
        isinstance(bias, Tensor)
        and bool(bias.any())
        and getattr(e.hf_model.config, "n_group", 1) in (1, None)
    ):
        plain = torch.zeros_like(scores).scatter(-1, scores.topk(count).indices, 1).bool()
        if bool((plain == chosen[0].bool()).all()):
            return "the correction bias of the router (e_score_correction_bias) is missing in Megatron"
    if isinstance(bias, Tensor) and bool(bias.any()):
        return (
            "the router's logits are equal and other experts are chosen: the correction bias "
            "(e_score_correction_bias) or the groups of experts differ"
        )
    return "the router's logits are equal and other experts are chosen"


def other_normalization(e: Evidence) -> str:
    """The weights of the chosen experts are normalized in one model only, or come from another function."""
    path = f"{e.layer}.mlp.router"
    pair, chosen, logits = e.pair(f"{path}:probs"), e.pair(f"{path}:map"), e.pair(f"{path}:logits")
    if pair is None or chosen is None or logits is None or not e.equal(*logits):
        return ""
    megatron, hf = pair
    mask, given = chosen[0].bool(), logits[0]
    forms = {
        "softmax over all experts": given.softmax(-1) * mask,
        "softmax over the chosen experts": given.masked_fill(~mask, float("-inf")).softmax(-1),
        "sigmoid": given.sigmoid() * mask,
        "sigmoid, normalized": _normalized(given.sigmoid() * mask),
    }
    names = [
        next((name for name, value in forms.items() if e.equal(value, side)), "") for side in (megatron, hf)
    ]
    if all(names) and names[0] != names[1]:
        return (
            f"the weights of the chosen experts are {names[0]} in Megatron and {names[1]} in Hugging "
            "Face (norm_topk_prob)"
        )
    if e.equal(_normalized(megatron), _normalized(hf)):
        return "the weights of the chosen experts have another sum: they are normalized in one model only"
    return ""


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)


def missing_shared_experts(e: Evidence) -> str:
    """The shared experts are not added, or not scaled alike."""
    pair, shared = e.pair(e.site), e.hf(f"{e.layer}.mlp.shared_experts:output")
    if pair is None or shared is None:
        return ""
    return (
        "the output of the shared experts is not added in Megatron"
        if e.equal(pair[0] + shared, pair[1])
        else ""
    )
