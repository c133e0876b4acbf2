"""What ZeRO keeps: whole parameters and gradients are read and set between its passes and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.test_deepspeed import initialize, pipeline, pytestmark, start
from tests.support.messages import assert_names
from tests.support.pool import run_alone as run

__all__ = ["pytestmark"]
TENSOR: Any = {"hook_type": "tensor", "gradient_scale": "loss"}
RATE, STEPS, WIDE = 0.1, 2, 5


def model() -> nn.Module:
    """One whose parameters do not divide by the number of ranks; one of them is frozen."""
    generator = torch.Generator().manual_seed(5)
    made = nn.Sequential(nn.Linear(WIDE, 3), nn.Tanh(), nn.Linear(3, 7))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    made[2].bias.requires_grad_(False)
    return made


def samples(replica: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(20 + 2 * replica + microbatch)
    return torch.randn(4, WIDE, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return (output**2).mean()


NEW = torch.linspace(-1, 1, 3 * WIDE).view(3, WIDE)


def doubled(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return 2 * inputs


def refused(ask: Any) -> str:
    try:
        ask()
    except mf.FlexError as error:
        return str(error)
    return "nothing"


def kept(stage: int) -> dict[str, Any]:
    """A person's own loop: set a parameter, two microbatches, set a gradient, step."""
    engine = initialize(model(), stage, STEPS, RATE, zero={"stage3_param_persistence_threshold": 4})
    out: dict[str, Any] = {}
    with mf.FlexModel(engine) as flex:
        flex.set_module_parameter("0.weight", NEW)
        out["shapes"] = {n: tuple(t.shape) for n, t in flex.named_full_parameters(everywhere=True)}
        hook = mf.HookFunction(
            "2.weight", hook_type="tensor", gradient_scale="loss", editing_function=doubled
        )
        flex.register_hook(hook)
        for microbatch in range(STEPS):
            early = refused(lambda: flex.get_module_parameter("0.weight", gradient=True, everywhere=True))
            out.setdefault("early", early)
            engine.backward(loss_of(engine(samples(dist.get_rank(), microbatch))))
            out.setdefault("own", []).append(flex.output_dict["2.weight.grad"][-1].clone())
            if microbatch < STEPS - 1:
                engine.step()
        out["gradients"] = dict(flex.named_full_parameters(gradients=True, everywhere=True))
        flex.set_module_parameter("0.bias", torch.full_like(out["gradients"]["0.bias"], 3.0), gradient=True)
        engine.step()
        out["late"] = refused(lambda: flex.get_module_parameter("0.weight", gradient=True, everywhere=True))
        out["parameters"] = {n: t.clone() for n, t in flex.named_full_parameters(everywhere=True)}
    return out


def truth() -> dict[str, Any]:
    """The same with nothing but torch, on one process with both replicas' samples."""
    made, own = model(), {}
    with torch.no_grad():
        made[0].weight.copy_(NEW)
    for replica in range(2):
        for microbatch in range(STEPS):
            loss = loss_of(made(samples(replica, microbatch)))
            (grad,) = torch.autograd.grad(loss, made[2].weight, retain_graph=True)
            own[replica, microbatch] = grad
            (loss / (2 * STEPS)).backward()
    made[2].weight.grad *= 2
    gradients = {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}
    made[0].bias.grad.fill_(3.0)
    torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=RATE).step()
    return {"own": own, "gradients": gradients, "parameters": dict(made.named_parameters())}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_persons_own_loop(stage: int) -> None:
    want = truth()
    for rank, got in enumerate(run(2, kept, stage)):
        assert got["shapes"] == {n: tuple(p.shape) for n, p in model().named_parameters()}
        assert got["gradients"].keys() == want["gradients"].keys()
        for key in ("gradients", "parameters"):
            for name, tensor in got[key].items():
                torch.testing.assert_close(tensor, want[key][name].detach(), rtol=1e-5, atol=1e-6)
        for microbatch, own in enumerate(got["own"]):
            torch.testing.assert_close(own, want["own"][rank, microbatch], rtol=1e-5, atol=1e-6)
        if stage < 3:
            assert_names(got["early"], "ZeRO", 2, "engine.step()")
            assert_names(got["late"], "ZeRO", 2, "engine.step()")
        else:
            assert_names(got["early"], "0.weight")
            assert_names(got["late"], "0.weight")


def half(stage: int, accumulating: str) -> dict[str, Any]:
    """bf16 parameters, of which ZeRO keeps copies in fp32: what is set must survive the step."""
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulating}}
    engine = initialize(model(), stage, config=config)
    with mf.FlexModel(engine) as flex:
        before = flex.get_module_parameter("0.weight", everywhere=True)
        flex.set_module_parameter("0.weight", NEW.bfloat16())
        engine.backward(loss_of(engine(samples(dist.get_rank(), 0).bfloat16())))
        gradient = refused(lambda: flex.get_module_parameter("0.weight", gradient=True, everywhere=True))
        engine.step()
        after = flex.get_module_parameter("0.weight", everywhere=True)
    return {"before": before, "after": after, "gradient": gradient}


@pytest.mark.parametrize(("stage", "accumulating"), [(1, "fp32"), (1, "bf16"), (3, "bf16")])
def test_half_precision(stage: int, accumulating: str) -> None:
    apart = accumulating == "fp32"
    for got in run(2, half, stage, accumulating):
        assert torch.equal(got["before"], model()[0].weight.bfloat16())
        assert torch.equal(got["after"], NEW.bfloat16())
        assert ("BF16_Optimizer" in got["gradient"]) == apart, got["gradient"]


def probed(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
    return inputs + modules.probe(inputs)


def probe() -> nn.Linear:
    made = nn.Linear(3, 3)
    nn.init.ones_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def trained_alone(stage: int) -> dict[str, Any]:
    """Only a trainable module learns; the engine's parameters do not, and afterwards do again."""
    engine = initialize(model(), stage)
    x = samples(dist.get_rank(), 0)
    out: dict[str, Any] = {"bare": refused(lambda: mf.FlexModel(engine.module))}
    with mf.FlexModel(engine) as flex:
        flex.register_trainable_module("probe", probe())
        flex.register_forward_hook(mf.HookFunction("1", editing_function=probed, save=False))
        out["refused"] = refused(flex.freeze)
        engine.backward(loss_of(engine(x)))
        out["kept"] = [p.grad is None for p in engine.module.parameters()]
        flex.unfreeze()
        out["probe"] = flex.trainable_modules["probe"].weight.grad.clone()
        engine.step()
        engine.backward(loss_of(engine(x)))
        out["again"] = flex.get_module_parameter("0.weight", gradient=True, everywhere=True)
    return out


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_freezing(stage: int) -> None:
    made, module = model(), probe()
    for replica in range(2):
        hidden = made[1](made[0](samples(replica, 0)))
        (loss_of(made[2](hidden + module(hidden))) / 2).backward()
    for got in run(2, trained_alone, stage):
        assert ("deepspeed.initialize()" in got["refused"]) == (stage == 1)
        assert ("deepspeed.initialize()" in got["bare"]) == (stage > 0)
        assert all(got["kept"])
        torch.testing.assert_close(got["probe"], module.weight.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got["again"], made[0].weight.grad, rtol=1e-5, atol=1e-6)


def without_a_rule() -> dict[str, str]:
    """What configurations get that no rule covers."""
    out = {}
    zero = {"zero_hpz_partition_size": 2}
    out["hpZ"] = refused(lambda: mf.FlexModel(initialize(model(), 3, zero=zero)))
    zero = {"offload_optimizer": {"device": "cpu"}}
    engine = initialize(model(), 2, zero=zero)
    with mf.FlexModel(engine) as flex:
        engine.backward(loss_of(engine(samples(dist.get_rank(), 0))))
        out["offload"] = refused(lambda: flex.get_module_parameter("0.weight", gradient=True))
    out["tied"] = refused(lambda: mf.FlexModel(tied()))
    out["sizes"] = refused(lambda: mf.FlexModel(engine, tensor_parallel_size=2))
    with mf.FlexModel(pipeline(2, 0)) as flex:
        out["frozen stage"] = refused(flex.freeze)
    return out


def tied() -> Any:
    start()
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("both", nn.Linear, 4, 4),
        nn.Tanh(),
        nn.Tanh(),
        TiedLayerSpec("both", nn.Linear, 4, 4),
    ]
    staged = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    return initialize(staged, 0)


def test_what_no_rule_covers() -> None:
    expected: dict[str, tuple[object, ...]] = {
        "hpZ": ("zero_hpz_partition_size",),
        "offload": ("offload_optimizer",),
        "tied": ("both", "[0, 1]"),
        "sizes": ("tp=2", 1),
        "frozen stage": ("PipelineEngine", "SGD"),
    }
    for got in run(2, without_a_rule):
        assert got.keys() == expected.keys()
        for what, values in expected.items():
            assert_names(got[what], *values)
