"""Layouts between parallel modules, followed through a model that says nothing of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatron_flex.adapters import registry
from megatron_flex.adapters.registry import Found
from tests.support import fairscaled, llama, proof

pytest.importorskip("fairscale")


def claim(chunks: list[Any], said: Any, group: Any) -> Found:
    return Found("followed", "a test says so", lambda: fairscaled.adapter(chunks, said, group))


def build(size: int) -> proof.Built:
    registry.BUILT_IN = (("torch", claim),)
    model = fairscaled.llama_of(size)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens), labels)
        loss.backward()
        return loss

    return proof.Built(model, step, options={"tensor_parallel_size": size})


@pytest.mark.parametrize("size", [2, 4])
def test_the_model(size: int) -> None:
    found = proof.compare("fairscale", f"followed tp{size}", size, build, size)
    wrong = [c for c in found if not c.error < 1e-5]
    assert not wrong
