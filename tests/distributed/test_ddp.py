"""Models in PyTorch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support import llama, proof


def build() -> proof.Built:
    model = DistributedDataParallel(llama.single())

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        return loss

    return proof.Built(model, step, averaged=True)


def test_replicas(cells: list[Any]) -> None:
    proof.judge(proof.compare("PyTorch", "DDP dp2", 2, build), cells)
