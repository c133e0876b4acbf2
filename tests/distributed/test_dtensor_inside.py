"""DTensor tensor parallelism: places inside of modules, other placements, and what has no rule."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import megatron_flex as mf
from megatron_flex.adapters import dtensor_placements
from megatron_flex.adapters.layout_rules import Spread, UnknownLayout
from megatron_flex.adapters.mesh_axes import mesh_of_device_meshes
from tests.distributed.test_dtensor import Plan, build, parallel
from tests.support import llama
from tests.support.messages import assert_names
from tests.support.pool import run

INSIDE = {  # to the place of the single-process model with the same tensor
    "layers.1.feed_forward.w2:partial": "layers.1.feed_forward.w2:output",
    "layers.1.feed_forward.w2:gemm_input": "layers.1.feed_forward.w2:input",
    "layers.1.attention.wq:gemm_input": "layers.1.attention_norm:output",
}


def _inside(sequence: bool) -> dict[str, Any]:
    built = build(Plan(sequence=sequence))
    out: dict[str, Any] = {}
    hooks = [mf.HookFunction(s, hook_type=k) for s in INSIDE for k in ("forward", "tensor")]
    with mf.attach(built.model, hooks) as flex:
        built.step(*llama.batch(0))
        out["read"] = {n: t[0] for n, t in flex.output_dict.items()}
    hook = mf.HookFunction("layers.1.feed_forward.w2:partial", editing_function=_edit, save=False)
    with mf.attach(built.model, [hook]):
        out["edited"] = built.step(*llama.batch(0)).detach()
    return out


def _edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return llama.mixed(inputs)


@pytest.mark.parametrize("sequence", [False, True])
def test_inside_of_linears(sequence: bool) -> None:
    found = run(2, _inside, sequence)[0]
    truth = llama.truth()[0]
    for name, same in INSIDE.items():
        torch.testing.assert_close(found["read"][name], truth["values"][same], atol=1e-5, rtol=1e-5)
        if "wq" not in name:  # whose input three linears use
            grad = found["read"][f"{name}.grad"]
            torch.testing.assert_close(grad, truth["gradients"][same], atol=1e-7, rtol=1e-5)
    model = llama.single()
    llama.install(model, "layers.1.feed_forward.w2:output", llama.mixed)
    tokens, labels = llama.batch(0)
    torch.testing.assert_close(found["edited"], llama.loss_of(model(tokens), labels).detach())


def _spreads() -> list[Any]:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = mesh_of_device_meshes([(device_mesh, "tp")], {})
    tp = device_mesh["tp"]

    def of(placement: Any, **more: Any) -> Any:
        return dtensor_placements.spread_of_placements([placement], tp, mesh, **more)

    return [
        of(Shard(1)),
        of(Shard(0), shape=(5, 2)),
        of(Partial()),
        of(Replicate(), grad_placements=[Partial()]),
        dtensor_placements.spread_of_placements([Shard(0), Shard(0)], device_mesh, mesh),
        dtensor_placements.spread_of_placements([Replicate(), Replicate()], device_mesh, mesh),
        of(Partial("avg")),
        of(_StridedShard(0, split_factor=2)),
        dtensor_placements.spread_of_placements([Partial(), Replicate()], device_mesh, mesh),
        dtensor_placements.spread_of_placements([Shard(1), Replicate()], device_mesh, mesh),
    ]


def test_placements() -> None:
    found = run(4, _spreads)[0]
    assert found[:6] == [
        Spread(((1, "tp"),)),
        Spread(((0, "tp"),), uneven=True),
        Spread(partial=("tp",)),
        Spread(shared=("tp",)),
        Spread(((0, "tp"),)),  # of the samples of one replica
        Spread(),
    ]
    assert all(isinstance(f, UnknownLayout) for f in found[6:])
    assert "avg" in found[6].why
    assert "_StridedShard" in found[7].why


class Odd(nn.Module):
    """Features that do not divide by the number of ranks, with biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def _uneven() -> dict[str, Any]:
    device_mesh = init_device_mesh("cpu", (2,))
    up = ColwiseParallel(use_local_output=False)
    model = parallelize_module(Odd(), device_mesh, {"up": up, "down": RowwiseParallel()})
    hooks = [
        mf.HookFunction(s, hook_type=k) for s in ("up:output", "down:partial") for k in ("forward", "tensor")
    ]
    edit = mf.HookFunction("up:output", editing_function=_reversed, save=False)
    out: dict[str, Any] = {}
    for name, more in (("read", []), ("edited", [edit])):
        with mf.attach(model, [*hooks, *more] if name == "read" else more) as flex:
            x = torch.arange(12.0).reshape(2, 6)
            y = model(x)
            y.square().sum().backward()
            out[name] = {n: t[0] for n, t in flex.output_dict.items()} if name == "read" else y.detach()
    return out


def _reversed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs.flip(-1) * 2


def test_uneven_parts() -> None:
    found = run(2, _uneven)[0]
    model, x = Odd(), torch.arange(12.0).reshape(2, 6)
    hidden = model.up(x)
    hidden.retain_grad()
    y = model.down(hidden)
    y.square().sum().backward()
    read = found["read"]
    torch.testing.assert_close(read["up:output"], hidden.detach())
    torch.testing.assert_close(read["up:output.grad"], hidden.grad)
    torch.testing.assert_close(read["down:partial"], y.detach())
    torch.testing.assert_close(found["edited"], model.down(hidden.flip(-1) * 2).detach())


def _without_gradients(plan: Plan) -> dict[str, Tensor]:
    model = parallel(plan)
    with torch.no_grad(), mf.attach(model, [mf.HookFunction(s) for s in llama.SITES]) as flex:
        model(llama.batch(0)[0])
        return {n: t[0] for n, t in flex.output_dict.items()}


@pytest.mark.parametrize("sequence", [False, True])
def test_nothing_is_differentiated(sequence: bool) -> None:
    found, truth = run(2, _without_gradients, Plan(sequence=sequence))[0], llama.truth()[0]["values"]
    assert found.keys() == truth.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, truth[name], atol=1e-5, rtol=1e-5)


# -- what has no rule -----------------------------------------------------------------------------------


class Own(ParallelStyle):
    """Somebody's style: the output is local, and nothing says how it lies."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def partition(name: str, module: nn.Module, device_mesh: Any) -> None:
            for key, parameter in module.named_parameters():
                cut = distribute_tensor(parameter, device_mesh, [Shard(0)])
                module.register_parameter(key, nn.Parameter(cut))

        def gets(module: nn.Module, inputs: Any, device_mesh: Any) -> Any:
            return DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)

        def gives(module: nn.Module, output: Any, device_mesh: Any) -> Tensor:
            return output._local_tensor.view(-1)

        return distribute_module(module, device_mesh, partition, gets, gives)


def _own_style() -> str:
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (2,)), {"0": Own()})
    try:
        with mf.attach(model, [mf.HookFunction("0:output")]):
            model(torch.ones(2, 4))
    except mf.FlexError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_style_without_a_rule_is_named() -> None:
    for said in run(2, _own_style):
        assert said.startswith("HookError"), said
        assert "Own" in said


def _two_meshes() -> str:
    first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    second = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, first["tp"], {"0": ColwiseParallel()})
    parallelize_module(model, second, {"1": ColwiseParallel()})
    try:
        mf.FlexModel(model)
    except mf.FlexError as error:
        return str(error)
    return "no error"


def test_two_meshes_that_disagree_are_refused() -> None:
    for said in run(4, _two_meshes):
        assert "disagree" in said


def _prepared_output() -> Any:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    parallelize_module(model, device_mesh, {"0": style})
    x = torch.arange(16.0).reshape(4, 4)
    with mf.attach(model, [mf.HookFunction("0:output")]) as flex:
        local = model(x)
        return dict(flex.output_dict), local.detach()


def test_an_output_that_is_cut_for_the_next_module() -> None:
    (whole, first), (_, second) = run(2, _prepared_output)
    torch.testing.assert_close(whole["0:output"][0], torch.cat([first, second]))


class Beside(nn.Module):
    """A replicated DTensor that meets one that is cut, in code without a style."""

    def __init__(self, device_mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.scale, self.here = nn.Linear(6, 8), nn.Linear(6, 8), nn.Identity()
        self.device_mesh = device_mesh

    def forward(self, x: Tensor) -> Tensor:
        wide, scale = self.up(x), self.scale(x)
        if self.device_mesh is not None:
            scale = DTensor.from_local(scale, self.device_mesh, [Replicate()])
        out = wide * self.here(scale)
        return out.full_tensor() if isinstance(out, DTensor) else out


def _beside(size: int) -> Tensor:
    model, options = Beside(), {}
    if size > 1:
        device_mesh = init_device_mesh("cpu", (size,))
        plan = {"up": ColwiseParallel(use_local_output=False)}
        model, options = (
            parallelize_module(Beside(device_mesh), device_mesh, plan),
            {"tensor_parallel_size": 2},
        )
    with mf.attach(model, [mf.HookFunction("here", hook_type="tensor")], **options) as flex:
        model(torch.arange(12.0).reshape(2, 6)).square().sum().backward()
        return dict(flex.output_dict).get("here:output.grad", [torch.empty(0)])[0]


def test_the_gradient_of_a_replicated_one_used_with_a_cut_one() -> None:
    (want,) = run(1, _beside, 1)
    torch.testing.assert_close(run(2, _beside, 2)[0], want, atol=1e-5, rtol=1e-5)


def _one_without_a_rule() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Module()
    whole = {"plain": torch.arange(8.0), "packed": torch.arange(16.0).view(8, 2), "odd": torch.arange(6.0)}
    rank = torch.distributed.get_rank()
    halves = _StridedShard(0, split_factor=2)  # as of `[gate | up]`: each half is cut by itself
    parts = {
        "plain": (whole["plain"].chunk(2)[rank], Shard(0)),
        "packed": (torch.cat([t.chunk(2)[rank] for t in whole["packed"].chunk(2)]), halves),
        "odd": (whole["odd"].chunk(2)[rank], halves),  # of three rows each
    }
    for name, (part, placement) in parts.items():
        shape, stride = whole[name].shape, whole[name].stride()
        made = DTensor.from_local(part, mesh, [placement], run_check=False, shape=shape, stride=stride)
        model.register_parameter(name, nn.Parameter(made))
    out: dict[str, Any] = {}
    with mf.FlexModel(model, tensor_parallel_size=2) as flex:
        out["without"] = flex.parameters_without_layout()
        for name in ("plain", "packed"):
            got = flex.get_module_parameter(name, everywhere=True)
            out[name] = torch.equal(got, whole[name])
        try:
            flex.get_module_parameter("odd", everywhere=True)
        except mf.FlexError as error:
            out["refused"] = str(error)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            out["named"] = sorted(n for n, _ in flex.named_full_parameters(everywhere=True))
        out["warned"] = [str(w.message) for w in warned]
    return out


def test_a_parameter_without_a_rule_refuses_only_itself() -> None:
    for found in run(2, _one_without_a_rule):
        assert found["plain"]
        assert found["packed"]
        assert list(found["without"]) == ["odd"]
        assert_names(found["refused"], "odd", "DTensor")
        assert found["named"] == ["packed", "plain"]
        assert any("odd (DTensor" in text for text in found["warned"])
