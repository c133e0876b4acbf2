"""Pretrains a GPT on bytes with Megatron's own `pretrain()`: a training script as any fork has one.

Model, layout, optimizer and checkpoints are Megatron's flags; the text is the source of Python's standard
library, so that nothing is fetched. It needs `--vocab-size 256`, and on a CPU the flags of docs/start.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from quickstart_data import Source
from torch import Tensor, nn


def datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Source, Source | None, None]:
    """Text to train on, text that is never trained on, and no test."""
    training, held_out, _ = sizes
    length = get_args().seq_length
    return Source(training, length), Source(held_out, length, held_out=True) if held_out else None, None


datasets.is_distributed = True  # every rank reads the text itself: nothing is broadcast


def batch_of(data: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The next microbatch, `[b, s]` each: under context parallelism this rank's part of the sequence."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data).items()}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=get_context_parallel_group())


def loss_of(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """From the losses `[b, s]`: their sum, their number, and what Megatron logs."""
    total, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    """One microbatch through this rank's part of the model."""
    batch = batch_of(data)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss_of


def main() -> None:
    """Train."""
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
