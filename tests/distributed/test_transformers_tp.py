"""transformers' own tensor parallelism: `from_pretrained(..., tp_plan="auto")`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_flex as mf
from tests.distributed.matrix import BOUND, relative
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


EDITED = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.act_fn")
READ = ("model.layers.1.self_attn.q_proj", "model.layers.2", "lm_head")
NEW = 5


def turned(inputs: Tensor) -> Tensor:
    """An edit that no shard can do by itself; the keys that it changes stay in the cache."""
    return inputs + 0.5 * inputs.flip(-1) + inputs.mean()


def loaded(folder: str, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def generate(model: Any) -> Tensor:
    """Greedy tokens after prompts of the same length, with a cache of keys and values."""
    tokens, _ = llama.batch(0)
    found: Tensor = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, use_cache=True
    )
    return found[:, tokens.shape[1] :]


def generated_alone(folder: str) -> dict[str, Any]:
    """One process of transformers, with torch's own hooks."""
    model = loaded(folder)
    out: dict[str, Any] = {"plain": generate(model), "read": {name: [] for name in READ}}
    for name in EDITED:
        model.get_submodule(name).register_forward_hook(lambda m, args, output: turned(output))
    for name in READ:
        model.get_submodule(name).register_forward_hook(
            lambda m, args, output, name=name: out["read"][name].append(output.detach().clone())
        )
    out["edited"] = generate(model)
    return out


def generated(folder: str) -> dict[str, Any]:
    """The same under `tp_plan`, each call of the model a step."""
    model = loaded(folder, tp_plan="auto")
    out: dict[str, Any] = {"plain": generate(model), "read": {name: [] for name in READ}}

    def edit(module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        return turned(inputs)

    def read(name: str, module: Any, inputs: Tensor, save_ctx: Any, modules: Any) -> Tensor:
        out["read"][name].append(inputs.detach().clone())
        return inputs

    hooks = [mf.HookFunction(name, editing_function=edit, save=False) for name in EDITED]
    hooks += [mf.HookFunction(name, editing_function=partial(read, name)) for name in READ]
    with mf.attach(model, hooks) as flex:
        out["edited"] = generate(model)
        out["last"] = {site: list(got) for site, got in flex.output_dict.items()}
    out["after"] = generate(model)
    return out


def test_generate(tmp_path: Path) -> None:
    """Hooks read and edit at each generated token, the prompt's call first."""
    folder = hf_llama.save(tmp_path)
    (truth,) = proof.run(1, generated_alone, folder, alone=True)
    assert not torch.equal(truth["plain"], truth["edited"])
    for rank, found in enumerate(proof.run(2, generated, folder, alone=True)):
        for kind in ("plain", "edited"):
            assert torch.equal(found[kind], truth[kind]), kind
        assert torch.equal(found["after"], truth["plain"])
        for name, wanted in truth["read"].items():
            assert len(found["read"][name]) == len(wanted) == NEW
            assert max(map(relative, found["read"][name], wanted)) <= BOUND, name
            if rank == 0:
                assert relative(found["last"][f"{name}:output"][-1], wanted[-1]) <= BOUND
