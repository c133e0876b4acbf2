"""One LLaMA-like model under every framework: its weights and its names as Megatron has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import gpt, llama

TP = {"tp": 2, "layers": llama.LAYERS, "groups": llama.GROUPS, "microbatches": 1}
SIZES = {"num_attention_heads": llama.HEADS, "kv_channels": llama.HEAD}
CASES = {
    "tp2": gpt.Case("tp2", **TP, extra=SIZES),
    "tp2 pp2": gpt.Case("tp2 pp2", pp=2, **TP, extra=SIZES, split={"num_layers_in_first_pipeline_stage": 1}),
}

# A module of one process to what Megatron calls it, the fused ones with their part's name for the point.
MODULES = {
    "tok_embeddings": "embedding",
    "attention_norm": "input_layernorm",
    "attention.wq:output": "self_attention.linear_qkv:q",
    "attention.wk:output": "self_attention.linear_qkv:k",
    "attention.wo": "self_attention.linear_proj",
    "attention": "self_attention.linear_proj",
    "ffn_norm": "pre_mlp_layernorm",
    "feed_forward.w1:output": "mlp.linear_fc1:gate",
    "feed_forward.w2": "mlp.linear_fc2",
    "norm": "decoder.final_layernorm",
    "output": "output_layer",
}


def megatron(site: str) -> str:
    """The name that a site of the single-process model has in Megatron."""
    path, _, point = site.partition(":")
    layer, inside = "", path
    if path.startswith("layers."):
        _, number, *rest = path.split(".")
        layer, inside = f"decoder.layers.{number}", ".".join(rest)
    fused = MODULES.get(f"{inside}:{point}")
    if fused is not None:
        return f"{layer}.{fused}"
    return ".".join(filter(None, (layer, MODULES[inside] if inside else ""))) + f":{point}"


def batch_first(site: str, tensor: Tensor) -> Tensor:
    """What Megatron has as `[s, b, ...]` with heads apart, as the single-process model has it."""
    return tensor.transpose(0, 1).flatten(2)


def state() -> dict[str, Tensor]:
    """The single-process weights by Megatron's names."""
    own = {name: p.detach() for name, p in llama.single().named_parameters()}
    out = {
        "embedding.word_embeddings.weight": own["tok_embeddings.weight"],
        "decoder.final_layernorm.weight": own["norm.weight"],
        "output_layer.weight": own["output.weight"],
    }
    for number in range(llama.LAYERS):
        theirs, ours = f"layers.{number}", f"decoder.layers.{number}"
        parts = [own[f"{theirs}.attention.w{part}.weight"] for part in "qkv"]
        grouped = [part.reshape(llama.GROUPS, -1, llama.HIDDEN) for part in parts]
        out[f"{ours}.self_attention.linear_qkv.weight"] = torch.cat(grouped, dim=1).flatten(0, 1)
        gate, up = (own[f"{theirs}.feed_forward.{part}.weight"] for part in ("w1", "w3"))
        out[f"{ours}.mlp.linear_fc1.weight"] = torch.cat([gate, up])
        for mine, other in (
            ("input_layernorm", "attention_norm"),
            ("self_attention.linear_proj", "attention.wo"),
            ("pre_mlp_layernorm", "ffn_norm"),
            ("mlp.linear_fc2", "feed_forward.w2"),
        ):
            out[f"{ours}.{mine}.weight"] = own[f"{theirs}.{other}.weight"]
    return out


def build(name: str) -> list[nn.Module]:
    """This rank's chunks of the model in Megatron."""
    from tests.support import ranks

    chunks = ranks.start(CASES[name])
    gpt.load(chunks, state())
    return chunks


def step(chunks: list[nn.Module], tokens: Tensor, labels: Tensor) -> None:
    """Megatron's own schedule over one microbatch."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        inputs, wanted = next(batches)
        positions = torch.arange(inputs.shape[1]).expand(len(inputs), -1)
        mask = torch.ones(1, 1, inputs.shape[1], inputs.shape[1], dtype=torch.bool).triu(1)
        output = model(inputs, positions, mask, labels=wanted)
        return output, lambda losses: (losses.mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([(tokens, labels)]),
        model=chunks[0],
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=False,
    )
