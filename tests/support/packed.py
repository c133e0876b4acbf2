"""Packed sequences on a CPU, for tests: documents one behind the other in one row, and attention within each.

Megatron's own `DotProductAttention` refuses them. This one gives it the batch dim back and a mask by
`cu_seqlens`, and returns what Transformer Engine returns of `qkv_format="thd"`; the rest is Megatron's.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

ENDS = (0, 5, 16, 23, 32)  # of the documents that are made of two samples of sixteen tokens
Form = Literal["flat", "heads", "kept"]


def pack(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A microbatch with all its tokens in one row."""
    return {**{k: t.reshape(1, -1) for k, t in batch.items()}, "ends": torch.tensor(ENDS, dtype=torch.int32)}


def call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the model makes of a packed microbatch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends, most = batch["ends"], int(batch["ends"].diff().max())
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=most, max_seqlen_kv=most
    )
    positions = torch.cat([torch.arange(int(n)) for n in ends.diff()])[None]
    return model(batch["tokens"], positions, None, labels=batch["labels"], packed_seq_params=params)


def attention(base: type, form: Form) -> type:
    """The class, to be named in a layer spec.

    Args:
        base: Megatron's class, or one derived from it.
        form: what it returns of `t` tokens: `flat` is Transformer Engine's `[t, n*d]`, `heads` `[t, n, d]`,
            `kept` `[t, 1, n*d]`.
    """

    class PackedAttention(base):
        apart = form == "heads"

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, mask: Any, packed_seq_params: Any, **kwargs: Any
        ) -> Tensor:
            ends = packed_seq_params.cu_seqlens_q
            assert query.dim() == 3, "Megatron drops the batch dim"
            places = torch.arange(query.shape[0])
            document = torch.bucketize(places, ends[1:].long(), right=True)
            mask = (document[:, None] != document[None]) | (places[None] > places[:, None])
            whole = [t.unsqueeze(1) for t in (query, key, value)]
            self.hidden_size_per_partition = value.shape[1] * value.shape[2]  # multi-latent: padded
            if value.shape[1] != query.shape[1]:
                self.hidden_size_per_partition = query.shape[1] * value.shape[2]
            out: Tensor = super().forward(*whole, mask[None, None], **kwargs)
            if form == "kept":
                return out
            return out.squeeze(1) if form == "flat" else out.view(out.shape[0], query.shape[1], -1)

    return PackedAttention


def plug_in(spec: Any, form: Form) -> Any:
    """A layer spec of Megatron's, with this attention in it."""
    spec = copy.deepcopy(spec)
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = attention(parts.core_attention, form)
    return spec
