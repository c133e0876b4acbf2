"""Stand-ins for Transformer Engine's grouped linears, which need a GPU, for Megatron's own TEGroupedMLP.

They have the name, module, attributes and call of Megatron's wrappers and compute the same with plain torch.
What runs around them (TEGroupedMLP, dispatchers, router) is Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = "megatron.core.extensions.transformer_engine"


class TEGroupedLinear(nn.Module):
    """One weight for each local expert; their rows lie one behind the other."""

    __module__ = WRAPPERS
    mode = ""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, pg_collection: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        ranks = pg_collection.expt_tp.size()
        self.num_gemms = num_gemms
        self.explicit_expert_comm = ranks > 1 or pg_collection.ep.size() > 1
        shape = {"column": (output_size // ranks, input_size), "row": (output_size, input_size // ranks)}
        assert not bias
        for number in range(num_gemms):
            setattr(self, f"weight{number}", nn.Parameter(torch.zeros(shape[self.mode])))

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        parts = torch.split(x, m_splits)
        return torch.cat([part @ w.T for part, w in zip(parts, weights, strict=True)]), None


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    __module__ = WRAPPERS
    mode = "column"


class TERowParallelGroupedLinear(TEGroupedLinear):
    __module__ = WRAPPERS
    mode = "row"


def spec(layer: Any) -> Any:
    """A layer's spec with its experts grouped."""
    from functools import partial

    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    linears = GroupedMLPSubmodules(
        linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear
    )
    submodules = MoESubmodules(experts=partial(TEGroupedMLP, submodules=linears))
    layer.submodules.mlp = partial(MoELayer, submodules=submodules)
    return layer
