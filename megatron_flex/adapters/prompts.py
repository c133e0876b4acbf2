"""Prompts as a call of a model takes them: tokens, the padding after them, positions and further keywords."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_flex.errors import FlexError


@dataclass(frozen=True)
class Prompts:
    """The inputs of one run, the same on all ranks of a model replica.

    Attributes:
        tokens: `[batch, sequence]`; what a plain module takes may have another shape.
        attention_mask: `[batch, sequence]`, 1 at text and 0 at padding, which follows the text; None if no
            mask was given.
        position_ids: `[batch, sequence]`; None for the model's own.
        inputs: further keywords of the model. Tensors with an entry for each sequence are split with them.
    """

    tokens: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> Tensor | None:
        """How many positions of each sequence are text; None if no mask was given."""
        return None if self.attention_mask is None else self.attention_mask.sum(1).long().cpu()

    @property
    def padded(self) -> bool:
        """Whether any position is padding."""
        return self.attention_mask is not None and not bool(self.attention_mask.all())

    def keywords(self) -> dict[str, Any]:
        """What was given besides the tokens, by the names that Hugging Face models have for it."""
        named = {"attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return {**{name: tensor for name, tensor in named.items() if tensor is not None}, **self.inputs}

    def split(self, size: int | None) -> list[Prompts]:
        """Microbatches of `size` sequences; one of all sequences if None."""
        if size is None or size >= len(self.tokens):
            return [self]
        return [self._rows(slice(start, start + size)) for start in range(0, len(self.tokens), size)]

    def _rows(self, rows: slice) -> Prompts:
        mask, positions = self.attention_mask, self.position_ids
        return Prompts(
            self.tokens[rows],
            None if mask is None else mask[rows],
            None if positions is None else positions[rows],
            {name: value[rows] if self._has_rows(value) else value for name, value in self.inputs.items()},
        )

    def _has_rows(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(self.tokens)

    def check_tokens_alone(self, caller: str) -> None:
        """Refuse padding and keywords where only tokens reach the model.

        Raises:
            FlexError: on all ranks, which have the same prompts.
        """
        given = [*self.inputs, *(["position_ids"] if self.position_ids is not None else [])]
        given += ["an attention_mask with padding"] if self.padded else []
        if given:
            raise FlexError(
                f"{caller} runs a model from here on tokens alone, and here is {', '.join(given)}; run your "
                "own step in `with flex.interp.trace()`"
            )
