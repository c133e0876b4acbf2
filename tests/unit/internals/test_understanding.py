# ruff: noqa: RET502, RET503, SIM115, RUF034, F841
"""What is seen in the code of an editing function: findings with lines, calls, and whose line raised."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex.layout import replicated
from megatron_flex.runtime.debug.error_origin import find_user_line
from megatron_flex.runtime.function_analysis import computes_only, find_mistakes, unwrap_function
from megatron_flex.runtime.hook_registry import HookEntry
from megatron_flex.sites import Site

VECTOR, SEEN = torch.ones(4), []
FACTOR = 2.0
Free = partial


def told(edit: Any, on_gpu: bool = True, once: bool = False) -> list[tuple[str, str]]:
    """Each finding's first words and the source of its line."""
    function = unwrap_function(edit)
    assert function is not None
    lines = inspect.getsource(inspect.getmodule(told)).splitlines()
    return [(f.text, lines[f.line - 1].strip()) for f in find_mistakes(function, on_gpu, once)]


def bare(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    if save_ctx is None:
        return
    return inputs


def falls_off(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    if save_ctx:
        return inputs
    inputs.add_(1)


def sometimes(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    return inputs if save_ctx else None


def generates(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    yield inputs


async def waits(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    return inputs


def whatever(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    try:
        for row in inputs:
            if row.ndim:
                continue
            return row
        with torch.no_grad():
            while True:
                if save_ctx:
                    return inputs
    except ValueError:
        raise
    finally:
        pass


def chooses(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    match inputs.ndim:
        case 3:
            return inputs
        case _:
            return inputs * 2


def catches(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    try:
        return inputs.view(3)
    except RuntimeError:
        inputs.add_(2)


def leaves_a_context(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    with torch.no_grad():
        inputs.add_(3)


class Callable:
    def __call__(self, module: Any, x: Tensor, save_ctx: Any, modules: Any) -> Any:
        if x.ndim == 3:
            return x


class Layer(nn.Module):
    def forward(self, module: Any, x: Tensor, save_ctx: Any, modules: Any) -> Any:
        if x.ndim == 3:
            return x

    def method(self, module: Any, x: Tensor, save_ctx: Any, modules: Any) -> Any:
        print(x.shape, x)
        return x


def with_strength(
    strength: float, module: Any, inputs: Tensor, save_ctx: Any, modules: Any, more: int = 1
) -> Any:
    if strength:
        return inputs


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (bare, "return"),
        (falls_off, "inputs.add_(1)"),
        (catches, "inputs.add_(2)"),
        (leaves_a_context, "with torch.no_grad():"),
        (sometimes, "return inputs if save_ctx else None"),
        (generates, "def generates(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:"),
        (waits, "async def waits(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:"),
        (Callable(), "if x.ndim == 3:"),
        (Layer(), "if x.ndim == 3:"),
        (partial(with_strength, 2.0), "if strength:"),
        (partial(partial(with_strength, more=3), 2.0), "if strength:"),
        (lambda m, x, c, t: None, "(lambda m, x, c, t: N"),
    ],
)  # fmt: skip
def test_functions_that_can_return_none(edit: Any, line: str) -> None:
    ((_, found),) = told(edit, on_gpu=False)
    assert found.startswith(line[:20])


def test_functions_that_cannot() -> None:
    one, two = (lambda m, x, c, t: x), (lambda m, x, c, t: None)
    assert told(one) == []
    assert len(told(two)) == 1, "of two lambdas in a line the right one"
    assert told(chooses) == []
    assert told(whatever) == []


def synchronous(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    size = inputs.shape[0] + len(inputs) + inputs.numel()
    if size > 3 and inputs.is_cuda and inputs is not None:
        print("fine", size)
    norm = inputs.norm()
    scaled = norm * 2
    save_ctx.norm = scaled.item()
    if scaled > 3:
        return inputs / float(norm)
    kept = inputs.detach().cpu()
    print(kept)
    return inputs


def test_what_a_gpu_would_be_waited_for() -> None:
    lines = [line for _, line in told(synchronous)]
    assert set(lines) == {
        "save_ctx.norm = scaled.item()",
        "kept = inputs.detach().cpu()",
    }
    assert told(synchronous, on_gpu=False) == [], "a CPU computes when it is told to"


def decides(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    total = inputs.sum()
    if total > 3:
        return inputs / float(inputs.norm())
    return inputs * (total > -(10**6))


def normalizes(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    SEEN.append(1)
    return modules["norm"](inputs) * torch.rand(())


SITE = Site("0:output", replicated("b", "h"), (2, 4))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_what_a_trial_sees_a_gpu_be_waited_for() -> None:
    with mf.FlexModel(network()) as flex:
        for on_gpu in (False, True):
            flex.session.hooks.trials.on_gpu = on_gpu  # of a model on a CPU, which has nothing to wait for
            entry = HookEntry(mf.HookFunction("0:output", editing_function=decides), sites=[SITE])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                flex.session.hooks.trials.consider(entry)
            lines = inspect.getsource(inspect.getmodule(told)).splitlines()
            places = {lines[w.lineno - 1].strip() for w in caught}
            assert places <= {"if total > 3:", "return inputs / float(inputs.norm())"}
            assert ("if total > 3:" in places) == on_gpu


def test_a_trial_leaves_generators_and_buffers() -> None:
    norm = nn.BatchNorm1d(4)
    with mf.FlexModel(network()) as flex:
        entry = HookEntry(mf.HookFunction("0:output", editing_function=normalizes), sites=[SITE])
        torch.manual_seed(3)
        state, mean = torch.get_rng_state(), norm.running_mean
        SEEN.clear()
        assert not flex.session.hooks.trials.all([entry], {SITE.name: SITE}, nn.ModuleDict({"norm": norm}))
        assert SEEN == [1], "it ran"
        assert torch.equal(torch.get_rng_state(), state)
        assert mean is norm.running_mean
        assert torch.equal(mean, torch.zeros(4))


def collective(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Any:
    total = inputs.sum()
    torch.distributed.all_reduce(total)
    dist.broadcast(total, 0)
    return inputs * dist.get_world_size()


def test_collectives() -> None:
    found = told(collective, on_gpu=False)
    assert sorted(line for _, line in found) == [
        "dist.broadcast(total, 0)",
        "torch.distributed.all_reduce(total)",
    ]
    assert all(text for text, _ in found)
    assert len(told(collective, on_gpu=False, once=True)) == len(found)


# -- functions that only compute ---------------------------------------------------------------------


def computes(module: Any, inputs: Tensor, save_ctx: Any, modules: Any, strength: float = 2.0) -> Tensor:
    """Of all kinds."""
    x = inputs.clone()
    x[0] = 0
    x[..., -1] += 1
    y = x.view(-1, 4) @ torch.ones(4, 4).T
    for n in range(3):
        y = y + n * FACTOR
    if y.ndim != 2:
        raise ValueError("no")
    y.clamp_(max=strength)
    return torch.where(y.view_as(inputs) > 0, inputs, -inputs).to(inputs.dtype)


def adds(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + VECTOR * torch.linalg.norm(inputs, dim=-1, keepdim=True).to(VECTOR.dtype)


COMPUTES = [
    computes,
    adds,
    lambda m, x, c, t: x * FACTOR,
    lambda m, x, c, t: x.mul_(2),
    lambda m, x, c, t: (y := x),
    partial(computes, strength=3.0),
]


def store(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    c.mean = x.mean()
    return x


def uses(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    return t["adapter"](x)


def asks(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    return x * m.config.factor


def counts(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    global FACTOR
    FACTOR += 1
    return x


def appends(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    SEEN.append(x)
    return x


def default(m: Any, x: Tensor, c: Any, t: Any, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
    seen.append(x)
    return x


def alias(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    y = VECTOR
    y += 1
    return x


def alias_by_a_method(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    y = VECTOR.expand_as(x)
    y.add_(1)
    return x


def alias_sometimes(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    y = x
    if x.ndim == 4:
        y = VECTOR
    y[0] = 0
    return x


def row_of_another(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    for row in VECTOR:
        row.add_(1)
    return x


class Counting:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.count = 0

    def appends(self, m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
        self.seen.append(x)
        return x

    def __call__(self, m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
        self.count += 1
        return x


def nested(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    def inner() -> None:
        SEEN.append(1)

    inner()
    return x


def endless(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    while x.ndim:
        pass
    return x


def with_stars(*args: Any) -> Tensor:
    return args[1]


def bound(seen: list[Any], m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    seen.append(x)
    return x


OTHERS = [
    *(store, uses, asks, counts, appends, default, alias, alias_by_a_method, alias_sometimes, row_of_another),
    *(Counting().appends, Counting(), nested, endless, with_stars, collective, partial(bound, []), generates),
    lambda m, x, c, t: VECTOR.add_(1) + x,
    lambda m, x, c, t: torch.add(x, 1, out=VECTOR),
    lambda m, x, c, t: torch.nn.functional.relu(VECTOR, inplace=True) + x,
    lambda m, x, c, t: VECTOR.__iadd__(1) + x,
    lambda m, x, c, t: torch.relu_(VECTOR) + x,
    lambda m, x, c, t: VECTOR.data.add_(1) + x,
    lambda m, x, c, t: x if torch.manual_seed(0) else x,
    lambda m, x, c, t: torch.save(x, "file") or x,
    lambda m, x, c, t: x if open("file", "w") else x,
    lambda m, x, c, t: x.register_hook(SEEN.append) and x,
    lambda m, x, c, t: helper(x),
    Layer().method,
]


def helper(x: Tensor) -> Tensor:
    SEEN.append(x)
    return x


@pytest.mark.parametrize("edit", COMPUTES, ids=lambda e: getattr(e, "__name__", "partial"))
def test_what_only_computes(edit: Any) -> None:
    assert computes_only(edit)


@pytest.mark.parametrize("edit", OTHERS, ids=lambda e: getattr(e, "__qualname__", type(e).__name__))
def test_what_is_not(edit: Any) -> None:
    assert not computes_only(edit)


# -- whose line --------------------------------------------------------------------------------------


def inside_torch(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    net = nn.Sequential(nn.Linear(3, 3))
    return net(x)  # here


def deeper(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    return wrong(x)


def wrong(x: Tensor) -> Tensor:
    return x @ x.new_ones(7)  # here


class Failing(nn.Module):
    def forward(self, m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
        return wrong(x)


def elsewhere(m: Any, x: Tensor, c: Any, t: Any) -> Tensor:
    from tests.support import moe

    return moe.knows(x)


@pytest.mark.parametrize(
    "edit",
    [inside_torch, deeper, Failing(), partial(deeper), lambda m, x, c, t: x @ x.new_ones(7)],  # here
)
def test_the_line_is_the_persons(edit: Any) -> None:
    with pytest.raises(RuntimeError) as told:
        _like_ours(edit)
    found = find_user_line(told.value)
    assert found is not None
    assert found[0] == __file__
    lines = inspect.getsource(inspect.getmodule(_like_ours)).splitlines()
    assert lines[found[1] - 1].endswith("# here")


def _like_ours(edit: Any) -> None:
    from megatron_flex import edits

    edits.chain(edit)(None, torch.ones(2, 4), None, None)


def test_a_line_in_a_file_elsewhere() -> None:
    with pytest.raises(AttributeError) as told:
        elsewhere(None, torch.ones(2), None, None)
    assert find_user_line(told.value)[0] in (
        __file__,
        __file__.replace("unit/internals/test_understanding", "support/moe"),
    )
