"""scripts/bench --launch: what the runner costs a real pretrain script, at its start and in each step.

Every figure of a step is from whole runs of scripts/pretrain_tiny.py by Megatron's own `pretrain()`, in
ranks that are forked from a process with Megatron loaded. Each round runs every variant once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import resource
import runpy
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from bench_rank import orders
from bench_report import _interval, _markdown, spread

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "pretrain_tiny.py"
SETTLE = 3  # iterations of a run that are not counted
START_RUNS = 5
FC1, FC2 = "decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"
VARIANTS = {  # label, our flags; OUT is a folder of the run
    "a": ("plain: python SCRIPT", None),
    "n": ("the runner, no flags", ""),
    "s": (
        "statistics of the residual stream, fc1, fc2",
        f"--flex-sites decoder.layers.* {FC1} {FC2} --flex-stats OUT",
    ),
    "e": ("an edit on shards: scale=1.01 at fc1", f"--flex-edit {FC1} scale=1.01"),
    "g": (
        "an edit on full tensors: a function at fc1",
        f"--flex-edit {FC1} {HERE / 'bench_edits.py'}:edit",
    ),
    "d": ("a dump of fc1 and fc2", f"--flex-sites {FC1} {FC2} --flex-dump OUT"),
}
LAYOUTS = {
    "TP=2": (2, "--tensor-model-parallel-size 2"),
    "TP=2 x PP=2, SP": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
}
FLAGS = """
--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --swiglu --kv-channels 64
--num-attention-heads {groups} --group-query-attention --num-query-groups {groups}
--normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length {seq} --max-position-embeddings {seq} --hidden-dropout 0 --attention-dropout 0
--tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 128
--micro-batch-size {batch} --global-batch-size {whole} --train-iters {steps}
--lr 1e-4 --seed 1 --eval-iters 0 --eval-interval 1000 --log-interval 1
--transformer-impl local --distributed-backend gloo --use-cpu-initialization --num-workers 0
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
"""
ELAPSED = re.compile(r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["bench_launch_loaded"])


# -- steps -------------------------------------------------------------------------------------------


def words_of(args: argparse.Namespace, layout: str) -> list[str]:
    """Megatron's flags."""
    settings = {name: getattr(args, name) for name in ("layers", "hidden", "ffn", "seq", "batch")}
    settings |= {"batch": max(1, args.batch // 2), "whole": max(2, args.batch)}  # two microbatches
    settings |= {"groups": args.hidden // 64, "steps": args.steps + SETTLE}
    return [*FLAGS.format(**settings).split(), *layout.split()]


def rank(number: int, world: int, port: int, command: list[str], log: str) -> None:
    """One rank of a run: what torchrun would start, in a process that has imported all of it."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path[:0] = [str(SCRIPT.parent), str(HERE)]
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    from megatron_flex import cpu

    cpu.enable()
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def train(world: int, command: list[str], folder: Path, seconds: float) -> list[float]:
    """Milliseconds of each iteration of one run, without the first ones.

    Raises:
        SystemExit: a rank failed or took too long; the end of its log is shown.
    """
    port = free_port()
    logs = [folder / f"log-{n}" for n in range(world)]
    ranks = [
        _context.Process(target=rank, args=(n, world, port, command, str(logs[n])), daemon=True)
        for n in range(world)
    ]
    for process in ranks:
        process.start()
    end = perf_counter() + seconds
    for process in ranks:
        process.join(max(0.0, end - perf_counter()))
    bad = [n for n, process in enumerate(ranks) if process.exitcode]
    for process in ranks:
        process.kill()
    if bad:
        tail = logs[bad[0]].read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{tail}\nerror: rank {bad[0]} of {shlex.join(command[:3])} … failed")
    told = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    return [float(ms) for iteration, ms in ELAPSED.findall(told) if int(iteration) > SETTLE]


def measure_steps(args: argparse.Namespace, layout: str) -> dict[str, list[float]]:
    """The median step of each run, milliseconds, by variant; one entry for each round."""
    world, cut = LAYOUTS[layout]
    base = words_of(args, cut)
    out: dict[str, list[float]] = {letter: [] for letter in args.variants}
    for order in orders(list(args.variants), args.rounds, layout):
        for letter in order:
            ours = VARIANTS[letter][1]
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-launch-") as name:
                command = [str(SCRIPT), *base]
                if ours is not None:
                    flags = ours.replace("OUT", f"{name}/out").split()
                    command = ["-m", "megatron_flex.launch", *command, "--flex-cpu", *flags]
                times = train(world, command, Path(name), args.timeout)
            out[letter].append(statistics.median(times))
    return out


# -- the start ---------------------------------------------------------------------------------------


def measure_start() -> dict[str, dict[str, list[float]]]:
    """Fresh interpreters run a script which imports what a pretrain script does, and ends.

    Returns:
        Seconds, and seconds of CPU, which a busy machine changes less; by way.
    """
    ways = ("python SCRIPT", "runner", "runner, flags")
    out: dict[str, dict[str, list[float]]] = {way: {"s": [], "CPU s": []} for way in ways}
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "imports.py"
        script.write_text("import torch\nimport megatron.training\n", encoding="utf-8")
        runner = [sys.executable, "-m", "megatron_flex.launch", str(script)]
        flags = ["--flex-sites", "decoder.layers.*", "--flex-stats", f"{name}/stats"]
        commands = dict(zip(ways, ([sys.executable, str(script)], runner, [*runner, *flags]), strict=True))
        for number, order in enumerate(orders(list(commands), START_RUNS + 1, "starting")):
            for way in order:
                began, spent = perf_counter(), children()
                subprocess.run(commands[way], check=True, capture_output=True, timeout=600)
                if number:  # the first ones fill the page cache
                    out[way]["s"].append(perf_counter() - began)
                    out[way]["CPU s"].append(children() - spent)
    return out


def children() -> float:
    """Seconds of CPU of all processes that were started here and are over."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# -- the report --------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> None:
    """Measure, print, and write the file that was asked for."""
    from bench import machine

    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    load = os.getloadavg()[0]
    result: dict[str, Any] = {"command": shlex.join(["scripts/bench", *sys.argv[1:]]), **machine()}
    result["start"] = measure_start()
    result["ms"] = {layout: measure_steps(args, layout) for layout in args.layouts}
    result["load"] = [load, os.getloadavg()[0]]
    print(report(result, args))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def report(result: dict[str, Any], args: argparse.Namespace) -> str:
    """The report of a run."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    before, after = result["load"]
    lines = [
        f"$ {result['command']}",
        versions,
        f"{result['cores']} cores ({result['chip']}), load {before:.1f} before and {after:.1f} after "
        "(this run's ranks count too)",
        f"{args.layers} layers, hidden {args.hidden}, gated MLP {args.ffn}, {args.seq} tokens x {args.batch}"
        f", 2 microbatches, fp32; {args.rounds} rounds, the median of {args.steps} iterations of each run",
    ]
    for layout, times in result["ms"].items():
        lines += ["", f"{layout}, a step of pretrain():", _markdown(rows(times))]
    start = result["start"]
    plain = start["python SCRIPT"]
    lines += ["", f"start-up, fresh interpreters, median of {START_RUNS}:"]
    for way, taken in start.items():
        told = [f"{statistics.median(taken[unit]):.2f} {unit}" for unit in taken]
        if way != "python SCRIPT":
            added = {u: spread([s - p for s, p in zip(taken[u], plain[u], strict=True)]) for u in taken}
            told += [f"added {_interval(added[unit], 2)} {unit}" for unit in added]
        lines.append(f"  {way:15} {', '.join(told)}")
    return "\n".join(lines)


def rows(times: dict[str, list[float]]) -> list[list[str]]:
    """A table: the median over rounds, and the ratio to (a) within a round with its 95% interval."""
    table = [["variant", "ms (quartiles)", "over (a)"]]
    for letter, ms in times.items():
        of = spread(ms)
        ratio = spread([t / a for t, a in zip(ms, times["a"], strict=True)])
        table.append(
            [
                f"({letter}) {VARIANTS[letter][0]}",
                f"{of['median']:.1f} ({of['q1']:.1f}–{of['q3']:.1f})",
                "1" if letter == "a" else _interval(ratio, 3),
            ]
        )
    return table
