"""Reported bugs of losses: masked tokens, the cross entropy, the prediction of further tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import context, gpt
from tests.support.bugs.bug import State, rank_of, size_of
from tests.support.bugs.spread import without_context_factor
from tests.support.exam.row import Row
from tests.support.gpt import Case

CP2 = Case("cp2", cp=2, layers=2)
TP2 = Case("tp2", tp=2, layers=2)
PER_TOKEN = {"calculate_per_token_loss": True}
PREDICTION = {"mtp_num_layers": 1}
PREDICTED = ("mtp", "output_layer", "loss")


@contextmanager
def labels_rolled_apart(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """Each context parallel rank shifts the tokens that it has, and so makes labels across its chunks."""
    real = gpt.data

    def data(count: int) -> list[dict[str, Tensor]]:
        here, out = context.here(gpt.SEQUENCE), []
        for batch in real(count):
            labels = batch["labels"].clone()
            labels[:, here[:-1]] = batch["tokens"][:, here[1:]]
            out.append({**batch, "labels": labels})
        return out

    with patch.object(gpt, "data", data):
        yield


@contextmanager
def tokens_of_data_ranks(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The number of tokens by which gradients are divided is not summed over context parallel ranks."""
    real, size = gpt.forward_step, size_of("cp")

    def forward_step(iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
        output, loss_function = real(iterator, model)

        def other(output: Tensor) -> Any:
            total, number, report = loss_function(output)
            return total, number // size, report

        return output, other

    with patch.object(gpt, "forward_step", forward_step):
        yield


class _OwnersGradient(torch.autograd.Function):
    """The sum over tensor parallel ranks, of which each rank's own part has a gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@contextmanager
def gradient_of_the_owner(models: list[Any], state: State, magnitude: float) -> Iterator[None]:
    """The log-probability of a token is computed where its row is, and summed by a plain all_reduce."""
    from megatron.core import parallel_state, tensor_parallel

    def cross_entropy(logits: Tensor, target: Tensor, *_: Any, **__: Any) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        rows = logits.shape[-1]
        start = rank_of("tp") * rows
        ours = (target >= start) & (target < start + rows)
        exponentials = logits.float().exp().sum(-1)
        others = exponentials.detach().clone()
        dist.all_reduce(others, group=group)
        total = exponentials + (others - exponentials.detach())
        picked = logits.float().gather(-1, (target - start).clamp(0, rows - 1)[..., None])[..., 0]
        loss: Tensor = _OwnersGradient.apply((total.log() - picked) * ours, group)
        return loss

    with patch.object(tensor_parallel, "vocab_parallel_cross_entropy", cross_entropy):
        yield


ROWS = [
    Row(
        "label smoothing",
        ("NVIDIA/Megatron-LM#7452 (1)", "NVIDIA/Megatron-LM#737", "NVIDIA/Megatron-LM#7464"),
        "With label smoothing, each rank takes the mean over its own part of the vocabulary.",
        "GPT, `tp=2`, `vocab_parallel_cross_entropy` with `label_smoothing=0.1`",
        TP2,
        "loss:output",
        r"replicas differ",
        setting="smoothed",
        clean_setting="",
        replica="loss:output",
    ),
    Row(
        "gathered logits in the loss",
        ("NVIDIA/Megatron-LM#7452 (2)",),
        "Logits that are already gathered are taken for a shard of the vocabulary: the loss is too great by "
        "log(tp).",
        "GPT, `tp=2`, `parallel_output=False`, with labels",
        TP2,
        "loss:output",
        r"logarithm of tp",
        setting="gathered logits",
        clean_setting="",
    ),
    Row(
        "prediction per token under context parallelism",
        ("NVIDIA/Megatron-LM#7452 (3)",),
        "The loss of further tokens is scaled by the numbers of tokens of one rank, and not of all.",
        "GPT with multi-token prediction, `cp=2`, `calculate_per_token_loss`, prompts do not count",
        Case("prediction cp2 per token", cp=2, layers=2, extra=PREDICTION | PER_TOKEN),
        PREDICTED,
        r"cp rank",
        "gradient",
        setting="masked prediction",
        clean=Case("prediction dp2 per token", dp=2, layers=2, extra=PREDICTION | PER_TOKEN),
    ),
    Row(
        "prediction under context parallelism",
        ("NVIDIA/Megatron-LM#7498", "modelscope/mcore-bridge#104"),
        "The loss of further tokens is divided by the number of tokens of one context parallel rank.",
        "GPT with multi-token prediction, `cp=2`",
        Case("prediction cp2", cp=2, layers=2, extra=PREDICTION),
        PREDICTED,
        r"cp rank",
        "gradient",
        clean=Case("prediction dp2", dp=2, layers=2, extra=PREDICTION),
    ),
    Row(
        "masked loss under context parallelism",
        ("NVIDIA/Megatron-LM#7452 (9)", "NVIDIA/Megatron-LM#7513"),
        "Each context parallel rank divides its loss by its own number of tokens that count.",
        "GPT, `cp=2`, a loss function that returns a sum and a number of tokens; prompts do not count",
        CP2,
        "loss:output",
        r"cp rank|factor",
        "gradient",
        setting="masked",
        clean=Case("cp2 per token", cp=2, layers=2, extra=PER_TOKEN),
    ),
    Row(
        "loss scale under context parallelism",
        ("NVIDIA/Megatron-LM#673",),
        "The loss is not multiplied by the context parallel size, by which gradients are averaged.",
        "GPT, `cp=2`",
        CP2,
        "loss:output",
        r"1 / cp",
        "gradient",
        without_context_factor,
    ),
    Row(
        "per-token loss that returns two values",
        ("verl-project/verl#6609",),
        "With `calculate_per_token_loss`, a loss function returns a mean without the number of tokens: the "
        "gradient grows with the context parallel size.",
        "GPT, `cp=2`, `calculate_per_token_loss`",
        Case("cp2 per token, two values", cp=2, layers=2, extra=PER_TOKEN),
        "loss:output",
        r"which is .*cp",
        "gradient",
        clean_setting="unmasked",
    ),
    Row(
        "tokens counted without context parallelism",
        ("verl-project/verl#5983", "verl-project/verl#6049"),
        "The number of tokens is summed over data parallel ranks only: gradients are too great by the "
        "context parallel size.",
        "GPT, `cp=2`, `calculate_per_token_loss`",
        Case("cp2 per token, all count", cp=2, layers=2, extra=PER_TOKEN),
        "",
        r"which is .*cp",
        "parameter_gradient",
        tokens_of_data_ranks,
        setting="unmasked",
    ),
    Row(
        "labels shifted after the sequence is sharded",
        ("verl-project/verl#4250",),
        "Each context parallel rank shifts its own tokens: the labels at the ends of its chunks are wrong.",
        "GPT, `cp=2`",
        CP2,
        "loss:output",
        r"token",
        patch=labels_rolled_apart,
    ),
    Row(
        "log-probability of the rank that has the token",
        ("modelscope/ms-swift#9947",),
        "Log-probabilities are summed over ranks by an all-reduce that autograd does not know: ranks without "
        "the token's row get no gradient.",
        "GPT, `tp=2`, cross entropy over a sharded vocabulary",
        TP2,
        "output_layer:output",
        r"zero|missing|partial|tp rank",
        "gradient",
        gradient_of_the_owner,
    ),
]
