"""Conversions between a site's tensor and TransformerLens' tensor at the same hook point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]  # full parameters by name
Dims = tuple[int | str, ...]  # sizes, or names: `b` sequences, `s` positions


@dataclass(frozen=True)
class View:
    """The same tensor on both sides.

    Attributes:
        weights: the parameters that the conversion needs.
        fixed: why an edit cannot be converted back, and what to edit instead; empty if it can.
    """

    weights: tuple[str, ...] = ()
    fixed: str = ""

    def dims(self, site_dims: Dims) -> Dims:
        """The first dims of TransformerLens' tensor, as far as they say where sequences and positions are."""
        return site_dims

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """TransformerLens' tensor for `tensor`."""
        return tensor

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """The site's tensor, in place of `old`, for which TransformerLens would have `lens_tensor`."""
        return lens_tensor


@dataclass(frozen=True)
class BatchFirst(View):
    """`[b, s, ...]` there, and `[s, b, ...]` here if `transposed`.

    Attributes:
        view: the conversion of the tensor with the batch dim first.
        transposed: whether the sequence dim is first here.
    """

    view: View = View()
    transposed: bool = True

    @classmethod
    def around(cls, view: View, transposed: bool) -> BatchFirst:
        """The view with the weights that another one needs."""
        return cls(view.weights, view.fixed, view, transposed)

    def dims(self, site_dims: Dims) -> Dims:
        return "b", "s"

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Transposed first."""
        return self.view.to_lens(tensor.transpose(0, 1) if self.transposed else tensor, weights)

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """Transposed last."""
        if not self.transposed:
            return self.view.to_site(lens_tensor, old, weights)
        return self.view.to_site(lens_tensor, old.transpose(0, 1), weights).transpose(0, 1)


@dataclass(frozen=True)
class Biased(View):
    """The tensor with a bias that the framework adds later; `weights` names the bias.

    Attributes:
        part: the index of an equal part of the bias, and the number of parts.
    """

    part: tuple[int, int] = (0, 1)

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """With the bias."""
        return tensor + self._bias(tensor, weights)

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """Without the bias."""
        return lens_tensor - self._bias(lens_tensor, weights)

    def _bias(self, like: Tensor, weights: Weights) -> Tensor:
        index, count = self.part
        return weights[self.weights[0]].chunk(count)[index].to(like)


@dataclass(frozen=True)
class Part(View):
    """One of several equal parts of the last dim.

    Attributes:
        index: which.
        count: the number of parts.
    """

    index: int = 0
    count: int = 1

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """A copy of the part."""
        return tensor.chunk(self.count, -1)[self.index].clone()

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """The new part among the others."""
        parts = list(old.chunk(self.count, -1))
        parts[self.index] = lens_tensor
        return torch.cat(parts, -1)


@dataclass(frozen=True)
class Scaled(View):
    """The tensor multiplied by what the model multiplies it by after the site.

    Attributes:
        factor: the factor.
    """

    factor: float = 1.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        return tensor * self.factor

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """Divided again."""
        return lens_tensor / self.factor


@dataclass(frozen=True)
class Mapped(View):
    """The result of a function of the model's own on the tensor of another view, to read.

    Attributes:
        view: the other view, which needs no weights.
        function: the function, entry by entry.
    """

    view: View = View()
    function: Callable[[Tensor], Tensor] = torch.clone

    def dims(self, site_dims: Dims) -> Dims:
        return self.view.dims(site_dims)

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """The function's result."""
        return self.function(self.view.to_lens(tensor, weights))


@dataclass(frozen=True)
class SplitHeads(View):
    """`[b, s, heads * size]` here, `[b, s, heads, size]` there.

    Attributes:
        heads: the number of heads.
        first: the index of the first of them in the tensor.
        total: the number of heads in the tensor; 0 if there are no others.
    """

    heads: int = 1
    first: int = 0
    total: int = 0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        heads: Tensor = tensor.unflatten(-1, (self.total or self.heads, -1))
        return heads.narrow(-2, self.first, self.heads)

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """Flattened again, among the other heads."""
        heads: Tensor = old.unflatten(-1, (self.total or self.heads, -1))
        last = self.first + self.heads
        return torch.cat([heads[..., : self.first, :], lens_tensor, heads[..., last:, :]], -2).flatten(-2)


@dataclass(frozen=True)
class HeadsFirst(View):
    """`[b, heads, s, size]` here, `[b, s, heads, size]` there."""

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Transposed."""
        return tensor.transpose(1, 2)

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """Transposed again."""
        return lens_tensor.transpose(1, 2)


@dataclass(frozen=True)
class HeadResults(View):
    """The contribution of each head to the residual stream, `[b, s, heads, h]`, from `[b, s, heads * size]`.

    `weights` names W_O.

    Attributes:
        heads: the number of heads.
        transposed: whether W_O is `[heads * size, h]`; else `[h, heads * size]`.
    """

    heads: int = 1
    transposed: bool = False

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Each head's z times its part of W_O."""
        z = tensor.unflatten(-1, (self.heads, -1))
        output = split_output(weights[self.weights[0]], self.heads, self.transposed).to(z)
        return torch.einsum("bsnd,ndh->bsnh", z, output)


def split_output(weight: Tensor, heads: int, transposed: bool) -> Tensor:
    """W_O by head, `[heads, size, h]`, from the weight of a linear; `transposed` as in `HeadResults`."""
    by_head: Tensor = (weight if transposed else weight.T).unflatten(0, (heads, -1))
    return by_head


@dataclass(frozen=True)
class Scores(View):
    """Attention scores `[b, n, s, s]`: TransformerLens has -inf where Megatron masks after this hook point.

    Attributes:
        factor: TransformerLens' scores are greater by this factor.
    """

    factor: float = 1.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Scaled and masked."""
        return (tensor * self.factor).masked_fill(_future_mask(tensor), float("-inf"))

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """New scores where attention is allowed, old ones elsewhere."""
        return torch.where(_future_mask(old), old, (lens_tensor / self.factor).to(old.dtype))


def _future_mask(scores: Tensor) -> Tensor:
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)


ATTENTION_DIMS: Dims = ("b", "n", "s", "s")


@dataclass(frozen=True)
class Pattern(View):
    """Attention probabilities `[b, n, s, s]`, the same on both sides."""

    def dims(self, site_dims: Dims) -> Dims:
        return ATTENTION_DIMS


@dataclass(frozen=True)
class MaskedScores(Pattern):
    """Attention scores `[b, n, s, s]`, plus their dtype's lowest number where TransformerLens has -inf."""

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """With -inf."""
        return tensor.masked_fill(_lowest(tensor), float("-inf"))

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """New scores where attention is allowed, old ones elsewhere."""
        return torch.where(_lowest(old), old, lens_tensor.to(old.dtype))


def _lowest(scores: Tensor) -> Tensor:
    return scores < torch.finfo(scores.dtype).min / 2


@dataclass(frozen=True)
class Scale(View):
    """The divisor of a norm, `[b, s, 1]`, from its input `[b, s, h]`."""

    rms: bool = True
    epsilon: float = 0.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """The root of the mean square."""
        return norm_scale(tensor, self.rms, self.epsilon)


@dataclass(frozen=True)
class Normalized(View):
    """The normalized input of a norm before its weights, `[b, s, h]`."""

    rms: bool = True
    epsilon: float = 0.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Centered for a LayerNorm, and divided by the scale."""
        return normalize_stream(tensor, self.rms, self.epsilon).to(tensor.dtype)


@dataclass(frozen=True)
class Unweighted(View):
    """A norm's output `[b, s, h]` without its weights, for editing.

    `weights` names the weight and, if there is one, the bias. Where a weight is zero the edit has no effect.

    Attributes:
        offset: the constant that the norm adds to its weight.
    """

    offset: float = 0.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Without bias and weight."""
        weight, bias = self._parameters(tensor, weights)
        return torch.where(weight == 0, 0.0, (tensor - bias) / weight)

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        weight, bias = self._parameters(old, weights)
        return lens_tensor * weight + bias

    def _parameters(self, like: Tensor, weights: Weights) -> tuple[Tensor, Tensor | float]:
        weight = weights[self.weights[0]].to(like) + self.offset
        return weight, weights[self.weights[1]].to(like) if len(self.weights) > 1 else 0.0


@dataclass(frozen=True)
class Positions(View):
    """The position embeddings `[b, s, h]` within the sum of embeddings, likewise; `weights` names them.

    Attributes:
        factor: what the model multiplies the sum by.
    """

    factor: float = 1.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """The same for every sequence."""
        return self._own(tensor, weights).expand(len(tensor), -1, -1).clone()

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """The sum with the new embeddings instead of the old."""
        return old + (lens_tensor - self._own(old, weights))

    def _own(self, like: Tensor, weights: Weights) -> Tensor:
        return weights[self.weights[0]][: like.shape[1]].to(like) * self.factor


def centre_stream(stream: Tensor, rms: bool) -> Tensor:
    """A stream `[..., h]` minus its mean; unchanged for an RMSNorm. In fp32."""
    wide = stream if stream.dtype == torch.float64 else stream.float()
    return wide if rms else wide - wide.mean(-1, keepdim=True)


def norm_scale(stream: Tensor, rms: bool, epsilon: float) -> Tensor:
    """The divisor of a norm for a stream `[..., h]`: `[..., 1]`."""
    return (centre_stream(stream, rms).square().mean(-1, keepdim=True) + epsilon).sqrt()


def normalize_stream(stream: Tensor, rms: bool, epsilon: float) -> Tensor:
    """A stream `[..., h]` after a norm without weights, in fp32."""
    return centre_stream(stream, rms) / norm_scale(stream, rms, epsilon)
