"""A LLaMA-style model whose linears and embeddings come from whatever framework a test runs it under.

Grouped-query attention, rotary positions, RMSNorm, SwiGLU; batch first, as people write it outside Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, FFN, HEADS, GROUPS, LAYERS = 64, 32, 48, 8, 4, 3
HEAD = HIDDEN // HEADS
SAMPLES, TOKENS = 2, 8


def _linear(cut: str, inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def _embedding(vocabulary: int, width: int) -> nn.Module:
    return nn.Embedding(vocabulary, width)


@dataclass(frozen=True)
class Parts:
    """What a framework makes a model of.

    Attributes:
        linear: called with how it is cut (`column`, `row`, or `logits` for the last one), inputs, outputs.
        embedding: called with the vocabulary and the width.
        attention: called with these parts; the attention of this file if None.
    """

    linear: Callable[[str, int, int], nn.Module] = _linear
    embedding: Callable[[int, int], nn.Module] = _embedding
    attention: Callable[[Parts], nn.Module] | None = None


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotary(tokens: int) -> Tensor:
    """Cosines and sines of each position, `[2, s, d / 2]`."""
    rates = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(tokens).float(), rates)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn `[b, s, n, d]` by position."""
    cos, sin = angles[:, None, :, None, :]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.wq = parts.linear("column", HIDDEN, HIDDEN)
        self.wk = parts.linear("column", HIDDEN, GROUPS * HEAD)
        self.wv = parts.linear("column", HIDDEN, GROUPS * HEAD)
        self.wo = parts.linear("row", HIDDEN, HIDDEN)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (w(x) for w in (self.wq, self.wk, self.wv))
        batch, tokens = q.shape[:2]  # of `x` it may be cut
        q, k, v = (t.view(batch, tokens, -1, HEAD) for t in (q, k, v))
        q, k = rotate(q, angles), rotate(k, angles)
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / HEAD**0.5
        mask = torch.full((tokens, tokens), float("-inf"), device=scores.device).triu(1)
        out = F.softmax(scores + mask, dim=-1) @ v.transpose(1, 2)
        return self.wo(out.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.w1 = parts.linear("column", HIDDEN, FFN)
        self.w3 = parts.linear("column", HIDDEN, FFN)
        self.act = nn.SiLU()
        self.w2 = parts.linear("row", FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A layer."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.attention = (parts.attention or Attention)(parts)
        self.feed_forward = FeedForward(parts)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """The model; `[b, s]` of tokens to `[b, s, v]` of logits."""

    def __init__(self, parts: Parts | None = None, layers: int = LAYERS) -> None:
        super().__init__()
        parts = parts or Parts()
        self.tok_embeddings = parts.embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict({str(n): Block(parts) for n in range(layers)})
        self.norm = Norm()
        self.output = parts.linear("logits", HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Stages of a pipeline have only some of the parts; the first gets tokens, others hidden states."""
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        angles = rotary(TOKENS).to(x.device)
        for layer in self.layers.values():
            x = layer(x, angles)
        return x if self.output is None else self.output(self.norm(x))


def single() -> Llama:
    """The model as one process has it, with the same weights each time."""
    generator = torch.Generator().manual_seed(1)
    model = Llama()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else noise / parameter.shape[-1] ** 0.5)
    return model


def batch(replica: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Tokens and labels `[b, s]` of one data parallel replica."""
    generator = torch.Generator().manual_seed(10 + replica)
    tokens = torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of whole logits."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def mixed(tensor: Tensor) -> Tensor:
    """An edit that no shard can do by itself: every feature sees every other, and tokens see tokens."""
    return tensor + 0.1 * tensor.flip(-1) * tensor.mean() + 0.05 * tensor.roll(1, 1)


SITES = (  # whose values and gradients every framework is compared on, where it has them
    "tok_embeddings:output",
    *(
        f"layers.{n}.{rest}"
        for n in range(LAYERS)
        for rest in (
            "attention_norm:output",
            "attention.wq:output",
            "attention.wk:output",
            "attention.wo:input",
            "attention:output",
            "ffn_norm:input",
            "feed_forward.w1:output",
            "feed_forward.act:output",
            "feed_forward.w2:input",
            "feed_forward.w2:output",
            ":output",
        )
    ),
    "norm:output",
    "output:output",
)
SITES = tuple(s.replace(".:", ":") for s in SITES)
EDITED = (
    "tok_embeddings:output",
    "layers.1.attention.wq:output",
    "layers.1.feed_forward.act:output",
    "layers.1:output",
    "output:output",
)


def truth(
    replicas: int = 1,
    sites: Sequence[str] = SITES,
    edits: Sequence[str] = EDITED,
    microbatches: int = 1,
    samples: int = SAMPLES,
) -> list[dict[str, Any]]:
    """What one process has for each replica's batch, by torch's own hooks: values, gradients, edits."""
    return [_of_microbatches(batch(r, samples), microbatches, sites, edits) for r in range(replicas)]


def _of_microbatches(
    data: tuple[Tensor, Tensor], count: int, sites: Sequence[str], edits: Sequence[str]
) -> dict[str, Any]:
    """Each microbatch by itself: tensors one behind the other, losses and parameter gradients averaged."""
    found = [_truth(part, sites, edits) for part in zip(*(t.chunk(count) for t in data), strict=True)]

    def mean(of: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        return torch.stack([of(f) for f in found]).mean(0)

    out: dict[str, Any] = {"parameters": found[0]["parameters"], "loss": mean(lambda f: f["loss"])}
    for kind in ("values", "gradients"):
        out[kind] = {s: torch.cat([f[kind][s] for f in found]) for s in found[0][kind]}
    named = found[0]["parameter gradients"]
    out["parameter gradients"] = {n: mean(lambda f, n=n: f["parameter gradients"][n]) for n in named}
    out["edited"] = {
        s: (
            mean(lambda f, s=s: f["edited"][s][0]),
            {n: mean(lambda f, s=s, n=n: f["edited"][s][1][n]) for n in named},
        )
        for s in found[0]["edited"]
    }
    return out


def _truth(data: tuple[Tensor, Tensor], sites: Sequence[str], edits: Sequence[str]) -> dict[str, Any]:
    tokens, labels = data
    out: dict[str, Any] = {"values": {}, "gradients": {}, "edited": {}}
    model = single()
    for site in sites:
        install(model, site, lambda t, s=site: _keep(t, out, s))
    loss = loss_of(model(tokens), labels)
    loss.backward()
    out["loss"] = loss.detach()
    out["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    out["parameter gradients"] = {n: p.grad for n, p in model.named_parameters()}
    for site in edits:
        model = single()
        install(model, site, mixed)
        loss = loss_of(model(tokens), labels)
        loss.backward()
        out["edited"][site] = loss.detach(), {n: p.grad for n, p in model.named_parameters()}
    return out


def install(model: nn.Module, site: str, visit: Callable[[Tensor], Tensor]) -> None:
    """Put a plain torch hook at a site of the single-process model."""
    path, _, point = site.partition(":")
    module = model.get_submodule(path)
    if point == "output":
        module.register_forward_hook(lambda m, args, out: visit(out))
    else:
        module.register_forward_pre_hook(lambda m, args: (visit(args[0]), *args[1:]))


def _keep(tensor: Tensor, out: dict[str, Any], site: str) -> Tensor:
    out["values"][site] = tensor.detach().clone()
    tensor = tensor.clone()
    tensor.register_hook(lambda g: out["gradients"].update({site: g.clone()}))
    return tensor
