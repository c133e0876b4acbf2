"""The parts of fused tensors in a one-process model, by the numbers of their columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

POINTS = ("q", "k", "v", "gate", "up")


def columns(config: Any, path: str, point: str) -> list[int]:
    """Which columns of `linear_qkv:output` or `linear_fc1:output` a part has, counted out by hand."""
    if path.endswith("linear_fc1"):
        width = config.ffn_hidden_size
        if "experts" in path:
            shared = "shared_experts" in path
            width = config.moe_shared_expert_intermediate_size if shared else config.moe_ffn_hidden_size
        return list(range(width)) if point == "gate" else list(range(width, 2 * width))
    size, groups = config.kv_channels, config.num_query_groups
    each = config.num_attention_heads // groups
    order = ["q"] * each
    order += ["gate"] * each if getattr(config, "attention_output_gate", False) else []
    order += ["k", "v"]
    heads = [at for at, name in enumerate(order * groups) if name == point]
    return [head * size + i for head in heads for i in range(size)]


def install(module: nn.Module, config: Any, path: str, point: str, visit: Any) -> None:
    """Put `visit` at a part of what a linear returns."""
    places = torch.tensor(columns(config, path, point))

    def hook(_: nn.Module, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        at = places.to(output[0].device)
        part = output[0].index_select(-1, at)
        if path.endswith("linear_qkv"):
            part = part.unflatten(-1, (-1, config.kv_channels))
        new = visit(part)
        new = new.flatten(2) if path.endswith("linear_qkv") else new
        return output[0].index_copy(-1, at, new), output[1]

    module.register_forward_hook(hook)
