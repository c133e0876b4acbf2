"""Layers that no rule knows: a shard is never handed out as the full tensor, on any rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from tests.support import gpt, handmade
from tests.support.gpt import Case
from tests.support.handmade import IN, SAMPLES, TOKENS, WIDE
from tests.support.messages import assert_names
from tests.support.oracle import edit as mix
from tests.support.pool import run

Steps = dict[str, str]


def mixed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return mix(inputs)


def told(act: Callable[[], Any]) -> str:
    try:
        act()
    except mf.FlexError as error:
        return str(error)
    return ""


def losses(model: Any, x: Tensor) -> Tensor:
    return (model(x) ** 2).sum()


# -- a column-parallel linear that is written by hand --------------------------------------------------


def by_hand(tp: int) -> Any:
    """What is said of each hook without a shape; whether the edit ran; and what is read where ranks agree."""
    model = handmade.parallel(tp)
    x = handmade.batch(dist.get_rank() // tp).requires_grad_()
    edited: list[tuple[int, ...]] = []

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        edited.append(tuple(inputs.shape))
        return mix(inputs)

    wrong = {
        "read": mf.HookFunction("up"),
        "input": mf.HookFunction("down", hook_type="forward_pre"),
        "gradient": mf.HookFunction("up", hook_type="full_backward_pre"),
        "edit": mf.HookFunction("up", editing_function=edit),
        "once": mf.HookFunction("up", editing_function=edit, run="once"),
        "preset": mf.HookFunction("act", editing_function=mf.edits.scale(2.0)),
        "gradient edit": mf.HookFunction("up", edit, hook_type="full_backward_pre"),
        "parameter": mf.HookFunction("up.weight", hook_type="tensor"),
    }
    out: Steps = {}
    for name, hook in wrong.items():
        flex = mf.attach(model, [hook], tensor_parallel_size=tp)
        out[name] = told(lambda f=flex: losses(f, x).backward())
        out[f"{name}, again"] = told(lambda f=flex: losses(f, x).backward())
        flex.session.close()
    right = [
        mf.HookFunction("up", expected_shape=(None, None, WIDE)),
        mf.HookFunction("norm", editing_function=mixed),
        mf.HookFunction("down", hook_type="full_backward_pre"),
        mf.HookFunction("norm.weight", hook_type="tensor"),
    ]
    with mf.attach(model, right, tensor_parallel_size=tp) as flex:
        out["right"] = told(lambda: [losses(flex, x).backward() for _ in range(2)])
        read = {n: tuple(t[0].shape) for n, t in flex.output_dict.items()}
    return out, edited, read, flex.is_leader


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2), (4, 4)])
def test_a_shard_without_a_shape_is_an_error_on_all_ranks(world: int, tp: int) -> None:
    places = {
        "read": "up:output",
        "input": "down:input",
        "gradient": "up:output",
        "edit": "up:output",
        "once": "up:output",
        "preset": "act:output",
        "gradient edit": "up:output",
        "parameter": "up.weight.grad",
    }
    for out, edited, read, leader in run(world, by_hand, tp):
        assert out.pop("right") == ""
        assert edited == [], "no edit saw a shard"
        for name, said in out.items():
            place = places[name.removesuffix(", again")]
            assert_names(said, place, "expected_shape", "docs/contributing/extend.md")
        if leader:
            assert read["up:output"] == (TOKENS, SAMPLES, WIDE)
            assert read["norm:output"] == (TOKENS, SAMPLES, IN)


class Open(nn.Module):
    """A column-parallel linear that leaves each rank its own share of the gradient of what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (dist.get_rank() + 1)


def backward(scope: bool) -> Steps:
    model, x = nn.Sequential(nn.Identity(), Open()), torch.arange(8.0).reshape(2, 4).requires_grad_()
    hooks = {
        "read": mf.HookFunction("0", hook_type="full_backward_pre"),
        "edit": mf.HookFunction("0", mixed, hook_type="full_backward_pre"),
    }
    out = {}
    for name, hook in hooks.items():
        flex = mf.attach(model, [hook], tensor_parallel_size=2)

        def step(flex: Any = flex) -> None:
            if scope:
                with flex.step():
                    losses(flex, x).backward()
            else:
                losses(flex, x).backward()

        out[name], out[f"{name}, again"] = told(step), told(step)
        flex.session.close()
    return out


@pytest.mark.parametrize("scope", [False, True])
def test_a_gradient_that_each_rank_has_a_share_of(scope: bool) -> None:
    for out in run(2, backward, scope):
        for said in out.values():
            assert_names(said, "0:output.grad")


class Halves(nn.Module):
    """Parts of one shape; at first they are zeros, as what an adapter of low rank returns."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[dist.get_rank()] * self.factor


def later() -> Steps:
    model = nn.Sequential(Halves(), nn.Identity())
    out = {}
    with mf.FlexModel(model, tensor_parallel_size=2) as flex:
        flex.register_forward_hook(mf.HookFunction("0"))
        x = torch.arange(8.0).reshape(2, 4)
        out["zeros"] = told(lambda: flex(x))
        model[0].factor = 1.0
        out["parts"] = told(lambda: flex(x))
        flex.session.registry.clear()
    return out


def test_zeros_prove_nothing() -> None:
    for out in run(2, later):
        assert out["zeros"] == ""
        assert_names(out["parts"], "0:output")


class Sums(nn.Module):
    """A row-parallel linear without its reduction: each rank's partial sum has the shape of the full one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (dist.get_rank() + 1)


def recorded(what: str, folder: str) -> str:
    kind = mf.Dump if what == "dumps" else mf.Statistics
    model = nn.Sequential(Sums(), nn.Identity())
    flex = mf.attach(model, tensor_parallel_size=2, **{what: kind(folder, ["0"])})
    said = told(lambda: flex(torch.ones(2, 4)))
    flex.session.close(failed=True)
    return said


@pytest.mark.parametrize("what", ["dumps", "statistics"])
def test_what_is_recorded_is_compared_in_the_first_step(what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for said in run(2, recorded, what, f"{folder}/out"):
            assert_names(said, "0:output")


class Dropped(nn.Module):
    """The full tensor on each rank, of which each drops other entries."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return x * (torch.rand(x.shape, generator=generator) > 0.5)


def dropped() -> tuple[str, str, list[Tensor], Tensor]:
    model, x = nn.Sequential(Dropped(), nn.Identity()), torch.arange(1.0, 9.0).reshape(2, 4)
    flex = mf.attach(model, [mf.HookFunction("0")], tensor_parallel_size=2)
    without = told(lambda: flex(x))
    flex.session.close()
    hooks = [
        mf.HookFunction("0", expected_shape=(None, None)),
        mf.HookFunction("1", mixed, expected_shape=(None, None)),
        mf.HookFunction("0", expected_shape=(None, None), hook_type="full_backward_pre"),
    ]
    with mf.attach(model, hooks, tensor_parallel_size=2) as flex:
        y = flex(x.requires_grad_())
        said = told(lambda: y.square().sum().backward())
        return without, said, [t for ts in flex.output_dict.values() for t in ts], y.detach()


def test_ranks_may_differ_where_a_person_says_so() -> None:
    answers = run(2, dropped)
    x = torch.arange(1.0, 9.0).reshape(2, 4)
    for rank, (without, said, read, y) in enumerate(answers):
        assert_names(without, "expected_shape=(None, None)")
        assert said == ""
        own = x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(rank)) > 0.5)
        torch.testing.assert_close(y, mix(own))
        if read:
            torch.testing.assert_close(read[0], own)


# -- parallel modules in a model that is not known as a whole ------------------------------------------


class Stream(nn.Module):
    """Layers of Megatron's on a residual stream, in a model that is not Megatron's."""

    def __init__(self, inner: nn.Module, *args: Any) -> None:
        super().__init__()
        self.inner, self.args = inner, args
        self.embed = nn.Embedding(gpt.VOCABULARY, gpt.HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        out = self.inner(self.embed(tokens), *self.args)
        return (out[0] if isinstance(out, tuple) else out).mean()


def _mlp(case: Case) -> tuple[nn.Module, dict[str, tuple[int | None, ...]]]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return Stream(MLP(gpt.config(case), linears)), {"inner.linear_fc1": (None, None, 2 * gpt.FFN)}


def _block(case: Case) -> tuple[nn.Module, dict[str, tuple[int | None, ...]]]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    mask = torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE).triu(1).bool()
    places = {"inner.layers.0.mlp.linear_fc1": (None, None, 2 * gpt.FFN)}
    return Stream(TransformerBlock(gpt.config(case), spec), mask), places


MODELS = {"MLP": _mlp, "block": _block}


def inside(name: str) -> dict[str, Any]:
    case = Case("unknown", tp=2, layers=1)
    gpt.runtime(case)
    gpt.initialize(case)
    model, places = MODELS[name](case)
    args = (torch.arange(2 * gpt.SEQUENCE).reshape(gpt.SEQUENCE, 2) % gpt.VOCABULARY,)
    out: dict[str, Any] = {"unsaid": told(lambda: mf.FlexModel(model)), "detected": str(mf.detect(model))}
    out["other size"] = told(lambda: mf.FlexModel(model, tensor_parallel_size=1))
    out["shapes"] = {}
    for place, shape in places.items():
        for edit in (None, mixed):
            with mf.FlexModel(model, tensor_parallel_size=2) as flex, torch.no_grad():
                flex.register_forward_hook(mf.HookFunction(place, editing_function=edit))
                out[f"{place}{' edited' * bool(edit)}"] = told(lambda f=flex: f(*args))
                flex.session.registry.clear()
        with mf.FlexModel(model, tensor_parallel_size=2) as flex, torch.no_grad():
            flex.register_forward_hook(mf.HookFunction(place, expected_shape=shape))
            flex(*args)
            out["shapes"] |= {n: (t[0].shape[-1], shape[-1]) for n, t in flex.output_dict.items()}
    return out


@pytest.mark.parametrize("name", MODELS)
def test_parallel_modules_in_a_model_that_is_not_known(name: str) -> None:
    pytest.importorskip("megatron.core")
    for rank, out in enumerate(run(2, inside, name)):
        assert_names(out.pop("unsaid"), "tensor_parallel_size")
        detected = out.pop("detected")
        assert "Parallel" in detected.splitlines()[0]
        assert "megatron.core" in detected.splitlines()[0]
        assert_names(out.pop("other size"), "[0, 1]")
        shapes = out.pop("shapes")
        assert all(got == want for got, want in shapes.values())
        assert bool(shapes) is (rank == 0)
        for place, said in out.items():
            assert_names(said, f"{place.removesuffix(' edited')}:output")


class MyColumnParallelLinear(nn.Linear):
    """By its name, a parallel layer of somebody's own."""


def found() -> tuple[str, str, str]:
    model = nn.Sequential(MyColumnParallelLinear(2, 2))
    with_one = told(lambda: mf.FlexModel(model, tensor_parallel_size=1).restore())
    return str(mf.detect(model)), told(lambda: mf.FlexModel(model)), with_one


def test_a_layer_that_is_parallel_by_its_name() -> None:
    for detected, unsaid, said in run(2, found):
        assert_names(detected, "MyColumnParallelLinear", "tests.distributed.test_unknown_layers")
        assert_names(unsaid, "MyColumnParallelLinear")
        assert said == ""
