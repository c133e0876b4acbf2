"""Training with losses that tests elsewhere do without: of masked tokens, per token, smoothed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.support import context, gpt

Setting = Callable[[], AbstractContextManager[Any]]
SMOOTHING = 0.1


def counted(batch: dict[str, Tensor], longest: int) -> Tensor:
    """Which tokens count in the loss: each sample begins with a prompt of its own length that does not."""
    prompts = batch["tokens"][:, :1] % max(longest, 1)
    return (torch.arange(gpt.SEQUENCE)[None] >= prompts).float()


def masked(longest: int = 11, padding: bool = False, prediction: bool = False) -> Setting:
    """A loss function that returns the sum over its tokens and their number, as pretrain_gpt.py's does.

    Args:
        longest: the bound of the prompts that do not count; 0: all tokens count.
        padding: whether the router is told of the tokens that do not count.
        prediction: whether the model is, for its prediction of further tokens.
    """

    def forward_step(iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        batch, here = next(iterator), context.here(gpt.SEQUENCE)
        counts = counted(batch, longest)[:, here]
        mask = torch.triu(torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE, dtype=torch.bool), diagonal=1)
        tokens, labels = batch["tokens"][:, here], batch["labels"][:, here]
        told: dict[str, Tensor] = {"padding_mask": counts == 0} if padding else {}
        told |= {"loss_mask": counts} if prediction else {}
        output = model(tokens, here.expand(len(tokens), -1), mask, labels=labels, **told)

        def loss_function(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, number = (output.float() * counts).sum(), counts.sum().int()
            return total, number, {"loss": total.detach() / number.clamp(min=1)}

        return output, loss_function

    return lambda: patch.object(gpt, "forward_step", forward_step)


@contextmanager
def smoothed() -> Iterator[None]:
    """Cross entropy with label smoothing, which Megatron's function has as an argument."""
    from megatron.core import tensor_parallel

    real = tensor_parallel.vocab_parallel_cross_entropy

    def smooth(logits: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = real(logits, target, SMOOTHING, **kwargs)
        return loss

    with patch.object(tensor_parallel, "vocab_parallel_cross_entropy", smooth):
        yield


@contextmanager
def gathered_logits() -> Iterator[None]:
    """A GPTModel of which every rank returns all logits, as for sampling."""
    from megatron.core.models.gpt import gpt_model

    real = gpt_model.GPTModel.__init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **{**kwargs, "parallel_output": False})

    with patch.object(gpt_model.GPTModel, "__init__", build):
        yield


SETTINGS: dict[str, Setting] = {
    "masked": masked(),
    "unmasked": masked(0),
    "masked padding": masked(padding=True),
    "masked prediction": masked(prediction=True),
    "unmasked prediction": masked(0, prediction=True),
    "smoothed": smoothed,
    "gathered logits": gathered_logits,
}
