"""Compiled models: hooks run, values and gradients are right, and afterwards compiled code runs as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import megatron_flex as mf
from tests.support import llama

EDIT = "layers.1:output"


@pytest.fixture(autouse=True)
def compiling() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


class Counting:
    """A backend that counts what it compiles and what of that runs."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph.forward(*args)

        return run


def whole(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def parts(model: nn.Module, backend: Any) -> nn.Module:
    """Layer by layer, as people do to compile less; one in place."""
    model.layers["0"] = torch.compile(model.layers["0"], backend=backend)
    model.layers["1"].compile(backend=backend)
    model.layers["2"] = torch.compile(model.layers["2"], backend=backend)
    return model


WAYS = [whole, in_place, parts]


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = llama.batch(0)
    model.zero_grad()
    loss = llama.loss_of(model(tokens), labels)
    loss.backward()
    named = {n.replace("_orig_mod.", ""): p.grad.clone() for n, p in model.named_parameters()}
    return loss.detach(), named


def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return llama.mixed(inputs)


@pytest.mark.parametrize(
    ("way", "backend", "warm"),
    [(whole, "aot_eager", True), (whole, "eager", False), (in_place, "eager", True), (parts, "eager", True)],
)
def test_hooks_in_a_compiled_model(way: Any, backend: str, warm: bool) -> None:
    truth = llama.truth()[0]
    model = way(llama.single(), backend)
    if warm:
        plain = step(model)
    hooks = [mf.HookFunction(s, hook_type=kind) for s in llama.SITES for kind in ("forward", "tensor")]
    with mf.attach(model, hooks) as flex:
        loss, _ = step(model)
        torch.testing.assert_close(loss, truth["loss"])
        for site in llama.SITES:
            torch.testing.assert_close(flex.output_dict[site][0], truth["values"][site])
            torch.testing.assert_close(flex.output_dict[f"{site}.grad"][0], truth["gradients"][site])
    with mf.attach(model, [mf.HookFunction(EDIT, editing_function=edit, save=False)]):
        torch.testing.assert_close(step(model), truth["edited"][EDIT])
    after = step(model)
    torch.testing.assert_close(after, (truth["loss"], truth["parameter gradients"]))
    if warm:
        assert torch.equal(after[0], plain[0])
        assert all(torch.equal(after[1][n], plain[1][n]) for n in plain[1])


@pytest.mark.parametrize("way", WAYS)
def test_only_parts_with_hooks_run_uncompiled(way: Any) -> None:
    backend = Counting()
    model = way(llama.single(), backend)
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    step(model)
    compiled, ran = backend.compiled, backend.ran
    assert compiled
    with mf.FlexModel(model) as flex:
        step(model)
        assert backend.ran == 2 * ran, "no hook, no difference"
        flex.register_forward_hook(mf.HookFunction(EDIT))
        step(model)
        inside = 2 * ran + (2 * ran // 3 if way is parts else 0)  # two layers have no hook
        assert backend.ran == inside
        assert len(flex.output_dict[EDIT]) == 1
    step(model)
    assert backend.ran == inside + ran
    assert backend.compiled == compiled, "nothing is compiled anew"
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()


def test_gradients_of_parameters_and_trainable_modules() -> None:
    model = whole(llama.single(), "eager")
    step(model)
    weight = "layers.0.attention.wq.weight"
    with mf.attach(model, [mf.HookFunction(weight, hook_type="tensor")]) as flex:
        _, gradients = step(model)
        assert torch.equal(flex.output_dict[f"{weight}.grad"][0], gradients[weight])
        assert torch.equal(flex.get_module_parameter(weight), llama.single().get_parameter(weight))
        _, cache = flex.interp.run_with_cache(llama.batch(0)[0], "layers.1")
    torch.testing.assert_close(cache["layers.1"], llama.truth()[0]["values"][EDIT])


@pytest.mark.parametrize("warm", [True, False])
def test_a_compiled_function_that_calls_the_model(warm: bool) -> None:
    model, truth = llama.single(), llama.truth()[0]
    tokens, labels = llama.batch(0)
    run = torch.compile(lambda: llama.loss_of(model(tokens), labels), backend="eager")
    if warm:
        run()
    for _ in range(2):
        with mf.attach(model, [mf.HookFunction(EDIT), mf.HookFunction(EDIT, hook_type="tensor")]) as flex:
            run().backward()
            torch.testing.assert_close(flex.output_dict[EDIT][0], truth["values"][EDIT])
            torch.testing.assert_close(flex.output_dict[f"{EDIT}.grad"][0], truth["gradients"][EDIT])
        torch.testing.assert_close(run(), truth["loss"])
    with mf.attach(model, [mf.HookFunction(EDIT, editing_function=edit, save=False)]):
        torch.testing.assert_close(run(), truth["edited"][EDIT][0])
    torch.testing.assert_close(run(), truth["loss"])
    assert "forward" not in vars(model)
