"""Models in DeepSpeed's engines: ZeRO-1 to 3, and pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from tests.support import llama, proof

pytest.importorskip("deepspeed", reason="deepspeed is not installed")


def initialize(model: nn.Module, stage: int, steps: int = 1, rate: float = 0.0, **more: Any) -> Any:
    """An engine with a plain torch optimizer, for which nothing is compiled."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does what it would, on one machine
    config = {
        "train_micro_batch_size_per_gpu": llama.SAMPLES,
        "gradient_accumulation_steps": steps,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 40,
            **more.pop("zero", {}),
        },
        **more.pop("config", {}),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, **more)
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
    proof.judge(proof.compare("DeepSpeed", f"ZeRO-{stage} dp2", 2, build, stage), cells)
