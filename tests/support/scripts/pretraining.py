"""A training script as people have them, on Megatron's own `pretrain()`; it knows nothing of megatron_flex.

What it leaves in `--out` says what it saw and what it computed, bit for bit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor, nn

SEEN = {"argv": list(sys.argv), "path": sys.path[0], "name": __name__, "file": __file__}
LENGTH, VOCABULARY = 16, 64


class Samples(torch.utils.data.Dataset):
    """Random tokens, the same on every rank."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(int(index))
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "position_ids": torch.arange(LENGTH)}


class Kept:
    """What the training made."""

    losses: list[str] = []  # noqa: RUF012
    chunks: list[nn.Module] = []  # noqa: RUF012


def forward_step(data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, object]:
    if model not in Kept.chunks:
        Kept.chunks.append(model)
    batch = next(data)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss_of


def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, tokens = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
    Kept.losses.append(total.item().hex())
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def datasets(out: Path, sizes: list[int], vp_stage: int | None = None) -> tuple[Samples | None, ...]:
    (out / "touched").touch()
    return tuple(Samples(size) if size else None for size in sizes)


def more(parser):
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flexible", default="")  # begins like a flag of ours, and is none
    parser.add_argument("--words", nargs="*", default=[])
    return parser


def main() -> None:
    args = parse_and_validate_args(more)
    rank = int(os.environ["RANK"])
    (args.out / f"seen-{rank}.json").write_text(json.dumps({**SEEN, "words": args.words}))
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    provider = partial(datasets, args.out)
    provider.is_distributed = True
    pretrain(container, provider, ModelType.encoder_or_decoder, forward_step)
    state = {f"{n}.{name}": p.detach() for n, c in enumerate(Kept.chunks) for name, p in c.named_parameters()}
    torch.save({"losses": Kept.losses, "weights": state}, args.out / f"made-{rank}.pt")
    (args.out / f"through-{rank}").touch()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
