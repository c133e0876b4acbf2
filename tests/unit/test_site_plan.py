"""Plans of sites: later passes, which execute a plan, do what the first pass did."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_flex as mf
from tests.support.messages import raises

PASSES = 3
FACTOR = 3.0


def tripled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs * FACTOR


def shifted(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + 1


def in_place(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.mul_(FACTOR)


def constant(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return torch.full_like(inputs, 2.0)


def noisy(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + torch.randn_like(inputs) + random.random()


def stops_gradients(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    torch.set_grad_enabled(False)
    return inputs * 2


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def edited(*functions: Any) -> list[mf.HookFunction]:
    return [mf.HookFunction("0:output", editing_function=f, save=False) for f in functions]


def passes(hooks: list[mf.HookFunction], count: int = PASSES) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each pass the output, the gradient of the input, and that of the first layer's weight."""
    net, out = model(), []
    with mf.FlexModel(net) as flex:
        for hook in hooks:
            flex.session.hooks.add(hook)
        for _ in range(count):
            inputs = torch.arange(8.0).view(2, 4).requires_grad_()
            with flex.step():
                found = net(inputs)
                found.sum().backward()
            weight = net[0].weight.grad
            assert inputs.grad is not None
            out.append((found.detach(), inputs.grad, torch.zeros(4, 4) if weight is None else weight.clone()))
            net.zero_grad()
    return out


def name_functions(functions: tuple[Any, ...]) -> str:
    """An id that is the same in every process, which an address is not."""
    return ", ".join(getattr(f, "__name__", None) or str(f) for f in functions)


@pytest.mark.parametrize(
    "functions",
    [
        (tripled,),
        (tripled, shifted),
        (shifted, tripled),
        (in_place,),
        (mf.edits.scale(2.0), tripled),
        (mf.edits.scale(2.0), mf.edits.clamp(-1, 1)),
        (mf.edits.zero(),),
        (constant,),
        (mf.edits.scale(2.0, features=[1, 2]),),
        (stops_gradients,),
    ],
    ids=name_functions,
)
def test_later_passes_are_as_the_first(functions: tuple[Any, ...]) -> None:
    first, *later = passes(edited(*functions))
    for one in later:
        assert all(torch.equal(a, b) for a, b in zip(one, first, strict=True))
    assert torch.is_grad_enabled()


def test_the_order_of_hooks_stays() -> None:
    once = passes(edited(shifted, tripled))[-1][0]
    other = passes(edited(tripled, shifted))[-1][0]
    assert not torch.equal(once, other)


def test_a_cut_edit_goes_on_backward_in_later_passes() -> None:
    """The gradient of the input is zeros, and the layer upstream has none."""
    for _, gradient, weight in passes(edited(constant)):
        assert not gradient.any()
        assert not weight.any()


@pytest.mark.parametrize("function", [noisy, mf.edits.noise(1.0)], ids=["a function", "a preset"])
def test_later_passes_draw_from_streams_of_their_own(function: Any) -> None:
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    first = [out for out, _, _ in passes(edited(function))]
    assert not torch.equal(first[1], first[2])
    torch.manual_seed(6)
    again = [out for out, _, _ in passes(edited(function))]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "whatever the generators are at"
    torch.manual_seed(5)
    random.setstate(before[1])
    passes(edited(function), count=2)
    assert random.getstate() == before[1]


def raises_later(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    raise_later.calls += 1
    if raise_later.calls > 1:
        raise ValueError("in the second pass")
    return inputs * 2


class raise_later:
    calls = 0


def longer(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    raise_later.calls += 1
    return inputs if raise_later.calls < 2 else inputs.double()


@pytest.mark.parametrize(
    ("function", "words"), [(raises_later, ("ValueError",)), (longer, ("torch.float64", "torch.float32"))]
)
def test_an_error_of_a_later_pass_is_raised_at_the_end_of_its_step(
    function: Any, words: tuple[str, ...]
) -> None:
    raise_later.calls = 0
    net, seen = model(), []
    with mf.FlexModel(net) as flex:
        flex.session.hooks.add(*edited(function))
        with flex.step():
            net(torch.ones(2, 4))
        with raises(mf.HookError, "0:output", function.__name__, *words), flex.step():
            seen.append(net(torch.ones(2, 4)))
        assert torch.equal(seen[0], model()(torch.ones(2, 4))), "unedited"


def test_what_changes_between_passes_is_seen() -> None:
    net, inputs = model(), torch.ones(2, 4)
    plain = net(inputs)
    with mf.FlexModel(net) as flex:
        hook = edited(tripled)[0]
        flex.session.hooks.add(hook)

        def run() -> Tensor:
            with flex.step():
                return net(inputs).detach()

        one, two = run(), run()
        assert torch.equal(one, two)
        assert not torch.equal(one, plain)
        flex.session.hooks.add(edited(shifted)[0])
        more = run()
        assert not torch.equal(more, two)
        flex.session.hooks.remove(hook)
        assert not torch.equal(run(), more)
        flex.session.trace(True)
        traced = run()
        flex.session.trace(False)
        assert torch.equal(run(), traced)


@pytest.mark.parametrize("reentrant", [True, False])
def test_replays_get_the_numbers_of_their_passes(reentrant: bool) -> None:
    """One layer runs twice, each time in a region of its own that is recomputed last to first."""
    net = model()
    numbers: list[float] = []

    def draws(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        drawn = torch.rand(())
        numbers.append(float(drawn))
        return inputs * drawn

    with mf.FlexModel(net) as flex:
        flex.session.hooks.add(*edited(draws))
        for _ in range(PASSES):
            numbers.clear()
            with flex.step():
                one = checkpoint(net[0], torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant)
                checkpoint(net[0], one, use_reentrant=reentrant).sum().backward()
            first, second, *replays = numbers
            assert first != second
            assert replays == [second, first]


def test_shapes_and_dims_that_change_have_passes_of_their_own() -> None:
    net = model()
    with mf.FlexModel(net) as flex:
        flex.session.hooks.add(mf.HookFunction("0:output"))
        shapes = [(2, 4), (3, 4), (2, 2, 4), (2, 4)]
        for shape in shapes:
            with flex.step():
                net(torch.ones(shape))
        assert [tuple(t.shape) for t in flex.output_dict["0:output"]] == shapes
