"""Attention as Meta's LLaMA writes it, with the weights of `llama`.

Views by each rank's own numbers of heads, complex rotary embeddings, keys and values repeated by `expand`,
and a cache of them that is written in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import llama


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn `[b, s, n, d]` by position, the halves of the last dim as complex numbers."""
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).contiguous())
    factors = torch.complex(angles[0], angles[1]).view(1, x.shape[1], 1, -1)
    turned = torch.view_as_real(numbers * factors)
    return turned.transpose(-1, -2).flatten(3).type_as(x)


def repeat(x: Tensor, times: int) -> Tensor:
    """Repeat each head of `[b, s, n, d]`."""
    if times == 1:
        return x
    batch, tokens, heads, width = x.shape
    return x[:, :, :, None, :].expand(batch, tokens, heads, times, width).reshape(batch, tokens, -1, width)


class Attention(llama.Attention):
    """Causal self-attention.

    Args:
        parts: what makes its layers.
        ways: the number of ranks that share the heads.
        cached: whether keys and values pass through a cache.
    """

    def __init__(self, parts: llama.Parts, ways: int, cached: bool) -> None:
        super().__init__(parts)
        self.heads, self.groups, self.cached = llama.HEADS // ways, llama.GROUPS // ways, cached
        shape = 2 * llama.SAMPLES, 2 * llama.TOKENS, self.groups, llama.HEAD
        self.cache_k, self.cache_v = torch.zeros(shape), torch.zeros(shape)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        batch, tokens = xq.shape[:2]
        xq = xq.view(batch, tokens, self.heads, llama.HEAD)
        xk = xk.view(batch, tokens, self.groups, llama.HEAD)
        xv = xv.view(batch, tokens, self.groups, llama.HEAD)
        xq, keys, values = turn(xq, angles), turn(xk, angles), xv
        if self.cached:
            self.cache_k, self.cache_v = self.cache_k.detach().to(xq), self.cache_v.detach().to(xq)
            self.cache_k[:batch, 0:tokens] = keys
            self.cache_v[:batch, 0:tokens] = values
            keys, values = self.cache_k[:batch, :tokens], self.cache_v[:batch, :tokens]
        keys, values = repeat(keys, self.heads // self.groups), repeat(values, self.heads // self.groups)
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / llama.HEAD**0.5
        scores = scores + torch.full((tokens, tokens), float("-inf")).triu(1)
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values).transpose(1, 2).contiguous().view(batch, tokens, -1)
        return self.wo(output)
