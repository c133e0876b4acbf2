"""Packed sequences on a CPU, for tests: documents one behind the other in one row, and attention within each.

Megatron's own `DotProductAttention` refuses them, and context parallelism. This one gives it the batch dim
back, the keys and values of all context parallel ranks and a mask by `cu_seqlens`, and returns what
Transformer Engine returns of `qkv_format="thd"`, zeros for padding; the rest is Megatron's.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.support import context

ENDS = (0, 5, 16, 23, 32)  # of the documents that are made of two samples of sixteen tokens
ROOM = (0, 8, 24, 32, 48)  # the same, each padded to a multiple of eight
Form = Literal["flat", "heads", "kept"]


def length(padded: bool) -> int:
    """The tokens of a row."""
    return (ROOM if padded else ENDS)[-1]


def pack(batch: dict[str, Tensor], padded: bool = False) -> dict[str, Tensor]:
    """A microbatch with all its tokens in one row."""
    ends, room = (torch.tensor(n, dtype=torch.int32) for n in (ENDS, ROOM if padded else ENDS))
    out = {"ends": ends, "room": room}
    for name, tensor in batch.items():
        row = tensor.new_zeros(1, int(room[-1]))
        row[:, real(out)] = tensor.reshape(1, -1)
        out[name] = row
    return out


def real(batch: dict[str, Tensor]) -> Tensor:
    """Which tokens of the row are no padding."""
    return _documents(batch["ends"], batch["room"]) >= 0


def _documents(ends: Tensor, room: Tensor) -> Tensor:
    """The document of each token of the row; -1 of padding."""
    out = torch.full((int(room[-1]),), -1)
    for number, (start, count) in enumerate(zip(room[:-1].tolist(), ends.diff().tolist(), strict=True)):
        out[start : start + count] = number
    return out


def here(room: Tensor, rank: int | None = None) -> Tensor:
    """The tokens of the row that a context parallel rank has: of each document two chunks; of this rank."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    at = parallel_state.get_context_parallel_rank() if rank is None else rank
    if size == 1:
        return torch.arange(int(room[-1]))
    pairs = zip(room[:-1].tolist(), room.diff().tolist(), strict=True)
    return torch.cat([start + context.places(count, size, at) for start, count in pairs])


def call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What the model makes of a packed microbatch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends, room = batch["ends"], batch["room"]
    most, apart = int(room.diff().max()), not torch.equal(ends, room)
    device = next(model.parameters()).device
    ends, rows = ends.to(device), room.to(device)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=rows if apart else None,
        cu_seqlens_kv_padded=rows if apart else None,
        max_seqlen_q=most,
        max_seqlen_kv=most,
    )
    mine = here(room)
    positions = torch.cat([torch.arange(int(n)) for n in room.diff()])[None, mine]
    tokens, labels = batch["tokens"][:, mine], batch["labels"][:, mine]
    tokens, positions, labels = (t.to(device) for t in (tokens, positions, labels))
    return model(tokens, positions, None, labels=labels, packed_seq_params=params)


def attention(base: type, form: Form) -> type:
    """The class, to be named in a layer spec.

    Args:
        base: Megatron's class, or one derived from it.
        form: what it returns of `t` tokens: `flat` is Transformer Engine's `[t, n*d]`, `heads` `[t, n, d]`,
            `kept` `[t, 1, n*d]`.
    """

    class PackedAttention(base):
        apart = form == "heads"

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **kwargs)
            self.config = config

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, mask: Any, packed_seq_params: Any, **kwargs: Any
        ) -> Tensor:
            ends, room = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
            ends, room = ends.cpu(), (ends if room is None else room).cpu()
            assert query.dim() == 3, "Megatron drops the batch dim"
            key, value = _all_tokens(key, room), _all_tokens(value, room)
            document, places, mine = _documents(ends, room), torch.arange(len(key)), here(room)
            mask = (document[mine][:, None] != document[None]) | (places[None] > mine[:, None])
            whole = [t.unsqueeze(1) for t in (query, key, value)]
            self.hidden_size_per_partition = value.shape[1] * value.shape[2]  # multi-latent: padded
            if value.shape[1] != query.shape[1]:
                self.hidden_size_per_partition = query.shape[1] * value.shape[2]
            out: Tensor = super().forward(*whole, mask[None, None].to(query.device), **kwargs)
            if (document < 0).any():
                out = out * (document[mine] >= 0)[:, None, None].to(query.device)
            if form == "kept":
                return out
            return out.squeeze(1) if form == "flat" else out.view(out.shape[0], query.shape[1], -1)

    return PackedAttention


def _all_tokens(part: Tensor, room: Tensor) -> Tensor:
    """Keys or values of all context parallel ranks, in the order of the row."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return part
    order = torch.cat([here(room, r) for r in range(size)])
    whole: Tensor = context.Gather.apply(part, parallel_state.get_context_parallel_group(), order)
    return whole


def plug_in(spec: Any, form: Form) -> Any:
    """A layer spec of Megatron's, with this attention in it."""
    spec = copy.deepcopy(spec)
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = attention(parts.core_attention, form)
    return spec
