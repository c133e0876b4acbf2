"""The two tensors of a row, brought into the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_flex.alignment.axes import POSITIONS, SAMPLES, canonical_axes, parse_axes, rearrange
from megatron_flex.alignment.counterparts import Counterpart
from megatron_flex.errors import FlexError

LOGITS = "output_layer:output"


def axis_sizes(config: Any, samples: int) -> Mapping[str, int]:
    """The lengths of axes, from a configuration of transformers.

    Args:
        config: the configuration.
        samples: the samples of a batch.

    Raises:
        FlexError: it has no number of heads.
    """
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    if heads is None:
        raise FlexError("the configuration has no num_attention_heads; dump the model with its config")
    heads = int(heads)
    return {"b": samples, "n": heads, "g": int(getattr(config, "num_key_value_heads", None) or heads)}


def reference_tensor(
    row: Counterpart, captures: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> Tensor | None:
    """The Hugging Face tensor of a row, in the order in which tensors are compared; None if it is missing.

    Args:
        row: the row.
        captures: tensors by point.
        sizes: the lengths of axes.
    """
    captured = [captures.get(point) for point in row.other]
    if any(t is None for t in captured):
        return None
    tensors = [t for t in captured if t is not None]
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)
    return rearrange(take_part(joined, row.part), row.hf_axes, canonical_axes(row.megatron_axes), sizes)


def take_part(tensor: Tensor, part: tuple[int, int] | None) -> Tensor:
    """One equal part of the last axis, by its index and the number of parts; None: all of it."""
    return tensor if part is None else tensor.chunk(part[1], -1)[part[0]]


def candidate_tensor(row: Counterpart, tensor: Tensor, sizes: Mapping[str, int], config: Any) -> Tensor:
    """The Megatron tensor of a row, in the order in which tensors are compared.

    Args:
        row: the row.
        tensor: the tensor of the site.
        sizes: the lengths of axes.
        config: Megatron's configuration.
    """
    out = rearrange(tensor, row.megatron_axes, canonical_axes(row.megatron_axes), sizes)
    interleaved = getattr(config, "rotary_interleaved", False) and not getattr(
        config, "multi_latent_attention", False
    )
    # Hugging Face rotates the halves of a head, where Megatron then rotates pairs.
    return torch.cat([out[..., 0::2], out[..., 1::2]], -1) if row.rotary and interleaved else out


def compared_pair(
    row: Counterpart, megatron: Tensor, hf: Tensor, sizes: Mapping[str, int], config: Any
) -> tuple[Tensor, Tensor]:
    """The tensors of a row in the same order, without masked scores and the padding of the vocabulary.

    Megatron masks scores after this site, and Hugging Face before it.
    """
    candidate = candidate_tensor(row, megatron, sizes, config)
    if row.site == LOGITS and candidate.shape[-1] > hf.shape[-1]:
        candidate = candidate[..., : hf.shape[-1]]  # Megatron pads the vocabulary at its end
    if row.causal and candidate.shape == hf.shape:
        masked = hf < torch.finfo(hf.dtype).min / 2
        return candidate.masked_fill(masked, 0.0), hf.masked_fill(masked, 0.0)
    return candidate, hf


def batch_first(row: Counterpart) -> Counterpart:
    """The row with Megatron's axes as dumps have them: samples and positions first."""
    dims = [f"({' '.join(dim)})" if len(dim) > 1 else dim[0] for dim in parse_axes(row.megatron_axes)]
    first = [axis for axis in (SAMPLES, POSITIONS) if axis in dims]
    return replace(row, megatron_axes=" ".join([*first, *(dim for dim in dims if dim not in first)]))
