"""One forward and backward pass of a Megatron model over tokens that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_flex.adapters.megatron_core.forward_run import (
    check_tokens,
    count_microbatches,
    keep_random_states,
    shard_batch,
)
from megatron_flex.adapters.megatron_core.module_classes import unwrap_model
from megatron_flex.adapters.megatron_core.parameter_gradients import MegatronParameters
from megatron_flex.mesh import Mesh


class BackwardResult(NamedTuple):
    """What a backward pass has left.

    Attributes:
        loss: this rank's part of the loss, which the context parallel ranks add up; None where the model's
            last stage is not.
        reduced: True if Megatron's wrapper has reduced the gradients, False if the chunks are not wrapped,
            None if torch's wrapper has its own rules.
    """

    loss: float | None
    reduced: bool | None


def run_backward(
    chunks: list[nn.Module],
    root: Any,
    mesh: Mesh,
    storage: MegatronParameters,
    tokens: Tensor,
    labels: Tensor,
    counted: Tensor,
) -> BackwardResult:
    """Run one forward and backward pass; gradients stay where Megatron leaves them.

    Every data parallel rank runs the whole batch. An interleaved schedule runs the batch several times, and
    its gradients are the mean. Buffers, such as the tokens that routers count and the biases that some
    versions of `finalize_model_grads` update, are put back.

    Args:
        chunks: this rank's chunks.
        root: the first of them, unwrapped.
        mesh: the axes of the run.
        storage: what holds their parameters and gradients.
        tokens: `[batch, sequence]`, the same on all ranks.
        labels: the tokens to predict, `[batch, sequence]`.
        counted: which of them are in the loss, the mean of their cross entropies, `[batch, sequence]`.

    Raises:
        FlexError: on all ranks: the model cannot take these tokens.
    """
    check_tokens(root, mesh, tokens, len(tokens))
    total = int(counted.sum())
    batch = shard_batch(root, mesh, tokens, labels=labels, counted=counted)
    wrapped = bool(storage.wrappers)
    per_token = wrapped and bool(getattr(storage.config, "calculate_per_token_loss", False))
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def loss(output: Tensor) -> tuple[Any, ...]:
        summed = (output.float() * batch["counted"]).sum()
        report = {"loss": float(summed) / total}
        # A wrapper of this setting leaves it to finalize_model_grads to divide by all ranks' tokens.
        return (summed, batch["counted"].sum().int(), report) if per_token else (summed / total, report)

    def step(iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
        next(iterator)
        return model(batch["tokens"], batch["positions"], None, labels=batch["labels"]), loss

    count, interleaved = count_microbatches(root.config, 1, len(chunks)), len(chunks) > 1
    iterators = [iter([None] * count) for _ in chunks]
    with keep_random_states(), _keep_buffers(chunks), storage.finalization():
        losses = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if interleaved else iterators[0],
            model=chunks if interleaved else chunks[0],
            num_microbatches=count,
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            forward_only=False,
        )
    reduced = None if storage.torchs else wrapped
    return BackwardResult(float(losses[0]["loss"]) if losses else None, reduced)


@contextmanager
def _keep_buffers(chunks: list[nn.Module]) -> Iterator[None]:
    """Restore all buffers of the chunks after the block."""
    modules = [unwrap_model(chunk) for chunk in chunks]  # of a wrapper, `buffers` is a list of its own
    before = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
