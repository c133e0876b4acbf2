"""Which functions are proved to draw no random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.runtime.function_analysis import draws_random_numbers
from tests.unit.test_site_plan import constant, in_place, noisy, tripled


def clamped(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return torch.where(inputs > 0, inputs.clamp(max=2.0), inputs.mean(-1, keepdim=True))


def softmaxed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return torch.softmax(inputs, dim=-1)


def dropped(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return nn.functional.dropout(inputs, 0.5)


def normal_in_place(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + torch.empty_like(inputs).normal_()


def low_rank_svd(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return torch.svd_lowrank(inputs)[0]


def calls_another(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return noisy(module, inputs, save_ctx, modules)


def calls_the_module(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return module(inputs)


@pytest.mark.parametrize("function", [tripled, in_place, constant, clamped, softmaxed, mf.edits.scale(2.0)])
def test_functions_that_are_proved_to_draw_nothing(function: Callable[..., Any]) -> None:
    assert not draws_random_numbers(function)


@pytest.mark.parametrize(
    "function",
    [
        noisy,
        dropped,
        normal_in_place,
        low_rank_svd,
        calls_another,
        calls_the_module,
        mf.edits.noise(1.0),
        len,
    ],
)
def test_functions_that_may_draw(function: Callable[..., Any]) -> None:
    assert draws_random_numbers(function)


def test_an_attribute_decides() -> None:
    def function(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return noisy(module, inputs, save_ctx, modules)

    function.edit_traits = mf.edits.EditTraits(uses_random_numbers=False)  # type: ignore[attr-defined]
    assert not draws_random_numbers(function)
