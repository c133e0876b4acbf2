"""Names of parameters in any of Megatron's decoders, as a GPTModel with the local spec has them.

A HybridModel has attention and MLP as layers of their own; Transformer Engine has norms inside linears, and
the weights of experts in one module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_flex.gpt_names import GPT_FINAL_NORM, HYBRID_FINAL_NORM, MLP, part_kind

# Parts of names under a layer in other specs, and what the local spec calls them.
ALIASES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(\w+)"), r"input_layernorm.\1"),
    (re.compile(r"self_attention\.linear_q_up_proj\.layer_norm_(\w+)"), r"self_attention.q_layernorm.\1"),
    (re.compile(r"self_attention\.linear_kv_up_proj\.layer_norm_(\w+)"), r"self_attention.kv_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(\w+)"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)"), r"mlp.experts.local_experts.\3.\1.\2"),
)
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """For the names of a full model's parameters, those that a GPTModel with the local spec would have.

    Layers are numbered as a transformer's: the third attention layer of a HybridModel belongs to layer 2, and
    so does its third MLP.

    Args:
        names: the global names of all parameters, on all stages.
    """
    gpt_names: dict[str, str] = {}
    layers: list[tuple[str, int, str]] = []
    for name in names:
        match = LAYER.fullmatch(name)
        if match is None:
            gpt_names[name] = name.replace(f"{HYBRID_FINAL_NORM}.", f"{GPT_FINAL_NORM}.")
            continue
        layers.append((name, int(match[1]), _plain_name(match[2])))
    numbers = {
        of_mlp: {
            layer: n for n, layer in enumerate(sorted({k for _, k, p in layers if _of_mlp(p) == of_mlp}))
        }
        for of_mlp in (False, True)
    }
    for name, layer, part in layers:
        gpt_names[name] = f"decoder.layers.{numbers[_of_mlp(part)][layer]}.{part}"
    return gpt_names


def _of_mlp(part: str) -> bool:
    return part_kind(part.partition(".")[0]) == MLP  # the others are attention's


def _plain_name(part: str) -> str:
    for pattern, plain in ALIASES:
        part = pattern.sub(plain, part)
    return part
