"""What the compatible interface hands to native hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_flex import HookError
from megatron_flex.compat import FlexModel, HookFunction
from tests.support.messages import raises


def test_a_function_with_other_arguments_is_refused_at_once() -> None:
    flex = FlexModel(nn.Sequential(nn.Identity()), {})

    def few(module: Any, inputs: Tensor) -> Tensor:
        return inputs

    with raises(HookError, "module: 'Any', inputs: 'Tensor') -> 'Tensor'", "current_module"):
        flex.register_forward_hook(HookFunction("0", editing_function=few))  # type: ignore[arg-type]


def test_functions_with_further_arguments() -> None:
    """As the tests of FlexModel had them."""
    seen: dict[str, Tensor] = {}

    def verify(module: Any, inputs: Tensor, save_ctx: Any, modules: Any, act_dict: Any) -> Tensor:
        act_dict["seen"] = inputs
        return inputs

    flex = FlexModel(nn.Sequential(nn.Identity()), {})
    flex.register_forward_hook(HookFunction("0", editing_function=partial(verify, act_dict=seen)))
    inputs = torch.ones(2)
    flex(inputs)
    assert torch.equal(seen["seen"], inputs)


@pytest.mark.parametrize("name", ["decoder.*", "layer?", "a[0]", None])
def test_a_hook_function_has_one_modules_name(name: Any) -> None:
    with raises(HookError, repr(name)):
        HookFunction(name)
