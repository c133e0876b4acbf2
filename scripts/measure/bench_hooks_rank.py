"""What one rank of scripts/bench --hooks does: check the ways, count what each sends, time steps in turn."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import bench_statistics
import torch
import torch.distributed as dist
from bench_rank import Step, Timed, _forget, _timed, build, orders
from bench_sent import counting, on_loopback
from bench_variants import Standing, Subject, idle, nothing
from bench_ways import Place, Way, detached, statistics, ways
from torch import Tensor

from megatron_flex import cpu

HEAD = 16  # size of an attention head: the model is small beside the tensors that are hooked
COUNTED = 2  # steps whose bytes on the loopback interface are looked at: of the quieter one
READS = ("read", "flex-model read")
EDITS = ("local by hand", "local in place", "local", "general", "flex-model edit")


@dataclass(frozen=True)
class Settings:
    """The model, and how long it is measured: `repeats` timed steps in each visit of each round.

    `ffn` is fc1's width, not gated, whose whole output is `mib` large; `only` names ways, empty for all.
    """

    tp: int
    mib: float
    layers: int
    hidden: int
    ffn: int
    seq: int
    batch: int
    rounds: int
    warmup: int
    repeats: int
    folder: str | None
    only: tuple[str, ...] = ()


Standings = dict[str, Callable[[], AbstractContextManager[Standing]]]


def measure(settings: Settings) -> dict[str, Any]:
    """Time hooks on tensors of one size. Collective over the world.

    Returns:
        `ms` and `cpu` (milliseconds of its threads) by way, round and step, of this rank; `others`: likewise,
        the machine's share that other processes took; `sent` by way, of one step.
    """
    subject, step, made = _begin(settings, gated=False, head=HEAD)
    chosen = {n: _at(way, subject) for n, way in made.items() if not settings.only or n in settings.only}
    check(chosen, step)
    sent = {name: _counted(way, step, subject) for name, way in chosen.items()}
    return _rounds(chosen, step, subject, settings) | {"sent": sent}


def measure_steps(settings: Settings) -> dict[str, Any]:
    """Time whole steps of a model of usual proportions: alone, idle, detached, and with statistics."""
    subject, step, _ = _begin(settings, gated=True)
    place = Place(settings.folder)
    made: dict[str, Way] = {"none": nothing, "idle": idle, "detached": detached}
    made["statistics"] = lambda s: statistics(place, bench_statistics.SITES, s)
    return _rounds({n: _at(way, subject) for n, way in made.items()}, step, subject, settings)


def _begin(settings: Settings, **model: Any) -> tuple[Subject, Step, dict[str, Way]]:
    logging.disable(logging.WARNING)  # what Megatron advises is not about this
    cpu.enable()
    subject, step = build(settings, **model)
    return subject, step, ways(Place(settings.folder))


def _at(way: Way, subject: Subject) -> Callable[[], AbstractContextManager[Standing]]:
    return lambda: way(subject)


def _rounds(chosen: Standings, step: Step, subject: Subject, settings: Settings) -> dict[str, Any]:
    times: dict[str, list[list[Timed]]] = {name: [] for name in chosen}
    gc.collect()
    gc.freeze()
    total = settings.warmup + settings.rounds
    what = f"TP={settings.tp}, {settings.mib:g} MiB"
    for number, order in enumerate(orders(list(chosen), total, what), 1 - settings.warmup):
        for name in order:
            visited = _visit(chosen[name], step, subject, settings.repeats)
            if number > 0:
                times[name].append(visited)
    return {
        "ms": {name: [[t.wall for t in visit] for visit in visits] for name, visits in times.items()},
        "cpu": {name: [[t.cpu for t in visit] for visit in visits] for name, visits in times.items()},
        "others": [t.others for visits in times.values() for visit in visits for t in visit],
    }


def _visit(
    way: Callable[[], AbstractContextManager[Standing]], step: Step, subject: Subject, repeats: int
) -> list[Timed]:
    """Put it in place, run a step that settles it, time some; a step ends with its captures there."""
    with way() as standing:

        def to_the_end(call: Callable[..., Tensor]) -> None:
            step(call)
            standing.read()

        to_the_end(standing.call)
        _forget(standing, subject.model)
        return [_timed(standing, to_the_end, subject.model) for _ in range(repeats)]


def _counted(
    way: Callable[[], AbstractContextManager[Standing]], step: Step, subject: Subject
) -> dict[str, Any]:
    """Calls and bytes of one settled step, and the bytes that all processes put on the loopback meanwhile."""
    wires = []
    with way() as standing:
        step(standing.call)
        _forget(standing, subject.model)
        for _ in range(COUNTED):
            dist.barrier()
            before = on_loopback()
            dist.barrier()
            with counting() as sent:
                step(standing.call)
                standing.read()
            dist.barrier()
            after = on_loopback()
            dist.barrier()
            _forget(standing, subject.model)
            if before is not None and after is not None:
                wires.append(after - before)
    return {"calls": dict(sent.calls), "nbytes": sent.nbytes, "wire": min(wires, default=None)}


def check(chosen: Standings, step: Step) -> None:
    """See that the ways do the same: those that read have the same tensors, those that edit the same output.

    Raises:
        AssertionError: they do not.
    """
    whole = _seen(chosen, "gather", step)
    for name in READS:
        _same(name, _seen(chosen, name, step), whole)
    one = {name: value[-1:] for name, value in whole.items()}
    _same("selected", {n: v.view_as(one[n]) for n, v in _seen(chosen, "selected", step).items()}, one)
    del whole, one  # they may be large
    edited = _seen(chosen, "all-gather", step, everywhere=True)
    for name in EDITS:
        found = _seen(chosen, name, step, everywhere=True)
        if found and not torch.allclose(found["output"], edited["output"], rtol=1e-5, atol=1e-5):
            raise AssertionError(f"({name}) does not make of the model what the hand-written edit does")


def _seen(chosen: Standings, name: str, step: Step, everywhere: bool = False) -> dict[str, Tensor]:
    """What a way has read when a step is over; nothing where it is not measured."""
    if name not in chosen:
        return {}
    with chosen[name]() as standing:
        step(standing.call)
        found = {n: t.to("cpu", copy=True) for n, t in standing.read().items()}
        standing.forget()
    return found if everywhere or dist.get_rank() == 0 else {}


def _same(name: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    wrong = [n for n in found if not torch.equal(found[n], wanted[n])]
    if wrong:
        raise AssertionError(f"({name}) does not read what the hand-written gather reads: {', '.join(wrong)}")
