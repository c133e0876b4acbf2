"""Which functions may look at an argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from megatron_flex.compat import FlexModel, HookFunction
from megatron_flex.runtime.function_analysis import uses_argument


def ignores(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs * 2 + len(str(module))


def reads(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs + save_ctx.bias


def passes_on(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return reads(module, inputs, save_ctx, modules)


def captures(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return sorted(inputs, key=lambda i: save_ctx.order[i])


def overwrites(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    save_ctx = None  # noqa: F841
    return inputs


def deletes(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    del save_ctx
    return inputs


def by_another_name(module: Any, inputs: Any, context: Any, modules: Any) -> Any:
    context.x = inputs
    return inputs


def sees_all(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return locals()


def any_number(*arguments: Any) -> Any:
    return arguments[1]


def with_more(strength: float, module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs * strength


def with_more_reads(strength: float, module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
    return inputs * save_ctx.strength


class Edit:
    def ignores(self, module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
        return inputs

    def reads(self, module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
        save_ctx.x = inputs
        return inputs

    @staticmethod
    def static(module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
        return inputs

    def __call__(self, module: Any, inputs: Any, save_ctx: Any, modules: Any) -> Any:
        return inputs


@pytest.mark.parametrize(
    ("function", "uses"),
    [
        (ignores, False),
        (reads, True),
        (passes_on, True),
        (captures, True),
        (overwrites, False),
        (deletes, False),
        (by_another_name, True),
        (sees_all, True),
        (any_number, True),
        (lambda m, x, c, ms: x, False),
        (lambda m, x, c, ms: c, True),
        (Edit().ignores, False),
        (Edit().reads, True),
        (Edit.static, False),
        (Edit(), True),
        (functools.partial(with_more, 2.0), False),
        (functools.partial(with_more_reads, 2.0), True),
        (functools.partial(Edit().reads), True),
        (functools.lru_cache(ignores), True),
        (abs, True),
    ],
)
def test_whether_a_function_may_look_at_its_third_argument(function: Callable[..., Any], uses: bool) -> None:
    assert uses_argument(function, 2) is uses


def test_other_arguments() -> None:
    assert [uses_argument(ignores, i) for i in range(4)] == [True, True, False, False]
    assert not uses_argument(lambda: 0, 0)


def test_save_ctx_is_not_kept_up_for_functions_of_flexmodel() -> None:
    flex = FlexModel(nn.Sequential(nn.Identity()), {})

    def mine(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        save_ctx.seen = 1
        return inputs

    flex.register_forward_hook(HookFunction("0", editing_function=mine))
    native = flex._flex.session.registry.entries[0].hook
    assert not uses_argument(native.editing_function, 2)
    assert mine.__qualname__ in native.describe()
