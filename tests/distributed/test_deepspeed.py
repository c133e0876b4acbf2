"""Models in DeepSpeed's engines: ZeRO-1 to 3, and pipelines."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import llama, proof
from tests.support.pool import run

# Not imported in this process: it replaces functions of torch's.
pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


def start() -> Any:
    """DeepSpeed over the process group that is there, with nothing to compile."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does what it would, on one machine
    deepspeed.init_distributed("gloo")
    return deepspeed


def initialize(model: nn.Module, stage: int, steps: int = 1, rate: float = 0.0, **more: Any) -> Any:
    """An engine with a plain torch optimizer."""
    threshold = {"stage3_param_persistence_threshold": 40}  # so that ZeRO-3 cuts all but the norms
    config = {
        "train_micro_batch_size_per_gpu": llama.SAMPLES,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            **threshold,
            **more.pop("zero", {}),
        },
        **more.pop("config", {}),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine, *_ = start().initialize(model=model, optimizer=optimizer, config=config, **more)
    return engine


def stepping(engine: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A forward and backward pass; the optimizer's step, which changes nothing, comes before the next."""
    waiting: list[bool] = []

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        if waiting:
            engine.step()
        loss = llama.loss_of(engine(tokens), labels)
        engine.backward(loss)
        waiting.append(True)
        return loss

    return step


def build(stage: int) -> proof.Built:
    engine = initialize(llama.single(), stage)
    return proof.Built(engine, stepping(engine), averaged=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage: int, cells: list[Any]) -> None:
    proof.judge(proof.compare("DeepSpeed", f"ZeRO-{stage} dp2", 2, build, stage, alone=True), cells)


SITE = "layers.1:output"


def accumulated(steps: int) -> tuple[int, Tensor]:
    """The gradient at a site, as that of a microbatch's own loss, in the first of several microbatches."""
    import megatron_flex as mf

    engine = initialize(llama.single(), 2, steps)
    hook = mf.HookFunction(SITE, hook_type="tensor", gradient_scale="loss")
    with mf.attach(engine, [hook]) as flex:
        replica = flex.session.mesh["dp"].coord
        stepping(engine)(*llama.batch(replica))
        return replica, flex.output_dict[f"{SITE}.grad"][0].clone()


def test_gradients_of_a_microbatchs_own_loss() -> None:
    """DeepSpeed divides the loss by the number of microbatches whose gradients it accumulates."""
    wanted = llama.truth(2, [SITE], [], 1)
    for replica, gradient in run(2, accumulated, 4, alone=True):
        assert relative(gradient, wanted[replica]["gradients"][SITE]) < 1e-5


class Layer(llama.Block):
    """A block that a pipeline can call, which hands on one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, llama.rotary(llama.TOKENS))


def pipeline(stages: int, zero: int, microbatches: int = 1) -> Any:
    """A pipeline engine whose optimizer's steps are left out, so that gradients can be read."""
    start()
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule

    model = llama.single()
    blocks = [Layer(llama.Parts()) for _ in model.layers]
    for layer, block in zip(blocks, model.layers.values(), strict=True):
        layer.load_state_dict(block.state_dict())
    layers = [model.tok_embeddings, *blocks, model.norm, model.output]
    loss = Loss()  # a module, which is a part of all stages
    staged = PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method="uniform")
    engine = initialize(staged, zero, microbatches)

    class Unstepped(TrainSchedule):
        def steps(self) -> Any:
            for instructions in super().steps():
                yield [one for one in instructions if not isinstance(one, OptimizerStep)]

    engine._train_schedule = lambda: Unstepped(engine.micro_batches, engine.num_stages, engine.stage_id)
    return engine


class Loss(nn.Module):
    """The loss that one process has."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return llama.loss_of(logits, labels)


NUMBERS = {"tok_embeddings": "0", "norm": "4", "output": "5"}
NAMES = {number: name for name, number in NUMBERS.items()}


def staged(site: str) -> str:
    """A name of the single process as the pipeline has it."""
    first, *rest = site.replace(":", ".:").split(".")
    if first == "layers":
        first, rest = str(int(rest[0]) + 1), rest[1:]
    return ".".join([NUMBERS.get(first, first), *rest]).replace(".:", ":")


def single(parameter: str) -> str:
    """The other way round."""
    first, rest = parameter.split(".", 1)
    return f"{NAMES.get(first) or f'layers.{int(first) - 1}'}.{rest}"


def build_pipeline(stages: int, zero: int) -> proof.Built:
    engine = pipeline(stages, zero)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        engine.train_batch(iter([(tokens, labels)]))
        return engine.dp_group_loss  # of this replica

    return proof.Built(engine, step, name=staged, averaged=True)


@pytest.mark.parametrize(("world", "zero"), [(2, 0), (4, 1)])
def test_pipeline(world: int, zero: int, cells: list[Any]) -> None:
    case = f"pipeline pp2 dp{world // 2}" + (" ZeRO-1" if zero else "")
    found = proof.compare("DeepSpeed", case, world, build_pipeline, 2, zero, parameter=single, alone=True)
    proof.judge(found, cells)


def microbatches() -> Any:
    engine = pipeline(2, 0, microbatches=3)
    data = [llama.batch(n) for n in range(3)]
    names = ["3.attention:output", "5:output"]
    hooks = [
        mf.HookFunction(name, hook_type=kind, gradient_scale=scale)
        for name, kind, scale in [
            (names[0], "tensor", "loss"),
            (names[1], "tensor", "raw"),
            (names[0], "forward", "raw"),
            ("1.attention.wq.weight", "tensor", "raw"),  # on the stage that is forward again before backward
        ]
    ]
    with mf.attach(engine, hooks) as flex:
        engine.train_batch(iter(data))
        read = dict(flex.output_dict)
        gradients = dict(flex.named_full_parameters(gradients=True, everywhere=True))
        with flex.interp.trace(torch.cat([tokens for tokens, _ in data]), microbatch_size=llama.SAMPLES):
            pass
        evaluated = dict(flex.output_dict).get(names[0])
        engine.train_batch(iter(data))
    return flex.is_leader, read, gradients, evaluated


def test_microbatches_of_a_pipeline() -> None:
    (leader, read, gradients, evaluated), (other, *_) = proof.run(2, microbatches, alone=True)
    assert leader
    assert not other
    for readings in read.values():
        numbers = [key.microbatch for key in readings.keys]
        assert numbers == [0, 1, 2] * (len(numbers) // 3)
    truth = llama.truth(3)
    for n, one in enumerate(truth):
        torch.testing.assert_close(read["3.attention:output"][n], one["values"]["layers.2.attention:output"])
        want = one["gradients"]["layers.2.attention:output"]
        torch.testing.assert_close(read["3.attention:output.grad"][n], want)
        torch.testing.assert_close(read["5:output.grad"][n], one["gradients"]["output:output"] / 3)
        weight = one["parameter gradients"]["layers.0.attention.wq.weight"]
        got = read["1.attention.wq.weight.grad"][n]
        torch.testing.assert_close(got, weight / 3, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(evaluated[n], one["values"]["layers.2.attention:output"])
    for name, grad in gradients.items():
        want = torch.stack([one["parameter gradients"][single(name)] for one in truth]).mean(0)
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)
