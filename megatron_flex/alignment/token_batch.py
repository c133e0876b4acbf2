"""The tokens of an alignment: padding moved to the end, where a causal model's tokens do not see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_flex.errors import FlexError
from megatron_flex.mesh import Mesh


@dataclass(frozen=True)
class TokenBatch:
    """Tokens for both models.

    Attributes:
        tokens: `[batch, sequence]`, padding at the end.
        real: `[batch, sequence]`, which entries are not padding.
        notes: what was changed, in words.
    """

    tokens: Tensor
    real: Tensor
    notes: tuple[str, ...]


def prepare_batch(batch: Any, divisor: int) -> TokenBatch:
    """Tokens as both models can take them.

    Args:
        batch: tokens `[batch, sequence]`, or a mapping of `input_ids` and, if there is padding,
            `attention_mask` (1 for tokens, 0 for padding), as a tokenizer returns it.
        divisor: what the length of a sequence must be a multiple of.

    Raises:
        FlexError: there are no tokens, or the mask has another shape or a gap between tokens.
    """
    inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if tokens is None:
        raise FlexError(
            f"a batch with {', '.join(map(str, inputs)) or 'nothing'}; give input_ids [batch, sequence]"
        )
    tokens = torch.as_tensor(tokens)
    if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
        raise FlexError(
            f"tokens of shape {tuple(tokens.shape)} and dtype {tokens.dtype}; give integers [batch, sequence]"
        )
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    if real.shape != tokens.shape:
        raise FlexError(
            f"attention_mask has shape {tuple(real.shape)} and input_ids {tuple(tokens.shape)}; give one "
            "mask entry for each token"
        )
    tokens, real = tokens.cpu().long(), real.cpu()
    tokens, real, notes = _pad_at_the_end(tokens, real)
    missing = -tokens.shape[1] % divisor
    if missing:
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        real = torch.nn.functional.pad(real, (0, missing))
        notes.append(
            f"{missing} padding tokens were added at the end: the layout needs a multiple of {divisor}"
        )
    if not bool(real.all()):
        padding = int((~real).sum())
        notes.append(
            f"{padding} of {real.numel()} tokens are padding at the end of their sequence, not compared"
        )
    return TokenBatch(tokens, real, tuple(notes))


def _pad_at_the_end(tokens: Tensor, real: Tensor) -> tuple[Tensor, Tensor, list[str]]:
    """Rotate each sequence so that its padding is at the end."""
    starts = real.int().argmax(1)
    rows = [row.roll(-int(start)) for row, start in zip(tokens, starts, strict=True)]
    masks = [row.roll(-int(start)) for row, start in zip(real, starts, strict=True)]
    moved = torch.stack(masks)
    gaps = (moved.int().diff(dim=1) > 0).any(1)
    if bool(gaps.any()) or not bool(real.any(1).all()):
        row = int((gaps | ~real.any(1)).int().argmax())
        raise FlexError(
            f"attention_mask of sequence {row} has padding between tokens, or no tokens; give sequences with "
            "padding on one side only"
        )
    count = int((starts > 0).sum())
    notes = [f"padding of {count} sequences was moved from their beginning to their end"] if count else []
    return torch.stack(rows), moved, notes


def sequence_divisor(mesh: Mesh, sequence_parallel: bool) -> int:
    """What Megatron's sequence length must be a multiple of.

    Args:
        mesh: the axes of the run.
        sequence_parallel: whether the residual stream is sharded over tensor parallel ranks.
    """
    context = mesh["cp"].size
    return (2 * context if context > 1 else 1) * (mesh["tp"].size if sequence_parallel else 1)
