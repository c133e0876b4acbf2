"""PyTorch's tensor parallelism: parallelize_module's styles and DTensors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support import llama, proof


@dataclass(frozen=True)
class Plan:
    """How a model is made parallel.

    Attributes:
        tp: tensor parallel ranks.
        dp: data parallel ranks.
        sequence: whether norms and what is between blocks are cut by tokens.
        loss: whether logits stay cut.
        local: whether modules return local tensors; DTensors everywhere otherwise.
        wrapper: around the model, where there is data parallelism.
    """

    tp: int = 2
    dp: int = 1
    sequence: bool = False
    loss: bool = False
    local: bool = True
    wrapper: str = ""


def styles(plan: Plan) -> dict[str, Any]:
    """Styles by module, as people write them."""
    lies, local = Shard(1) if plan.sequence else Replicate(), {"use_local_output": plan.local}
    out: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=lies, **local),
        "output": ColwiseParallel(
            input_layouts=lies,
            output_layouts=Shard(-1) if plan.loss else Replicate(),
            use_local_output=not plan.loss,
        ),
    }
    if plan.sequence:
        out["norm"] = SequenceParallel()
    for n in range(llama.LAYERS):
        at = f"layers.{n}"
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            out[f"{at}.{name}"] = ColwiseParallel(**local)
        for name in ("attention.wo", "feed_forward.w2"):
            out[f"{at}.{name}"] = RowwiseParallel(output_layouts=lies, **local)
        if plan.sequence:
            out[f"{at}.attention_norm"] = out[f"{at}.ffn_norm"] = SequenceParallel()
            out[f"{at}.attention"] = PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            )
            out[f"{at}.feed_forward"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
    return out


def parallel(plan: Plan) -> Any:
    """The model with its styles and wrapper."""
    device_mesh = init_device_mesh("cpu", (plan.dp, plan.tp), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(llama.single(), device_mesh["tp"], styles(plan))
    if plan.wrapper == "DDP":
        return DistributedDataParallel(model, device_mesh=device_mesh["dp"])
    if plan.wrapper == "FSDP2":
        for layer in model.layers.values():
            fully_shard(layer, mesh=device_mesh["dp"])
        fully_shard(model, mesh=device_mesh["dp"])
    return model


def build(plan: Plan) -> proof.Built:
    model = parallel(plan)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            if plan.loss:
                stack.enter_context(loss_parallel())
            if not plan.local:
                stack.enter_context(implicit_replication())
            loss = llama.loss_of(model(tokens), labels)
            loss.backward()
        return loss.full_tensor() if plan.loss else loss

    return proof.Built(model, step, averaged=plan.dp > 1)


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        ("tp2", Plan()),
        ("tp4", Plan(tp=4)),
        ("tp2 sp", Plan(sequence=True)),
        ("tp2 sp loss parallel", Plan(sequence=True, loss=True)),
        ("tp2 sp loss parallel, DTensors throughout", Plan(sequence=True, loss=True, local=False)),
        ("tp2 x DDP dp2", Plan(dp=2, wrapper="DDP")),
        ("tp2 sp x FSDP2 dp2", Plan(dp=2, sequence=True, wrapper="FSDP2")),
    ],
)
def test_styles(case: str, plan: Plan, cells: list[Any]) -> None:
    proof.judge(proof.compare("PyTorch", f"DTensor {case}", plan.tp * plan.dp, build, plan), cells)
