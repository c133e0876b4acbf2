"""transformers' own tensor parallelism: `from_pretrained(..., tp_plan="auto")`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support import hf_llama, llama, proof

pytest.importorskip("transformers")


def build(folder: str, attention: str) -> proof.Built:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation=attention)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = llama.loss_of(model(tokens).logits, labels)
        loss.backward()
        return loss

    return proof.Built(model, step, name=hf_llama.theirs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_plan(attention: str, tmp_path: Path, cells: list[Any]) -> None:
    found = proof.compare(
        "Hugging Face",
        f"tp_plan tp2 {attention}",
        2,
        build,
        hf_llama.save(tmp_path),
        attention,
        parameter=hf_llama.ours,
        alone=True,
    )
    proof.judge(found, cells)
