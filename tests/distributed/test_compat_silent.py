"""Where the FlexModel of 2023 failed silently: the right result, or an error on every rank."""

from __future__ import annotations

import os
import random
import threading
from argparse import Namespace
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_flex.compat import FlexModel, HookFunction
from tests.distributed import matrix
from tests.support import compat, gpt, oracle, ranks, truths
from tests.support import compat_plain as plain
from tests.support.gpt import Case
from tests.support.messages import assert_names
from tests.support.pool import run

Pair = namedtuple("Pair", ["label", "hidden"])


@dataclass
class Record:
    hidden: Tensor
    cache: Any = None


MAKES = {
    "dict": lambda t: {"n": 1, "hidden": t},
    "dataclass": lambda t: Record(t, (None,)),
    "named tuple": lambda t: Pair("label", t),
    "nested": lambda t: [None, {"x": Record(t)}],
}


class Gives(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, inputs: Tensor) -> Any:
        return self.make(inputs)


class Caller(nn.Module):
    """Calls its part by keyword, and hands on what that gives."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, inputs: Tensor) -> Any:
        return self.part(inputs=inputs)


@pytest.mark.parametrize("kind", MAKES)
def test_outputs_that_are_no_tuple(kind: str) -> None:
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(Caller(Gives(MAKES[kind])), output)
    flex.register_forward_hook(HookFunction("part", editing_function=plain.edit))
    inputs = plain.data()
    made = flex(inputs)
    assert type(made) is type(MAKES[kind](inputs))
    found = {
        "dict": lambda: made["hidden"],
        "dataclass": lambda: made.hidden,
        "named tuple": lambda: made.hidden,
        "nested": lambda: made[1]["x"].hidden,
    }[kind]()
    assert torch.equal(found, plain.mix(inputs))
    assert torch.equal(output["part"][0], inputs)


def test_modules_that_are_called_by_keyword() -> None:
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(Caller(Gives(lambda t: t)), output)
    flex.register_forward_pre_hook(HookFunction("part", editing_function=plain.edit))
    inputs = plain.data()
    assert torch.equal(flex(inputs), plain.mix(inputs))
    assert torch.equal(output["part"][0], inputs)


TP2 = Case("tp2 sp", tp=2, sp=True, layers=2)


def layers(case: Case, state: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    chunks = compat.start(case, state)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    flex.register_forward_pre_hook(HookFunction("decoder.layers.1"))
    flex.register_forward_hook(HookFunction("module.decoder.layers.1"))
    gpt.step(case, chunks, 0)
    return output


def test_megatrons_layers_which_are_called_by_keyword() -> None:
    pytest.importorskip("megatron.core")
    points = ["decoder.layers.1:input", "decoder.layers.1:output"]
    truth = truths.of(TP2.single(), points, [])
    first, second = run(2, layers, TP2, truth["state"])
    for name, point in zip(first, points, strict=True):
        for got, want in zip(first[name], truth["values"][point], strict=True):
            assert matrix.relative(got, want) <= matrix.BOUND
    assert all(map(torch.equal, second["decoder.layers.1"], first["decoder.layers.1"]))


# -- recomputation -----------------------------------------------------------------------------------


def counting(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    """Another edit at every call, by what save_ctx holds."""
    save_ctx.count = getattr(save_ctx, "count", 0) + 1
    save_ctx.seen = [*getattr(save_ctx, "seen", []), float(inputs.detach().sum())]
    return inputs * save_ctx.count + len(save_ctx.seen)


def keeping(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    save_ctx.kept = inputs * 2
    return inputs


def using(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + save_ctx.kept


STATEFUL = {
    "decoder.layers.0.mlp.linear_fc1:output": counting,
    "decoder.layers.1.mlp:input": keeping,
    "decoder.layers.1.mlp:output": using,
    "decoder.layers.1:output": counting,
}


def remembered(case: Case) -> dict[str, Any]:
    """The same functions in one process, without recomputation."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0])
    context = Namespace()
    for site, function in STATEFUL.items():
        oracle.install(chunks[0], site, lambda t, f=function: f(None, t, context, None))
    losses = [gpt.step(case, chunks, 0) for _ in range(2)]
    return {"state": state, "losses": losses, "grads": {n: p.grad for n, p in chunks[0].named_parameters()}}


def stateful(case: Case, state: dict[str, Tensor]) -> dict[str, Any]:
    chunks = compat.start(case, state)
    output: dict[str, list[Tensor]] = {}
    flex = compat.wrap(case, chunks, output)
    for site, function in STATEFUL.items():
        name, _, point = site.partition(":")
        register = flex.register_forward_hook if point == "output" else flex.register_forward_pre_hook
        register(HookFunction(name, editing_function=function))
    mesh = flex._flex.session.mesh
    losses = [gpt.step(case, chunks, 0) for _ in range(2)]
    return {
        "coords": mesh.coords,
        "sizes": mesh.sizes,
        "dp": 0,
        "losses": losses,
        "grads": matrix._gradients(flex._flex, chunks),
        "counts": {n: len(t) for n, t in output.items()},
        "count": (flex.save_ctx.count, len(flex.save_ctx.seen)),
    }


@pytest.mark.parametrize("recompute", [(), ("full",)], ids=["", "recomputed"])
def test_recomputation_in_megatron_replays_what_save_ctx_held(recompute: tuple[str, ...]) -> None:
    pytest.importorskip("megatron.core")
    case = replace(TP2, recompute=recompute)
    (truth,) = run(1, remembered, case.single())
    answers = run(2, stateful, case, truth["state"])
    steps = 2 * case.microbatches
    for answer in answers:
        assert answer["count"] == (2 * steps, 2 * steps)
        assert np.allclose(answer["losses"], truth["losses"], rtol=1e-5)
    assert answers[0]["counts"] == {  # what is replayed is kept once
        "decoder.layers.0.mlp.linear_fc1": steps,
        "decoder.layers.1.mlp": 2 * steps,
        "decoder.layers.1": steps,
    }
    found = matrix.whole_gradients(answers, lambda a: a["grads"])
    for name, grad in truth["grads"].items():
        assert matrix.relative(found[name], grad) <= 1e-4, name


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks, self.reentrant = plain.model(), reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                inputs = block(inputs)
            else:
                inputs = checkpoint(block, inputs, use_reentrant=self.reentrant)
        return inputs


def replayed(reentrant: bool | None) -> dict[str, Any]:
    root, output = Checkpointed(reentrant), {}
    flex = FlexModel(root, output)
    for name in ("blocks.0.fc1", "blocks.1"):
        flex.register_forward_hook(HookFunction(name, editing_function=counting))
    for _ in range(2):
        (flex(plain.data().requires_grad_()) ** 2).sum().backward()
    grads = {n: p.grad for n, p in root.named_parameters()}
    return {"grads": grads, "counts": {n: len(t) for n, t in output.items()}, "count": flex.save_ctx.count}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_plain_modules_replays_what_save_ctx_held(reentrant: bool) -> None:
    got, want = replayed(reentrant), replayed(None)
    assert got["counts"] == want["counts"] == {"blocks.0.fc1": 2, "blocks.1": 2}
    assert got["count"] == want["count"] == 4
    assert all(torch.allclose(got["grads"][n], g, rtol=1e-5) for n, g in want["grads"].items())


# -- random numbers ----------------------------------------------------------------------------------


def noisy(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    noise = torch.randn(inputs.shape) + random.random() + float(np.random.rand())
    save_ctx.noise = [*getattr(save_ctx, "noise", []), float(noise.sum())]
    return inputs + 0.1 * noise


def drawing(case: Case) -> tuple[list[float], list[float]]:
    chunks = compat.start(case)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    flex = compat.wrap(case, chunks, {})
    flex.register_forward_hook(HookFunction("decoder.layers.0", editing_function=noisy))
    return flex.save_ctx, gpt.step(case, chunks, ranks.mine(chunks))


@pytest.mark.parametrize("case", [TP2, Case("dp2", dp=2, layers=2)], ids=lambda c: c.name)
def test_random_numbers_are_the_same_on_all_ranks(case: Case) -> None:
    pytest.importorskip("megatron.core")
    (first, losses), (second, others) = run(2, drawing, case)
    assert first.noise == second.noise
    assert len(set(first.noise)) == case.microbatches
    if case.tp > 1:
        assert losses == others


# -- gradients that are not there at first -----------------------------------------------------------


class Sometimes(nn.Module):
    """At its first call its part's output does not count for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.calls = plain.Block(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.part(inputs)
        self.calls += 1
        return inputs * 2 if self.calls == 1 else inputs * 2 + made


def late() -> list[Any]:
    output: dict[str, list[Tensor]] = {}
    torch.manual_seed(0)
    flex = FlexModel(Sometimes(), output, data_parallel_size=2, divide_gradients_by_dp=False)
    flex.register_full_backward_hook(HookFunction("part.fc1", editing_function=plain.edit))
    mine = plain.data().chunk(2)[dist.get_rank()]
    for _ in range(2):
        inputs = mine.clone().requires_grad_()
        plain.loss_of(flex(inputs), 6).backward()
    return [output.get("part.fc1", []), inputs.grad]


def test_a_first_gradient_that_is_none() -> None:
    torch.manual_seed(0)
    model, seen = Sometimes(), []

    def look(_module: Any, grads: Any, _out: Any) -> Any:
        seen.append(grads[0])
        return (plain.mix(grads[0]),)

    model.part.fc1.register_full_backward_hook(look)
    for _ in range(2):
        inputs = plain.data().requires_grad_()
        plain.loss_of(model(inputs), 6).backward()
    (want,), whole = seen, inputs.grad
    first, second = run(2, late)
    (got,) = first[0]
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.allclose(torch.cat([first[1], second[1]]), whole, atol=1e-6)


# -- ranks that differ -------------------------------------------------------------------------------


def lonely(case: Case) -> str:
    from megatron_flex.config import flex_config

    flex_config.agree_seconds = 3
    chunks = compat.start(case)
    flex = compat.wrap(case, chunks, {})
    if dist.get_rank() == 1:
        flex.register_forward_hook(HookFunction("decoder.layers.0", editing_function=compat.edit))
    try:
        ranks.call(chunks, model=flex)
        ranks.call(chunks, model=flex)
    except ValueError as error:
        return str(error)
    return ""


def test_a_hook_on_one_rank_only_is_an_error_on_all() -> None:
    pytest.importorskip("megatron.core")
    for said in run(2, lonely, TP2):
        assert_names(said, "rank 0", "rank 1")


# -- what stays behind -------------------------------------------------------------------------------


def _open() -> tuple[int, int, int]:
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def wrapping(case: Case | None) -> list[tuple[int, int, int]]:
    if case is None:
        root: Any = plain.model()
        call = lambda flex: flex(plain.data())  # noqa: E731
        make = lambda: FlexModel(root, {}, data_parallel_size=2)  # noqa: E731
        name = "0.fc1"
    else:
        chunks = compat.start(case)
        call = lambda flex: ranks.call(chunks, model=flex)  # noqa: E731
        make = lambda: compat.wrap(case, chunks, {})  # noqa: E731
        name = "decoder.layers.0"
    found = []
    for _ in range(20):
        flex = make()
        flex.register_forward_hook(HookFunction(name, editing_function=plain.edit))
        call(flex)
        flex.restore()
        del flex
        found.append(_open())
    return found


@pytest.mark.parametrize("case", [TP2, None], ids=["megatron", "plain"])
def test_nothing_grows_over_twenty_wraps(case: Case | None) -> None:
    if case is not None:
        pytest.importorskip("megatron.core")
    for found in run(2, wrapping, case):
        assert found[-1] == found[2], "process groups, threads, file descriptors"


# -- one module, two uses ----------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = nn.Linear(10, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.part(self.part(inputs).tanh())


@cache
def twice() -> tuple[FlexModel, dict[str, list[Tensor]]]:
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(Twice(), output)
    flex.register_forward_hook(HookFunction("part"))
    for count in (6, 3):
        flex(plain.data(count))
    return flex, output


def test_one_module_used_twice_is_kept_in_the_order_of_its_calls() -> None:
    flex, output = twice()
    part = flex.module.part
    wanted = []
    for count in (6, 3):
        first = nn.functional.linear(plain.data(count), part.weight, part.bias)
        wanted += [first, nn.functional.linear(first.tanh(), part.weight, part.bias)]
    assert len(output["part"]) == 4
    assert all(torch.equal(a, b) for a, b in zip(output["part"], wanted, strict=True))


def test_what_is_kept_is_a_copy() -> None:
    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(nn.Sequential(nn.Identity()), output)
    flex.register_forward_hook(HookFunction("0"))
    inputs = plain.data()
    flex(inputs)
    before = inputs.clone()
    inputs.zero_()
    assert torch.equal(output["0"][0], before)


def test_memory_stays_flat_where_output_ptr_is_cleared() -> None:
    import gc

    output: dict[str, list[Tensor]] = {}
    flex = FlexModel(plain.model(), output)
    flex.register_forward_hook(HookFunction("0.fc1"))
    flex.register_full_backward_hook(HookFunction("1.fc1", editing_function=plain.edit))

    def held() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    counts = []
    for _ in range(8):
        flex(plain.data()).sum().backward()
        assert {n: len(t) for n, t in output.items()} == {"0.fc1": 1, "1.fc1": 1}
        output.clear()
        counts.append(held())
    assert len(set(counts[2:])) == 1
    assert os.environ.get("FLEXMODEL_DEBUG") is None
