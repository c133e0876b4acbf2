"""Models of Transformers with random weights, and the same models in Megatron."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support import gpt, ranks
from tests.support.gpt import Case

with contextlib.suppress(ImportError):  # before a rank is compared with itself: it adds a finder of imports
    import transformers

LAYERS = 2
HEAD = gpt.HIDDEN // gpt.HEADS
EPSILON = 1e-5  # Megatron's


def _case(name: str, **kwargs: Any) -> Case:
    return Case(f"{name} tp2 sp pp2", tp=2, sp=True, pp=2, layers=LAYERS, microbatches=1, **kwargs)


PLAIN = {"gated": False, "rms": False, "rope": False, "bias": True, "tied": True, "groups": gpt.HEADS}
TANH_GELU = {"activation_func": partial(nn.functional.gelu, approximate="tanh")}
FAMILIES = {"gpt2": _case("gpt2", **PLAIN, extra=TANH_GELU), "llama": _case("llama")}


def transformers_model(family: str) -> Any:
    """The model in Transformers, with weights that hide nothing (norms and biases too)."""
    common = {
        "vocab_size": gpt.VOCABULARY,
        "attn_implementation": "eager",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_positions=gpt.SEQUENCE,
            n_embd=gpt.HIDDEN,
            n_layer=LAYERS,
            n_head=gpt.HEADS,
            n_inner=gpt.FFN,
            layer_norm_epsilon=EPSILON,
            **common,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=gpt.HIDDEN,
            intermediate_size=gpt.FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=gpt.HEADS,
            num_key_value_heads=gpt.GROUPS,
            max_position_embeddings=gpt.SEQUENCE,
            rms_norm_eps=EPSILON,
            tie_word_embeddings=False,
            **common,
        )
        model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        norm = "norm" in name or ".ln_" in name
        scale, offset = (0.2, 1.0) if norm and name.endswith("weight") else (0.15, 0.0)
        parameter.data.copy_(offset + scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def converted(case: Case, family: str) -> list[Any]:
    """The chunks of this rank, with the weights of the model."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    loaded = mf.load_hf(chunks, transformers_model(family))
    assert loaded.differences == (), loaded.differences
    return chunks
