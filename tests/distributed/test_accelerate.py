"""Models that accelerate's `Accelerator.prepare` wrapped."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.matrix import relative
from tests.support import llama, proof, wrapping
from tests.support.pool import run_alone as run

pytest.importorskip("accelerate")

BOUND = 1e-5
NAME = "layers.1.attention.wq.weight"


def accelerator(kind: str, steps: int = 1, **options: Any) -> Any:
    """One on CPUs; accelerate takes its FSDP plugins on accelerators only, so that here it is told to."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29544")
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if kind == "DDP":
        return Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(kind[-1]),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **({"use_orig_params": True} if kind == "FSDP1" else {}),
    )
    found = Accelerator(cpu=True, gradient_accumulation_steps=steps, fsdp_plugin=plugin, **options)
    found.state.distributed_type, found.state.fsdp_plugin = DistributedType.FSDP, plugin
    found.state.device = torch.device("cpu")
    return found


def prepared(accelerator: Any) -> nn.Module:
    """The model, given with an optimizer, as one of the ways demands."""
    model = llama.single()
    wrapped: nn.Module = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    return wrapped


def build(kind: str) -> proof.Built:
    accelerates = accelerator(kind)
    model = prepared(accelerates)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens), labels)
        accelerates.backward(loss)
        return loss

    return proof.Built(model, step, averaged=True)


@pytest.mark.parametrize("kind", ["DDP", "FSDP1", "FSDP2"])
def test_prepared(kind: str, cells: list[Any]) -> None:
    case = f"accelerate, {kind} dp2"
    found = proof.compare(
        "Hugging Face", case, 2, build, kind, sites=wrapping.FEW, edits=wrapping.FEW[2:3], alone=True
    )
    proof.judge(found, cells)


def accumulated() -> dict[str, Any]:
    """Gradients of two microbatches, of which accelerate averages the last."""
    accelerates = accelerator("DDP", steps=2)
    model = prepared(accelerates)
    told: dict[str, Any] = {}
    with mf.FlexModel(model) as flex:
        flex.register_forward_hook(mf.HookFunction("layers.1:output"))
        for microbatch in range(2):
            tokens, labels = llama.batch(dist.get_rank() + 2 * microbatch)
            with accelerates.accumulate(model):
                accelerates.backward(llama.loss_of(model(tokens), labels))
            try:
                found = flex.get_module_parameter(NAME, gradient=True, everywhere=True)
            except mf.FlexError as error:
                found = str(error)  # type: ignore[assignment]
            told[f"gradient {microbatch}"] = found
        told["read"] = [t.clone() for t in flex.output_dict["layers.1:output"][:]]
    return told


def test_gradient_accumulation() -> None:
    truth = llama.truth(4)
    wanted = torch.stack([t["parameter gradients"][NAME] for t in truth]).mean(0)
    for rank, told in enumerate(run(2, accumulated)):
        assert "no_sync()" in told["gradient 0"]
        assert relative(told["gradient 1"], wanted) < BOUND
        for got, replica in zip(told["read"], (rank, rank + 2), strict=True):
            assert relative(got, truth[replica]["values"]["layers.1:output"]) < BOUND


def half() -> tuple[Tensor, Tensor]:
    """What a hook and the caller get in bfloat16, whose outputs accelerate turns back."""
    accelerates = accelerator("DDP", mixed_precision="bf16")
    model = prepared(accelerates)
    with mf.FlexModel(model) as flex:
        flex.register_forward_hook(mf.HookFunction("layers.1.attention.wq:output"))
        output = model(llama.batch(dist.get_rank())[0])
        return flex.output_dict["layers.1.attention.wq:output"][0], output.detach()


def test_mixed_precision() -> None:
    for rank, (read, output) in enumerate(run(2, half)):
        seen: list[Tensor] = []
        model = llama.single()
        llama.install(model, "layers.1.attention.wq:output", lambda t, s=seen: s.append(t) or t)  # type: ignore[func-returns-value]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            whole = model(llama.batch(rank)[0])
        assert read.dtype == torch.bfloat16
        assert torch.equal(read, seen.pop())
        assert torch.equal(output, whole.float())
