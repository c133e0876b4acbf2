"""PyTorch's tensor parallelism: parallelize_module's styles and DTensors."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support import llama, proof


def plan(sequence: bool, loss_parallel: bool) -> dict[str, Any]:
    """Styles by module, as people write them."""
    lies = Shard(1) if sequence else Replicate()
    out: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=lies),
        "output": ColwiseParallel(
            input_layouts=lies,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    if sequence:
        out["norm"] = SequenceParallel()
    for n in range(llama.LAYERS):
        at = f"layers.{n}"
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            out[f"{at}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w2"):
            out[f"{at}.{name}"] = RowwiseParallel(output_layouts=lies)
        if sequence:
            out[f"{at}.attention_norm"] = out[f"{at}.ffn_norm"] = SequenceParallel()
            out[f"{at}.attention"] = PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            )
            out[f"{at}.feed_forward"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
    return out


def build(tp: int, sequence: bool, loss_parallel: bool) -> proof.Built:
    device_mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    model = parallelize_module(llama.single(), device_mesh, plan(sequence, loss_parallel))

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel as parallel_loss

        if not loss_parallel:
            loss = llama.loss_of(model(tokens), labels)
            loss.backward()
            return loss
        with parallel_loss():
            loss = llama.loss_of(model(tokens), labels)
            loss.backward()
        return loss.full_tensor()

    return proof.Built(model, step)


@pytest.mark.parametrize(
    ("case", "tp", "options"),
    [
        ("DTensor tp2", 2, (False, False)),
        ("DTensor tp2 sp", 2, (True, False)),
        ("DTensor tp2 sp loss parallel", 2, (True, True)),
        ("DTensor tp4", 4, (False, False)),
    ],
)
def test_styles(case: str, tp: int, options: tuple[bool, bool], cells: list[Any]) -> None:
    proof.judge(proof.compare("PyTorch", case, tp, build, tp, *options), cells)
