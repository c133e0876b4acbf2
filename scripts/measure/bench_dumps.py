"""scripts/bench --dump: what writing every fc1 and fc2 output to disk costs a step.

Other ways to do it are beside it.

Variants take turns within each round. A visit is some steps one behind the other, as in training, and then
the wait until everything is with the operating system: both are timed, since a writer in the background could
hide its work.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from bench_rank import Settings, _forget, build, orders
from bench_variants import Subject, _hooked
from torch import Tensor, nn

import megatron_flex as mf
from megatron_flex import cpu

STEPS = 4  # of a visit, that are timed; one goes before them


@dataclass
class Writing:
    """A variant in place: what follows each step, and what ends the visit."""

    after: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    found: dict[str, float] = field(default_factory=dict)


Save = Callable[[dict[str, Tensor], Path], None]
Way = Callable[[Subject, Path], AbstractContextManager[Writing]]


def _mine(name: str) -> bool:
    """Whether this rank writes what a module returns: its shard of fc1; of fc2, which all have, in turn."""
    return "fc1" in name or int(name.split(".")[2]) % dist.get_world_size() == dist.get_rank()


@contextmanager
def nothing(subject: Subject, folder: Path) -> Iterator[Writing]:
    """(a) The model alone."""
    yield Writing()


@contextmanager
def by_hand(
    save: Callable[[dict[str, Tensor], Path], None], subject: Subject, folder: Path
) -> Iterator[Writing]:
    """Hooks that clone this rank's shard, and a file of them when the step is over."""
    kept: dict[str, Tensor] = {}
    number = 0

    def hook(name: str, _: nn.Module, __: Any, output: Any) -> None:
        if _mine(name):
            kept[name] = output[0].detach().clone()

    def after() -> None:
        nonlocal number
        save(kept, folder / f"{number}-{dist.get_rank()}")
        number += 1
        kept.clear()

    with _hooked(subject, hook):
        yield Writing(after)


def with_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """(r) One safetensors file of each rank and step."""
    from safetensors.torch import save_file

    save_file(tensors, path)


def with_torch(tensors: dict[str, Tensor], path: Path) -> None:
    """(t) One torch.save of each rank and step."""
    torch.save(tensors, path)


@contextmanager
def ours(options: dict[str, Any], subject: Subject, folder: Path) -> Iterator[Writing]:
    """(m) megatron_flex: a Dump."""
    patterns = ["decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"]
    flex = mf.attach(subject.model, dumps=mf.Dump(folder / "dump", patterns, **options))
    (dumped,) = flex.session.sinks.dumps
    writer = dumped._taking.writer
    writing = Writing()

    def end() -> None:
        flex.restore()
        assert writer.tally.written == STEPS + 1, writer.tally
        writing.found["held"] = float(writer.greatest)

    writing.end = end
    yield writing


WAYS: dict[str, Way] = {
    "a": nothing,
    "r": partial(by_hand, with_safetensors),
    "t": partial(by_hand, with_torch),
    "m": partial(ours, {}),
    "h": partial(ours, {"dtype": "bf16"}),
    "q": partial(ours, {"tokens": slice(None, None, 16)}),
}


def measure(settings: Settings, place: str, rates: bool) -> dict[str, Any]:
    """Run all rounds. Collective over the world; `rates`: rank 0 times the disk alone afterwards."""
    logging.disable(logging.WARNING)
    cpu.enable()
    subject, step = build(settings)
    steps: dict[str, list[float]] = {x: [] for x in WAYS}
    drained: dict[str, list[float]] = {x: [] for x in WAYS}
    sizes: dict[str, float] = {}
    held: dict[str, float] = {}
    gc.collect()
    gc.freeze()
    for number, order in enumerate(orders(list(WAYS), settings.warmup + settings.steps), -settings.warmup):
        for letter in order:
            folder = _folder(place)
            with WAYS[letter](subject, folder) as writing:
                took, waited = _visit(writing, partial(step, subject.model), subject.model)
            dist.barrier()
            if number >= 0:
                steps[letter].append(took)
                drained[letter].append(took + waited / STEPS)
                held[letter] = max(held.get(letter, 0.0), writing.found.get("held", 0.0))
                sizes[letter] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / (STEPS + 1)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
    out: dict[str, Any] = {"steps": steps, "drained": drained, "bytes": sizes, "held": held}
    if rates and dist.get_rank() == 0:
        out["rates"] = throughput(Path(place))
    dist.barrier()
    return out


def _folder(place: str) -> Path:
    told = [tempfile.mkdtemp(dir=place) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    return Path(str(told[0]))


def _visit(writing: Writing, step: Callable[[], None], model: nn.Module) -> tuple[float, float]:
    """Milliseconds of a step, and what the wait at the end took."""
    from bench_variants import Standing

    standing = Standing(model, dict, lambda: None)
    step()
    writing.after()
    _forget(standing, model)
    gc.collect()
    dist.barrier()
    start = perf_counter()
    for _ in range(STEPS):
        step()
        writing.after()
        _forget(standing, model)
    dist.barrier()
    middle = perf_counter()
    writing.end()
    dist.barrier()
    end = perf_counter()
    return (middle - start) * 1e3 / STEPS, (end - middle) * 1e3


# -- the disk alone ------------------------------------------------------------------------------------


SUSTAINED = 4  # iterations that are written one behind the other


def throughput(place: Path, mib: int = 128, rounds: int = 5) -> dict[str, list[float]]:
    """MiB/s of one process: the writer and plain writes; the reader and a copy out of a mapping.

    Also what the writer does besides plain writes: copies, into memory that is there already, and checksums.
    Memory is touched before each measurement, as a virtual machine may have given it back to its host, which
    then hands it out more slowly than anything here writes to it.
    """
    tensors = [torch.randn(512, 4, 1024) for _ in range(mib // 8)]
    rooms = [torch.zeros_like(t) for t in tensors]
    out: dict[str, list[float]] = {}

    def note(name: str, amount: int, write: Callable[[], None]) -> None:
        touch_memory(mib)
        start = perf_counter()
        write()
        out.setdefault(name, []).append(amount / (perf_counter() - start))

    for _ in range(rounds):
        for iterations, suffix in ((1, ""), (SUSTAINED, " sustained")):
            folder = Path(tempfile.mkdtemp(dir=place))
            note(f"raw write{suffix}", mib * iterations, partial(write_raw, folder, tensors, iterations))
            if iterations == 1:
                note("copy", mib, partial(copy_all, tensors, rooms))
                note("copies in two threads", mib, partial(copy_in_two_threads, tensors, rooms))
                note("checksums", mib, partial(compute_all_checksums, rooms))
                note("raw read", mib, partial(read_raw, folder / "raw0", mib))
            shutil.rmtree(folder)
            folder = Path(tempfile.mkdtemp(dir=place))
            note(f"writer{suffix}", mib * iterations, partial(write_dump, folder, tensors, iterations))
            shutil.rmtree(folder)
        out.setdefault("reader", []).append(mib / read_back(place, tensors))
    return out


def touch_memory(mib: int) -> None:
    """Write to twice as much new memory, on small and on huge pages, and release it."""
    from megatron_flex.dump.host_memory import allocate_on_host

    for memory in (torch.empty(mib << 19), allocate_on_host([mib << 19], torch.float32)):
        memory.zero_()


def read_raw(path: Path, mib: int) -> None:
    """Copy a file out of a mapping."""
    torch.from_file(str(path), size=mib << 18, dtype=torch.float32).clone()


def copy_all(tensors: list[Tensor], rooms: list[Tensor]) -> None:
    """Copy tensors into other ones."""
    for tensor, room in zip(tensors, rooms, strict=True):
        room.copy_(tensor)


def copy_in_two_threads(tensors: list[Tensor], rooms: list[Tensor]) -> None:
    """Copy half of the tensors in each of two threads."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(copy_all, tensors[half::2], rooms[half::2]) for half in range(2)]:
            done.result()


def compute_all_checksums(tensors: list[Tensor]) -> None:
    """The checksums that a dump has of these tensors."""
    from megatron_flex.checksums import compute_block_checksums

    for tensor in tensors:
        compute_block_checksums(memoryview(tensor.view(torch.uint8).numpy()).cast("B"))


def write_raw(folder: Path, tensors: list[Tensor], iterations: int) -> None:
    """Write the tensors to a file for each iteration."""
    for number in range(iterations):
        with (folder / f"raw{number}").open("wb", buffering=0) as file:
            for tensor in tensors:
                file.write(memoryview(tensor.view(torch.uint8).numpy()).cast("B"))


def write_dump(folder: Path, tensors: list[Tensor], iterations: int) -> None:
    """Write the tensors as iterations of a dump, and wait until all are with the operating system."""
    from megatron_flex.dump import VALUE, Dump, DumpWriter, ShardEntry
    from megatron_flex.layout import replicated

    (folder / "run").mkdir()
    dump = Dump(folder, ["x"], queue_bytes=128 << 20)
    writer = DumpWriter(folder / "run", 0, {}, dump)
    for iteration in range(iterations):
        writer.begin(iteration, 0, True, 1)
        for number, tensor in enumerate(tensors):
            entry = ShardEntry("x", VALUE, number, 0, 0, tuple(tensor.shape), "")
            writer.put(entry, replicated("s", "b", "h"), tensor)
        writer.finish()
    writer.close()


def read_back(place: Path, tensors: list[Tensor]) -> float:
    """Seconds in which a dump of these tensors, of four tensor parallel ranks, is read whole."""
    from tests.support import dumps

    folder = Path(tempfile.mkdtemp(dir=place))
    whole = torch.stack([t.transpose(0, 1) for t in tensors], 1).flatten(1, 2)[None]
    given = dumps.Given(whole.reshape(1, -1, *tensors[0].shape[::2]), dumps.COLUMN)
    dumps.write(folder / "dump", {"x": given}, mesh={"tp": 4}, microbatches=len(tensors))
    del whole, given
    with mf.open_dump(folder / "dump") as dump:
        touch_memory(sum(t.nbytes for t in tensors) >> 20)
        start = perf_counter()
        got = dump["x"].torch()
        took = perf_counter() - start
    assert got.numel() == sum(t.numel() for t in tensors)
    shutil.rmtree(folder)
    return took


# -- what a person reads -------------------------------------------------------------------------------

LABELS = {
    "a": "nothing attached",
    "r": "hooks clone, safetensors.save_file",
    "t": "hooks clone, torch.save",
    "m": "megatron_flex dumps",
    "h": "megatron_flex dumps, bf16",
    "q": "megatron_flex dumps, every 16th token",
}


def run(args: Any) -> dict[str, Any]:
    """Measure everything."""
    from tests.support.pool import run_alone as run_ranks

    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        ranks = run_ranks(args.tp, measure, settings, place, True, timeout=args.timeout)
    slowest = {
        kind: {x: [max(t) for t in zip(*(r[kind][x] for r in ranks), strict=True)] for x in WAYS}
        for kind in ("steps", "drained")
    }
    held = {x: max(r["held"].get(x, 0.0) for r in ranks) for x in WAYS}
    return {**slowest, "bytes": ranks[0]["bytes"], "held": held, "rates": ranks[0]["rates"]}


def report(result: dict[str, Any]) -> str:
    """A table and the ratios that matter, with the interval of their median."""
    from bench_report import _interval, _markdown, spread

    table = [["variant", "step, ms", "over (a)", "over (r)", "to the end, ms", "over (r)", "MiB a step"]]
    for letter in WAYS:
        steps, ends = result["steps"][letter], result["drained"][letter]
        row = [f"({letter}) {LABELS[letter]}", f"{statistics.median(steps):.1f}"]
        for times, others in ((steps, "a"), (steps, "r")):
            row.append(_ratio(times, result["steps"][others], spread, _interval))
        row += [f"{statistics.median(ends):.1f}", _ratio(ends, result["drained"]["r"], spread, _interval)]
        row.append(f"{result['bytes'][letter] / 2**20:.1f}")
        table.append(row)
    rates = {n: statistics.median(v) for n, v in result["rates"].items()}
    told = ", ".join(f"{n} {v:.0f}" for n, v in rates.items())

    def over(one: str, other: str) -> str:
        pairs = zip(result["rates"][one], result["rates"][other], strict=True)
        return _interval(spread([a / b for a, b in pairs]), 2)

    steps = zip(
        *(result["rates"][name] for name in ("writer", "copy", "checksums", "raw write")), strict=True
    )
    of_sum = _interval(spread([writer * sum(1 / r for r in parts) for writer, *parts in steps]), 2)
    return "\n".join(
        [
            _markdown(table),
            "",
            f"one process, MiB/s: {told}",
            f"writer over raw writes of the same bytes: {over('writer', 'raw write')}, "
            f"{SUSTAINED} iterations: {over('writer sustained', 'raw write sustained')}",
            f"writer over a copy, checksums and raw writes one after the other: {of_sum}",
            "reader, which puts four ranks' shards together, over a copy out of a mapped file: "
            + over("reader", "raw read"),
            f"most that the queue held: {result['held']['m'] / 2**20:.1f} MiB",
        ]
    )


def _ratio(times: list[float], base: list[float], spread: Any, interval: Any) -> str:
    return str(interval(spread([t / b for t, b in zip(times, base, strict=True)]), 3))


def main(args: Any) -> None:
    """Measure and print."""
    import shlex
    import sys

    result = run(args)
    print("$ " + shlex.join(["scripts/bench", *sys.argv[1:]]))
    print(report(result))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
