"""All that the residual stream is a sum of: heads, neurons, embeddings and biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_flex.lens.mapping import DimSlice, slice_dim
from megatron_flex.lens.full_weights import WholeWeights

if TYPE_CHECKING:
    from megatron_flex.lens.cache import ActivationCache

ATTENTION_LINEAR, MLP_LINEAR = "self_attention.linear_proj", "mlp.linear_fc2"


def decompose_stream(
    cache: ActivationCache,
    weights: WholeWeights,
    last: int,
    mlp_input: bool,
    expand_neurons: bool,
    where: DimSlice,
) -> tuple[Tensor, list[str]]:
    """The components of the stream in front of layer `last`, or of its MLP, with labels."""
    parts = [cache.stack_head_results(last + mlp_input, True, pos_slice=where)]
    if last and expand_neurons:
        parts.append(cache.stack_neuron_results(last, where, return_labels=True))
    elif last:
        parts.append(cache.decompose_resid(last, False, "mlp", False, where, False, True))
    embeddings = [name for name in ("embed", "pos_embed") if name in cache]
    parts += [(slice_dim(cache[name], where, -2)[None], [name]) for name in embeddings]
    stacks, labels = zip(*parts, strict=True)
    bias = _sum_biases(weights, last, mlp_input, expand_neurons).to(stacks[0])
    stack = torch.cat([*stacks, bias.expand(1, *stacks[0].shape[1:])])
    return stack, [*(label for some in labels for label in some), "bias"]


def _sum_biases(weights: WholeWeights, last: int, mlp_input: bool, of_mlps: bool) -> Tensor:
    """The sum of what linears that write into the stream add to each position, `[h]`."""
    linears = [f"decoder.layers.{n}.{ATTENTION_LINEAR}" for n in range(last + mlp_input)]
    linears += [f"decoder.layers.{n}.{MLP_LINEAR}" for n in range(last) if of_mlps]
    found = [weights.bias(linear) for linear in linears]
    return sum((bias for bias in found if bias is not None), torch.zeros(()))
