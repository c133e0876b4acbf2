"""Models that the schedules of torch.distributed.pipelining run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import llama, proof

CPU = torch.device("cpu")


def stage_of(model: llama.Llama, index: int, stages: int) -> llama.Llama:
    """A part of the model, whose modules have the names that they have in the whole."""
    layers = list(model.layers)
    per = [layers[len(layers) * i // stages : len(layers) * (i + 1) // stages] for i in range(stages)]
    for name in layers:
        if name not in per[index]:
            del model.layers[name]
    if index > 0:
        model.tok_embeddings = None
    if index < stages - 1:
        model.norm = model.output = None
    return model


def schedule_of(
    kind: str, microbatches: int, chunks: int, group: Any = None, scale_grads: bool = True
) -> Any:
    """This rank's schedule of the model in as many stages as ranks times chunks."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    count = ranks * chunks
    mine = [rank + i * ranks for i in range(chunks)]
    if kind in ("ZBVZeroBubble", "DualPipeV"):
        mine = [rank, count - 1 - rank]
    stages = [
        pipelining.PipelineStage(stage_of(llama.single(), i, count), i, count, CPU, group=group) for i in mine
    ]
    made = get_schedule_class(kind)
    return made(stages if chunks > 1 else stages[0], microbatches, llama.loss_of, scale_grads=scale_grads)


def build(kind: str, microbatches: int = 2, chunks: int = 1) -> proof.Built:
    schedule = schedule_of(kind, microbatches, chunks)
    return proof.Built(schedule, stepping(schedule), microbatches=microbatches)


def stepping(schedule: Any, group: Any = None) -> Any:
    """A step of a schedule, whose loss the last stage's rank tells all."""
    from megatron_flex.adapters.pipelining import Stages

    stages = Stages(schedule).stages

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = any(s.is_last for s in stages)
        first = any(s.is_first for s in stages)
        schedule.step(
            *([tokens] if first else []), target=labels if last else None, losses=losses if last else None
        )
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss, group=group)
        return loss

    return step


CASES = [
    ("pp2 GPipe", 2, "GPipe", 2, 1),
    ("pp2 1F1B", 2, "1F1B", 2, 1),
    ("pp2 interleaved (vpp2)", 2, "Interleaved1F1B", 2, 2),
]


@pytest.mark.parametrize(("case", "world", "kind", "microbatches", "chunks"), CASES)
def test_schedules(
    case: str, world: int, kind: str, microbatches: int, chunks: int, cells: list[Any]
) -> None:
    proof.judge(proof.compare("PyTorch", case, world, build, kind, microbatches, chunks), cells)
