"""Whether tensors of several ranks are taken for the same one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_flex.layout import infer_layout
from megatron_flex.runtime.layout_inference import sketch_tensor


def test_equal_tensors_are_equal_up_to_rounding() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    layout = infer_layout(x.shape, None, 1)

    def fits(other: Tensor) -> bool:
        return sketch_tensor("x", ("tp",), layout, x).fits(sketch_tensor("x", ("tp",), layout, other), "tp")

    assert fits(x + 1e-6)
    assert fits(x.flip(0).flip(0) * (1 + 1e-7))
    assert not fits(x.flip(0))
    assert not fits(x * math.sqrt(2))
