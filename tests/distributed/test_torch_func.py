"""Transforms of torch.func over a model with hooks: edits are transformed with it, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import edits
from tests.support import ranks
from tests.support.gpt import Case
from tests.support.messages import raises
from tests.support.pool import run

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
Model = Callable[[Tensor], Tensor]


def loss(f: Model) -> Model:
    return lambda z: f(z).square().sum()


TRANSFORMS: dict[str, Callable[[Model], Any]] = {
    "grad": lambda f: torch.func.grad(loss(f))(X),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,))[1],
    "vjp": lambda f: torch.func.vjp(f, X)[1](torch.ones(3, 2))[0],
    "vmap": lambda f: torch.func.vmap(f)(X),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(loss(f)))(X),
    "hessian": lambda f: torch.func.hessian(loss(f))(X[0]),
}


def double(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def double_in_place(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.mul_(2)


@mf.local()
def double_locally(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * 2


def keep(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.stream = inputs
    return inputs


def detach(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.detach() * 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "edit",
    [double, double_in_place, double_locally, edits.scale(2.0), detach],
    ids=["function", "in place", "local", "preset", "detached"],
)
def test_an_edit_is_transformed_with_the_model(transform: str, edit: Any) -> None:
    model = build()

    def plain(z: Tensor) -> Tensor:
        hidden = model[1](model[0](z))
        return model[2](2 * (hidden.detach() if edit is detach else hidden))

    want = TRANSFORMS[transform](plain)
    hook = mf.HookFunction("1", editing_function=edit, save=False)
    with mf.attach(model, [hook]):
        for _ in range(2):  # the first pass is planned, the second runs the plan
            assert torch.allclose(TRANSFORMS[transform](model), want)


def test_gradients_of_parameters_for_each_sample() -> None:
    model = build()
    parameters = dict(model.named_parameters())

    def of_sample(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (sample,)).square().sum()

    with mf.attach(model, [mf.HookFunction("1", editing_function=double, save=False)]):
        each = torch.func.vmap(torch.func.grad(of_sample), in_dims=(None, 0))(parameters, X)
        model(X).square().sum().backward()
    for name, parameter in parameters.items():
        assert torch.allclose(each[name].sum(0), parameter.grad, atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "capture": ({}, ("1", "torch.func")),
    "edit that captures": ({"editing_function": double}, ("1", "save=False")),
    "gradient": ({"hook_type": "full_backward"}, ("1", "backward()")),
    "one rank": ({"editing_function": double, "save": False, "run": "once"}, ("1", "run='once'")),
    "shared value": ({"editing_function": keep, "save": False}, ("1", "save_ctx")),
}


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_transform_cannot_have_is_refused_at_the_call(what: str, transform: str) -> None:
    model, (options, named) = build(), REFUSED[what]
    with mf.attach(model, [mf.HookFunction("1", **options)]) as flex:
        with raises(mf.HookError, transform, *named):
            TRANSFORMS[transform](model)
        with raises(mf.HookError, transform, *named), flex.step():
            TRANSFORMS[transform](model)
        model(X).sum().backward()  # the model is as before
        assert all(t.shape == (3, 4) for tensors in flex.output_dict.values() for t in tensors)


def test_sinks_and_trainable_modules_are_refused(tmp_path: Path) -> None:
    model = build()
    with (
        mf.attach(model, dumps=mf.Dump(tmp_path / "dump", ["1"])),
        raises(mf.HookError, "vmap", "torch.func"),
    ):
        TRANSFORMS["vmap"](model)
    with mf.attach(model, [mf.HookFunction("1", editing_function=double, save=False)]) as flex:
        flex.register_trainable_module("probe", nn.Linear(4, 4))
        with raises(mf.HookError, "grad", "backward()"):
            TRANSFORMS["grad"](model)


def on_two_ranks(case: Case) -> str:
    chunks = ranks.start(case)
    hook = mf.HookFunction("decoder.layers.0", editing_function=double, save=False)
    with mf.attach(chunks, [hook]):
        with raises(mf.HookError, "grad", "tp=2", "torch.func") as raised:
            torch.func.grad(lambda z: z.sum() * ranks.call(chunks).sum())(X)
        assert ranks.call(chunks).isfinite().all()
    return str(raised.value)


def test_an_edit_with_collectives_is_refused_on_all_ranks() -> None:
    pytest.importorskip("megatron.core")
    first, second = run(2, on_two_ranks, Case("tp2", tp=2, layers=1))
    assert first == second
