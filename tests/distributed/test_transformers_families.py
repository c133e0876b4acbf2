"""Gradients of parameters under transformers' `tp_plan`, family by family, however they are asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_flex as mf
from tests.distributed.matrix import Cell, judge, relative
from tests.support.pool import run_alone as run  # their styles change torch's modules for good

pytest.importorskip("transformers")

VOCABULARY, SAMPLES, TOKENS = 64, 2, 12
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "use_cache": False,
}
EXPERTS = {"num_experts_per_tok": 2}
ROUTED = {"num_experts": 4, "moe_intermediate_size": 16, **EXPERTS}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 4}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {"head_dim": 4, **ROUTED},
    ),
    "Gemma-3": ("Gemma3TextConfig", {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 8}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, **EXPERTS}),
    "GPT-OSS": ("GptOssConfig", {"head_dim": 4, "num_local_experts": 4, "sliding_window": 8, **EXPERTS}),
    "Phi": ("PhiConfig", {}),
    "Phi-3": ("Phi3Config", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
}
ATTENTIONS = ("eager", "sdpa")
WITHOUT_SDPA = {("GPT-OSS", "sdpa")}
CASES = [(f, a) for f in FAMILIES for a in ATTENTIONS if (f, a) not in WITHOUT_SDPA]


def step(model: nn.Module) -> float:
    """The loss of a batch, with its gradients."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=drawn)
    logits = model(tokens).logits.float()[:, :-1].reshape(-1, VOCABULARY)
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
    loss.backward()
    return loss.item()


def alone(folder: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Each family on one process: its parameters and gradients. The models are written, as they are read."""
    import transformers

    out = {}
    for family, (kind, more) in FAMILIES.items():
        config = getattr(transformers, kind)(**{**TINY, **more})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + float(parameter.dim() == 1))
        step(model)
        model.save_pretrained(f"{folder}/{family}")
        named = dict(model.named_parameters())
        values = {n: p.detach() for n, p in named.items()}
        out[family] = values, {n: p.grad for n, p in named.items() if p.grad is not None}
    return out


def gradients(family: str, attention: str, folder: str) -> dict[str, dict[str, Tensor]]:
    """Each way to ask for the gradients of all parameters, each in a step of its own."""
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": attention, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{family}", tp_plan="auto", **options)
    out: dict[str, dict[str, Tensor]] = {}
    names = [n for n, _ in model.named_parameters()]

    def named(flex: Any) -> dict[str, Tensor]:
        return {n: t.clone() for n, t in flex.named_full_parameters(gradients=True, everywhere=True)}

    with mf.FlexModel(model) as flex:
        out["values"] = {n: t.clone() for n, t in flex.named_full_parameters(everywhere=True)}
        step(model)
        out["without hooks"] = named(flex)
    model.zero_grad()
    with mf.attach(model, [mf.HookFunction("model.layers.*")]) as flex:
        step(model)
        out["all of them"] = named(flex)
        out["one by one"] = {n: flex.get_module_parameter(n, gradient=True, everywhere=True) for n in names}
    model.zero_grad()
    with mf.FlexModel(model) as flex:
        for name in names:
            with contextlib.suppress(mf.HookError):  # DTensors' come in a way that no hook is told
                flex.register_hook(mf.HookFunction(name, hook_type="tensor"))
        step(model)
        out["hooks"] = {n.removesuffix(".grad"): read[0].clone() for n, read in flex.output_dict.items()}
    model.zero_grad()
    path = f"{folder}/{family} {attention}"
    with mf.attach(model, dumps=mf.Dump(path, parameters="**", gradients=True)) as flex, flex.step():
        step(model)
    torch.distributed.barrier()  # every rank has written its part
    with mf.open_dump(path) as dump:
        out["dump"] = {n: dump.parameter(n, gradient=True).torch()[0] for n in dump.parameters}
    return out


def spread(folder: str) -> dict[tuple[str, str], dict[str, dict[str, Tensor]]]:
    """All families on these ranks."""
    return {(f, a): gradients(f, a, folder) for f, a in CASES}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process's gradients, and the leader's; a rank loads transformers once for all families."""
    folder = str(tmp_path_factory.mktemp("families"))
    (truth,) = run(1, alone, folder)
    return truth, run(2, spread, folder, timeout=280)[0]


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_gradients_of_parameters(family: str, attention: str, found: Any, cells: list[Any]) -> None:
    (values, truth), ways = found[0][family], found[1][family, attention]
    read = ways.pop("values")
    assert read.keys() == values.keys()
    compared = [
        Cell(f"{family} {attention}", n, "parameter", relative(t, values[n]), model="Hugging Face")
        for n, t in read.items()
    ]
    for way, got in ways.items():
        if way != "hooks":
            assert got.keys() == truth.keys(), way
        compared += [
            Cell(
                f"{family} {attention}, {way}",
                n,
                "parameter gradients",
                relative(g, truth[n]),
                model="Hugging Face",
            )
            for n, g in got.items()
        ]
    norms = {n for n in truth if n.endswith("norm.weight")}
    assert norms <= ways["hooks"].keys()
    judge(compared, cells)
