"""Multi-latent attention in tests: its configuration, its sites by hand, and a mended upstream.

Upstream's gradients on several tensor parallel ranks differ from those of one: the rotary part of the keys is
gathered on all ranks, each uses it for its own heads, and the gather's backward takes a slice where it should
take a slice of the sum. `mend` adds that sum, so that everything else can be held to one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.rank import changes

KV, ROTARY, PLAIN, VALUE = 16, 4, 8, 8
UPSTREAM = "the keys' rotary part gets the gradient of a rank's own heads only (multi_latent_attention.py)"


def config(rank: int | None) -> dict[str, Any]:
    """What multi-latent attention adds to the configuration; `rank` is that of queries."""
    return {
        "q_lora_rank": rank,
        "kv_lora_rank": KV,
        "qk_head_dim": PLAIN,
        "qk_pos_emb_head_dim": ROTARY,
        "v_head_dim": VALUE,
        "rope_type": "rope",
        "num_query_groups": None,
        "rotary_base": 100.0,
    }


def core_attention() -> type:
    """Megatron's local attention, made to take heads of two sizes.

    The local spec hands `k_channels` and `v_channels` to a class that knows neither: without Transformer
    Engine upstream's own spec cannot be built, in any version. Only the last view needs the values' size.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(
            self, *args: Any, k_channels: int | None = None, v_channels: int = VALUE, **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return Attention


class _SumOfGradients(torch.autograd.Function):
    """`copy_to_tensor_model_parallel_region` does this too, but not before 0.19 if not contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        from megatron.core import parallel_state

        total = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total


def mend() -> None:
    """Sum the gradient of the keys' rotary part over tensor parallel ranks, for this function of the rank."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import multi_latent_attention as upstream

    gather = mappings.gather_from_tensor_model_parallel_region

    def mended(local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = gather(local, *args, **kwargs)
        if whole.shape[-1] != KV + ROTARY:
            return whole
        latents, rotary = whole.split([KV, ROTARY], -1)
        return torch.cat([latents, _SumOfGradients.apply(rotary)], -1)  # type: ignore[no-untyped-call]

    changes.setattr(upstream, "gather_from_tensor_model_parallel_region", mended)


def sites(rank: int | None, norms: bool) -> list[str]:
    """The sites of one layer's attention."""
    linears = ["linear_q_down_proj", "linear_q_up_proj"] if rank else ["linear_q_proj"]
    out = [f"self_attention:{p}" for p in ("input", "output")]
    for linear in (*linears, "linear_kv_down_proj", "linear_kv_up_proj"):
        out += [f"self_attention.{linear}:{p}" for p in ("input", "gemm_input", "output")]
    for norm in (("q", "kv") if rank else ("kv",)) if norms else ():
        out += [f"self_attention.{norm}_layernorm:{p}" for p in ("input", "output")]
    out += [f"self_attention.core_attention:{p}" for p in ("q", "k", "v", "scores", "probs", "output")]
    out += [f"self_attention.linear_proj:{p}" for p in ("input", "partial", "output")]
    return [*out, *(f"input_layernorm:{p}" for p in ("input", "output"))]
