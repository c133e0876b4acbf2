"""What a model of Transformers is in Megatron: its configuration, and its weights as whole parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import gpt, ranks
from tests.support.gpt import Case

LAYERS = 2


def _case(name: str, **kwargs: Any) -> Case:
    return Case(f"{name} tp2 sp pp2", tp=2, sp=True, pp=2, layers=LAYERS, microbatches=1, **kwargs)


PLAIN = {"gated": False, "rms": False, "rope": False, "bias": True, "tied": True, "groups": gpt.HEADS}
TANH_GELU = {"activation_func": partial(nn.functional.gelu, approximate="tanh")}
FAMILIES = {"gpt2": _case("gpt2", **PLAIN, extra=TANH_GELU), "llama": _case("llama")}


def megatron_state(family: str, source: Any) -> dict[str, Tensor]:
    """What each Megatron parameter of the model is on one device, by global name."""
    state = {name: value.detach() for name, value in source.named_parameters()}
    return _from_gpt2(state) if family == "gpt2" else _from_llama(state)


def _interleaved(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Rows of a fused projection: for each group its queries, its key, its value."""
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _from_gpt2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformers' Conv1D keeps a weight as [in, out], Megatron as [out, in]."""
    out = {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"decoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for layer in range(LAYERS):
            theirs, ours = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            fused = state[f"{theirs}.attn.c_attn.{kind}"]
            q, k, v = (part.T.contiguous() if part.dim() == 2 else part for part in fused.chunk(3, dim=-1))
            out[f"{ours}.self_attention.linear_qkv.{kind}"] = _interleaved(q, k, v, gpt.HEADS)
            for mine, other in (
                ("input_layernorm", "ln_1"),
                ("self_attention.linear_proj", "attn.c_proj"),
                ("pre_mlp_layernorm", "ln_2"),
                ("mlp.linear_fc1", "mlp.c_fc"),
                ("mlp.linear_fc2", "mlp.c_proj"),
            ):
                out[f"{ours}.{mine}.{kind}"] = state[f"{theirs}.{other}.{kind}"].T.contiguous()
    return out


def _from_llama(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transformers turns the halves of a head, as Megatron does unless told to interleave them."""
    out = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(LAYERS):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        q, k, v = (state[f"{theirs}.self_attn.{part}_proj.weight"] for part in "qkv")
        gate, up = (state[f"{theirs}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
        out[f"{ours}.self_attention.linear_qkv.weight"] = _interleaved(q, k, v, gpt.GROUPS)
        out[f"{ours}.mlp.linear_fc1.weight"] = torch.cat([gate, up])
        for mine, other in (
            ("input_layernorm", "input_layernorm"),
            ("self_attention.linear_proj", "self_attn.o_proj"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
            ("mlp.linear_fc2", "mlp.down_proj"),
        ):
            out[f"{ours}.{mine}.weight"] = state[f"{theirs}.{other}.weight"]
    return out


def converted(case: Case, state: dict[str, Tensor]) -> list[Any]:
    """The chunks of this rank, each parameter of the model set from its whole."""
    import megatron_flex as mf

    chunks = ranks.start(case)
    with mf.FlexModel(chunks) as flex:
        for name, value in state.items():
            flex.set_module_parameter(name, value)
        listed = {name for name, _ in flex.named_full_parameters(everywhere=True)}
    assert listed == set(state), "every parameter was set"
    return chunks
