"""What one rank of scripts/bench does: build the model once, then time steps under each variant in turn."""

from __future__ import annotations

import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter, process_time, sleep
from typing import Any

import bench_edits
import bench_variants
import torch
import torch.distributed as dist
from bench_variants import Standing, Subject, Variant, in_order
from torch import Tensor, nn

from megatron_flex import cpu
from megatron_flex.progress import track
from tests.support import gpt

HEAD = 64  # size of an attention head
QUIET = 0.05  # of the machine's CPU time; a step during which others take more is disturbed
PAUSE = 2.0  # seconds before such a step is timed again
MOST = 8  # times that it is timed


@dataclass(frozen=True)
class Settings:
    """The model, and how long it is measured: `steps` timed steps of each variant after `warmup` rounds.

    `patience` is how many seconds may go, in all, into timing steps again that other processes disturbed.
    """

    tp: int
    layers: int
    hidden: int
    ffn: int
    seq: int
    batch: int
    steps: int
    warmup: int
    patience: float
    edit: bool


@dataclass(frozen=True)
class Timed:
    """A step: milliseconds by the clock and of this rank's CPU.

    Also, the same on all ranks: the machine's share that other processes took, and the mean of all clocks.
    """

    wall: float
    cpu: float
    others: float
    mean: float


Step = Callable[[Callable[..., Tensor]], None]


def measure(settings: Settings) -> dict[str, Any]:
    """Run all rounds. Collective over the world.

    Returns:
        `wall`, `cpu` and `others` of this rank's steps by variant; `notes`; `mib`: what is read.
    """
    logging.disable(logging.WARNING)  # what Megatron advises is not about this
    cpu.enable()
    subject, step = build(settings)
    ways = (bench_edits if settings.edit else bench_variants).variants(subject)
    notes = check_edits(ways, step) if settings.edit else check(ways, step, settings.tp)
    times: dict[str, list[Timed]] = {letter: [] for letter in ways}
    gc.collect()
    gc.freeze()
    patience = settings.patience
    for number, order in enumerate(orders(list(ways), settings.warmup + settings.steps), -settings.warmup):
        for letter in order:
            tries = visit(ways[letter], step, subject.model, patience if number >= 0 else 0.0)
            patience -= sum(PAUSE + t.mean / 1e3 for t in tries[1:])
            if number >= 0:
                times[letter].append(min(tries, key=lambda t: t.others))
    kinds = ("wall", "cpu", "others")
    out: dict[str, Any] = {k: {x: [getattr(t, k) for t in times[x]] for x in ways} for k in kinds}
    feature = settings.seq * settings.batch * 4 / 2**20  # MiB, fp32
    mib = {"fc1": feature * 2 * settings.ffn, "fc2": feature * settings.hidden}
    return out | {"notes": notes, "mib": mib}


def orders(letters: list[str], rounds: int, what: str = "measuring") -> Iterator[list[str]]:
    """The order of the variants in each round: rotated by one each time, every other one backwards.

    Who watches the first rank's terminal sees how far it is, under the name of `what`.
    """
    for number in track(range(rounds), what, unit="rounds"):
        at = number % len(letters)
        order = letters[at:] + letters[:at]
        yield order[::-1] if number % 2 else order


def visit(variant: Variant, step: Step, model: nn.Module, patience: float) -> list[Timed]:
    """Put a variant in place, run a step that settles it, time the next one, take it out.

    Returns:
        The timed step, and more of them while others disturb it and `patience` (seconds) is left.
    """
    with variant() as standing:
        step(standing.call)
        _forget(standing, model)
        tries = [_timed(standing, step, model)]
        while tries[-1].others > QUIET and patience > 0 and len(tries) < MOST:
            sleep(PAUSE)
            tries.append(_timed(standing, step, model))
            patience -= PAUSE + tries[-1].mean / 1e3
    return tries


def _timed(standing: Standing, step: Step, model: nn.Module) -> Timed:
    """From a barrier to the end of a step. Collective."""
    gc.collect()
    dist.barrier()
    clock, spent, busy = perf_counter(), process_time(), machine_seconds()
    step(standing.call)
    clock, spent, busy = perf_counter() - clock, process_time() - spent, machine_seconds() - busy
    _forget(standing, model)
    sums = torch.tensor([spent, busy, clock], dtype=torch.float64)
    dist.all_reduce(sums)
    ours, *of_ranks = sums.tolist()
    all_of_it, length = (x / dist.get_world_size() for x in of_ranks)
    others = max(0.0, all_of_it - ours) / (length * (os.cpu_count() or 1))
    return Timed(clock * 1e3, spent * 1e3, others, length * 1e3)


def machine_seconds() -> float:
    """CPU seconds that this machine has spent, by all processes, and that its host took; 0 where unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _forget(standing: Standing, model: nn.Module) -> None:
    standing.forget()
    for parameter in model.parameters():
        parameter.grad = None


def check(ways: dict[str, Variant], step: Step, tp: int) -> list[str]:
    """See that the variants read the same tensors, so that the same work is compared."""
    read: dict[str, dict[str, Tensor]] = {}
    for letter in [w for w in "cef" if w in ways]:
        with ways[letter]() as standing:
            step(standing.call)
            read[letter] = dict(standing.read()) if dist.get_rank() == 0 else {}
            standing.forget()
    if dist.get_rank():
        return []
    _compare("c", read["c"], read["f"])
    notes = ["(c) and (f) read the same tensors, bit for bit"]
    if "e" in read:
        ordered = {n: in_order(t, tp) if "fc1" in n else t for n, t in read["e"].items()}
        _compare("e", ordered, read["f"])
        notes.append("(e) too, once its fc1 is put in order: it leaves [gate|up] in the order of the ranks")
    else:
        notes.append("(e) is not measured: flex-model 0.1.0 from the package index is not installed")
    return notes


def check_edits(ways: dict[str, Variant], step: Step) -> list[str]:
    """See that all variants that edit make the same output, and those that do not another."""
    made: dict[str, Tensor] = {}
    for letter in (w for w in "eghij" if w in ways):
        with ways[letter]() as standing:
            step(standing.call)
            made[letter] = standing.read()["output"].clone()
            standing.forget()
    for letter, output in made.items():
        if torch.allclose(output, made["h"], rtol=1e-5, atol=1e-5) is (letter == "g"):
            raise AssertionError(f"({letter}) does not make of the model what it should")
    absent = "" if "e" in made else "; (e) is not measured: flex-model 0.1.0 is not installed"
    return [f"the output is the same under {', '.join(f'({x})' for x in made if x != 'g')}{absent}"]


def _compare(letter: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    wrong = [n for n in want if n not in got or not torch.equal(got[n], want[n])]
    if wrong or len(got) != len(want):
        raise AssertionError(f"({letter}) does not read what (f) reads: {', '.join(wrong) or 'more tensors'}")


def build(settings: Any, gated: bool = True, head: int = HEAD, device: str = "cpu") -> tuple[Subject, Step]:
    """Megatron's model of this rank, and one run of its schedule: one microbatch forward and backward.

    Args:
        settings: Settings, or others with the model's sizes.
        gated: whether fc1 returns `[gate|up]`.
        head: size of an attention head.
        device: where it runs.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    heads = settings.hidden // head
    extra = {
        "hidden_size": settings.hidden,
        "ffn_hidden_size": settings.ffn,
        "kv_channels": head,
        "num_attention_heads": heads,
        "num_query_groups": heads,
    }
    case = gpt.Case("bench", tp=settings.tp, layers=settings.layers, gated=gated, groups=heads, extra=extra)
    gpt.initialize(case)
    model = gpt.build(case)[0].to(device)
    group = parallel_state.get_tensor_model_parallel_group()
    batch = {name: tensor.to(device) for name, tensor in _data(settings).items()}

    def step(call: Callable[..., Tensor]) -> None:
        get_forward_backward_func()(
            forward_step_func=lambda _, __: (call(**batch), _loss),
            data_iterator=itertools.repeat(None),
            model=model,
            num_microbatches=1,
            seq_length=settings.seq,
            micro_batch_size=settings.batch,
            forward_only=False,
        )

    return Subject(model, settings.layers, settings.ffn, group), step


def _data(settings: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (settings.batch, settings.seq + 1)
    tokens = torch.randint(0, gpt.VOCABULARY, shape, generator=generator)
    mask = torch.ones(1, 1, settings.seq, settings.seq, dtype=torch.bool)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "position_ids": torch.arange(settings.seq).expand(settings.batch, -1),
        "attention_mask": torch.triu(mask, diagonal=1),
        "labels": tokens[:, 1:].contiguous(),
    }


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.mean()
    return loss, {"loss": loss.detach()}
