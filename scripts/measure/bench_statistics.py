"""scripts/bench --statistics: what measuring all of the residual stream and the MLPs costs, in every step.

Variants take turns within each round, as in the other runs; files are written, and the all-reduce is waited
for, within the steps that are timed.
"""

from __future__ import annotations

import gc
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_rank import Settings, Timed, build, orders, visit
from bench_variants import Standing, Subject, Variant, nothing
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import cpu
from megatron_flex.collectives.meter import CollectiveCall, meter

SITES = [
    "embedding",
    "decoder.layers.*",  # the residual stream behind each layer
    "decoder.layers.*:mid",  # and behind its attention
    "decoder.layers.*.mlp.linear_fc1",
    "decoder.layers.*.mlp.linear_fc2:input",
    "decoder.layers.*.mlp",
]
TARGET = 1.05
LABELS = {
    "a": "nothing attached",
    "s": "statistics",
    "n": "statistics without histogram",
    "g": "statistics, gradients too",
    "t": "hooks call torch on the shard",
}


@contextmanager
def ours(options: dict[str, Any], subject: Subject) -> Iterator[Standing]:
    """(s), (n), (g) megatron_flex: Statistics of all sites, into JSON lines."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    folder = Path(str(told[0]))
    with mf.attach(subject.model, statistics=mf.Statistics(folder, SITES, **options)):
        yield Standing(subject.model, dict, lambda: None)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


@contextmanager
def by_hand(subject: Subject) -> Iterator[Standing]:
    """(t) Hand-written: a forward hook that asks torch for the same numbers of this shard.

    Each rank has other numbers then, and nobody the whole's; there is no histogram.
    """
    kept: dict[str, Tensor] = {}

    def hook(name: str, module: nn.Module, args: Any, output: Any) -> None:
        found = args if name.endswith("fc2") else output
        values = (found[0] if isinstance(found, tuple) else found).detach()
        centered = values - values.mean()
        variance = centered.square().mean()
        numbers = [
            values.mean(),
            variance.sqrt(),
            values.square().mean().sqrt(),
            values.abs().max(),
            (values == 0).float().mean(),
            centered.pow(4).mean() / variance.square(),
        ]
        kept[name] = torch.stack(numbers)

    names = ["embedding"]
    for n in range(subject.layers):
        layer = f"decoder.layers.{n}"
        names += [layer, f"{layer}.self_attention", f"{layer}.mlp"]
        names += [f"{layer}.mlp.linear_fc1", f"{layer}.mlp.linear_fc2"]
    handles = [subject.model.get_submodule(n).register_forward_hook(partial(hook, n)) for n in names]
    try:
        yield Standing(subject.model, lambda: kept, kept.clear)
    finally:
        for handle in handles:
            handle.remove()


def variants(subject: Subject) -> dict[str, Variant]:
    """All of them, by letter."""
    made: dict[str, Callable[[Subject], Any]] = {
        "a": nothing,
        "s": partial(ours, {}),
        "n": partial(ours, {"histogram": False}),
        "g": partial(ours, {"gradients": True}),
        "t": by_hand,
    }
    return {letter: partial(make, subject) for letter, make in made.items()}


def measure(settings: Settings) -> dict[str, Any]:
    """Run all rounds. Collective over the world."""
    logging.disable(logging.WARNING)
    cpu.enable()
    subject, step = build(settings)
    ways = variants(subject)
    counts = {letter: _counted(ways[letter], step) for letter in ways if letter in "sng"}
    times: dict[str, list[Timed]] = {letter: [] for letter in ways}
    gc.collect()
    gc.freeze()
    patience = settings.patience
    for number, order in enumerate(orders(list(ways), settings.warmup + settings.steps), -settings.warmup):
        for letter in order:
            tries = visit(ways[letter], step, subject.model, patience if number >= 0 else 0.0)
            patience -= sum(2.0 + t.mean / 1e3 for t in tries[1:])
            if number >= 0:
                times[letter].append(min(tries, key=lambda t: t.others))
    kinds = ("wall", "cpu", "others")
    out: dict[str, Any] = {k: {x: [getattr(t, k) for t in times[x]] for x in ways} for k in kinds}
    return out | {"counts": counts}


def _counted(variant: Variant, step: Callable[..., None]) -> dict[str, float]:
    """Of the second of two steps: collectives of ours, their bytes, tensors, and bytes on disk."""
    seen: list[CollectiveCall] = []
    with variant() as standing:
        step(standing.call)
        meter.sink = seen.append
        step(standing.call)
        meter.sink = None
    return {"collectives": len(seen), "nbytes": sum(m.nbytes for m in seen)}


def on_disk(settings: Settings) -> dict[str, float]:
    """Rows and bytes of a step's lines. Collective over the world; anything on rank 0 only."""
    cpu.enable()
    subject, step = build(settings)
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    folder = Path(str(told[0]))
    with mf.attach(subject.model, statistics=mf.Statistics(folder, SITES)):
        for _ in range(4):
            step(subject.model)
    dist.barrier()
    if dist.get_rank():
        return {}
    with _opened(folder) as (lines, found):
        return {"tensors": len(found.sites), "line_bytes": sum(map(len, lines[1:])) / len(found.iterations)}


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[list[str], Any]]:
    """The lines of the only file of a folder, and the reader; the folder goes."""
    (file,) = folder.glob("*.jsonl")
    try:
        yield file.read_text(encoding="utf-8").splitlines(keepends=True), mf.open_statistics(folder)
    finally:
        shutil.rmtree(folder)


# -- what a person reads -------------------------------------------------------------------------------


def run(args: Any) -> dict[str, Any]:
    """Measure everything."""
    from tests.support.pool import run_alone as run_ranks

    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    ranks = run_ranks(args.tp, measure, settings, timeout=args.timeout)
    disk = run_ranks(args.tp, on_disk, settings, timeout=args.timeout)[0]
    letters = ranks[0]["wall"]

    def over(kind: str, join: Callable[..., float]) -> dict[str, list[float]]:
        return {x: [join(t) for t in zip(*(r[kind][x] for r in ranks), strict=True)] for x in letters}

    return {
        "ms": over("wall", max),
        "cpu_ms": over("cpu", sum),
        "others": over("others", max),
        "counts": ranks[0]["counts"],
        "disk": disk,
    }


def report(result: dict[str, Any]) -> str:
    """A table, what is sent and written, and whether the target is met."""
    from bench_report import _interval, _markdown, _percent, _verdict, spread

    ms, cpu_ms = result["ms"], result["cpu_ms"]
    table = [["variant", "ms (quartiles)", "over (a)", "CPU ms of all ranks", "over (a)", "sent a step"]]
    ratios = {}
    for letter in LABELS:
        wall, spent = spread(ms[letter]), spread(cpu_ms[letter])
        ratio = spread([t / a for t, a in zip(ms[letter], ms["a"], strict=True)])
        more = spread([t / a for t, a in zip(cpu_ms[letter], cpu_ms["a"], strict=True)])
        ratios[letter] = ratio
        sent = result["counts"].get(letter)
        told = f"{sent['collectives']} all-reduce, {sent['nbytes'] / 1024:.1f} KiB" if sent else ""
        table.append(
            [
                f"({letter}) {LABELS[letter]}",
                f"{wall['median']:.1f} ({wall['q1']:.1f}–{wall['q3']:.1f})",
                "1" if letter == "a" else _interval(ratio, 3),
                f"{spent['median']:.1f}",
                "1" if letter == "a" else _interval(more, 3),
                told,
            ]
        )
    disk = result["disk"]
    return "\n".join(
        [
            _markdown(table),
            "",
            f"{disk['tensors']} tensors; their lines are {disk['line_bytes'] / 1024:.1f} KiB a step",
            f"other processes took {_percent(result, 50)} of the machine in the median step, "
            f"{_percent(result, 90)} or more in one of ten",
            f"target: (s) over (a) at most {TARGET}: {_interval(ratios['s'], 3)}, "
            + _verdict(ratios["s"], TARGET),
        ]
    )


def main(args: Any) -> None:
    """Measure and print."""
    import json
    import shlex
    import sys

    if args.json:
        Path(args.json).touch()
    result = run(args)
    print("$ " + shlex.join(["scripts/bench", *sys.argv[1:]]))
    print(report(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
