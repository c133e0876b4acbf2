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


class Transposed(View):
    """`[s, b, ...]` here, `[b, s, ...]` there."""

    def dims(self, site_dims: Dims) -> Dims:
        return "b", "s"


@dataclass(frozen=True)
class BatchFirst(Transposed):
    """`[s, b, ...]` here, `[b, s, ...]` there; Megatron adds a bias later that TransformerLens includes.

    Attributes:
        bias: the name of that bias; empty if there is none.
        part: the index of an equal part of the bias.
    """

    bias: str = ""
    part: tuple[int, int] = (0, 1)

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Transposed, with the bias."""
        batch_first = tensor.transpose(0, 1)
        return batch_first + self._bias(batch_first, weights) if self.bias else batch_first

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """Transposed, without the bias."""
        return (lens_tensor - self._bias(lens_tensor, weights) if self.bias else lens_tensor).transpose(0, 1)

    def _bias(self, like: Tensor, weights: Weights) -> Tensor:
        index, count = self.part
        return weights[self.bias].chunk(count)[index].to(like)


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
class SplitHeads(Transposed):
    """`[s, b, heads * size]` here, `[b, s, heads, size]` there."""

    heads: int = 1

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        heads: Tensor = tensor.transpose(0, 1).unflatten(-1, (self.heads, -1))
        return heads

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """Flattened again."""
        return lens_tensor.flatten(-2).transpose(0, 1)


@dataclass(frozen=True)
class HeadResults(Transposed):
    """The contribution of each head to the residual stream, `[b, s, heads, h]`, from `[s, b, heads * size]`.

    `weights` names W_O, `[h, heads * size]`.
    """

    heads: int = 1

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Each head's z times its part of W_O."""
        z = tensor.transpose(0, 1).unflatten(-1, (self.heads, -1))
        output: Tensor = weights[self.weights[0]].unflatten(-1, (self.heads, -1)).to(z)
        return torch.einsum("bsnd,hnd->bsnh", z, output)


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


@dataclass(frozen=True)
class Scale(Transposed):
    """The divisor of a norm, `[b, s, 1]`, from its input `[s, b, h]`."""

    rms: bool = True
    epsilon: float = 0.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """The root of the mean square."""
        return norm_scale(tensor.transpose(0, 1), self.rms, self.epsilon)


@dataclass(frozen=True)
class Normalized(Transposed):
    """The normalized input of a norm before its weights: `[b, s, h]` from `[s, b, h]`."""

    rms: bool = True
    epsilon: float = 0.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Centered for a LayerNorm, and divided by the scale."""
        return normalize_stream(tensor.transpose(0, 1), self.rms, self.epsilon).to(tensor.dtype)


@dataclass(frozen=True)
class Unweighted(Transposed):
    """A norm's output `[s, b, h]` without its weights, for editing: `[b, s, h]`.

    `weights` names the weight and, if there is one, the bias. Where a weight is zero the edit has no effect.

    Attributes:
        offset: the constant that the norm adds to its weight.
    """

    offset: float = 0.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """Without bias and weight."""
        weight, bias = self._parameters(tensor, weights)
        return torch.where(weight == 0, 0.0, (tensor.transpose(0, 1) - bias) / weight)

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        weight, bias = self._parameters(old, weights)
        return (lens_tensor * weight + bias).transpose(0, 1)

    def _parameters(self, like: Tensor, weights: Weights) -> tuple[Tensor, Tensor | float]:
        weight = weights[self.weights[0]].to(like) + self.offset
        return weight, weights[self.weights[1]].to(like) if len(self.weights) > 1 else 0.0


@dataclass(frozen=True)
class Positions(Transposed):
    """The position embeddings `[b, s, h]` within the sum of embeddings `[s, b, h]`; `weights` names them.

    Attributes:
        factor: what the model multiplies the sum by.
    """

    factor: float = 1.0

    def to_lens(self, tensor: Tensor, weights: Weights) -> Tensor:
        """The same for every sequence."""
        return self._own(tensor, weights).expand(tensor.shape[1], -1, -1).clone()

    def to_site(self, lens_tensor: Tensor, old: Tensor, weights: Weights) -> Tensor:
        """The sum with the new embeddings instead of the old."""
        return old + (lens_tensor - self._own(old, weights)).transpose(0, 1)

    def _own(self, like: Tensor, weights: Weights) -> Tensor:
        return weights[self.weights[0]][: like.shape[0]].to(like) * self.factor


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
