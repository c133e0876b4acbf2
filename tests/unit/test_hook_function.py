"""What a HookFunction says of what it is given, before any model is there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

import megatron_flex as mf
from tests.support.messages import raises


class Edit(nn.Module):
    """Something callable that is no function."""

    def forward(self, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return inputs


def of_four(module: Any, inputs: Tensor, save_ctx: Any, modules: Any, strength: float = 1.0) -> Tensor:
    return inputs * strength


@pytest.mark.parametrize("edit", [of_four, partial(of_four, strength=2.0), Edit(), lambda *args: args[1]])
def test_anything_that_takes_four_arguments_will_do(edit: Any) -> None:
    assert mf.HookFunction("decoder", editing_function=edit).editing_function is edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda inputs: inputs, ("<lambda>(inputs)",)),
        (lambda module, inputs, save_ctx, modules, more: inputs, ("more",)),
        (
            lambda module, *, inputs, save_ctx, modules: inputs,
            ("<lambda>(module, *, inputs, save_ctx, modules)",),
        ),
        ("steer", ("editing_function", "steer")),
    ],
)
def test_a_function_that_takes_something_else_is_refused_at_once(edit: Any, words: tuple[str, ...]) -> None:
    with raises(mf.HookError, *words):
        mf.HookFunction("decoder", editing_function=edit)


def test_a_hook_that_does_nothing_is_refused() -> None:
    with raises(mf.HookError, "decoder", "editing_function"):
        mf.HookFunction("decoder", save=False)
