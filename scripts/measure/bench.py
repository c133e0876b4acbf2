"""What scripts/bench runs: times steps of a Megatron model on gloo under some variants, and imports."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTS = """
from time import perf_counter as now
start = now()
import torch
middle = now()
import {}
print(middle - start, now() - start)
"""
IMPORT_RUNS = 5
MODES = {  # with flags of their own
    **{
        f"--{name}": f"bench_{name}"
        for name in ("attach", "hooks", "idle", "conversion", "detection", "scale")
    },
    "hook-cost": "bench_hook_cost",
    "align": "bench_align",
}


def flags(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure forward and backward of a Megatron GPT on this machine's CPU, tensor parallel "
        "over gloo, one thread for each rank: with nothing attached, idle, and read in four ways; or edited.",
        epilog="`scripts/bench --hooks` measures what a hook adds in all ways over sizes and draws it, "
        "`scripts/bench --idle` counts instructions of a step, `scripts/bench hook-cost` those of one hook, "
        "`scripts/bench --conversion` loads weights, `scripts/bench align` compares with Hugging Face, "
        "`scripts/bench --detection` plants bugs for `compare`, "
        "`scripts/bench --scale` is a rank of a large job, "
        "`scripts/bench --attach` attaches to large models; these have flags of their own: see their --help.",
    )
    add = parser.add_argument
    add("--tp", type=int, default=2, help="ranks (default %(default)s)")
    add("--steps", type=int, default=40, help="timed steps of each variant (default %(default)s)")
    add("--warmup", type=int, default=2, help="rounds before those (default %(default)s)")
    add("--layers", type=int, default=4, help="default %(default)s")
    add("--hidden", type=int, default=512, help="a multiple of 64 times --tp (default %(default)s)")
    add("--ffn", type=int, help="the gated MLP's width (default 4 times --hidden)")
    add("--seq", type=int, default=256, help="tokens of a sequence (default %(default)s)")
    add("--batch", type=int, default=2, help="sequences of a step (default %(default)s)")
    add("--edit", action="store_true", help="edit fc1's output in five ways instead of reading")
    add("--dump", action="store_true", help="write both to disk, in several ways, instead of reading")
    add("--statistics", action="store_true", help="measure the residual stream and the MLPs instead")
    add("--launch", action="store_true", help="whole runs of pretrain(), plain and by the runner")
    add("--rounds", type=int, default=5, help="of --launch (default %(default)s)")
    add("--variants", default="ansegd", help="of --launch, by letter (default %(default)s)")
    add("--layouts", nargs="+", metavar="LAYOUT", help="of --launch (default: all; others are an error)")
    add("--folder", help="where --dump and --launch write (default: a temporary folder)")
    add("--patience", type=float, default=300, help="seconds for repeats of disturbed steps (%(default)s)")
    add("--timeout", type=float, default=1800, help="seconds for all steps (default %(default)s)")
    add("--json", metavar="FILE", help="write everything there too, each step's times included")
    args = parser.parse_args(words)
    args.ffn = args.ffn or 4 * args.hidden
    for name in ("tp", "steps", "layers", "hidden", "ffn", "seq", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    if args.launch:
        from bench_launch import LAYOUTS, VARIANTS

        args.layouts = args.layouts or list(LAYOUTS)
        unknown = [*set(args.layouts) - LAYOUTS.keys(), *set(args.variants) - VARIANTS.keys()]
        if unknown or not args.variants.startswith("a"):
            parser.error(
                f"{unknown or args.variants}: layouts are {', '.join(map(repr, LAYOUTS))}; variants are "
                f"{', '.join(VARIANTS)}, a first"
            )
    if args.hidden % (64 * args.tp) or args.ffn % args.tp:
        parser.error(
            f"--hidden must be a multiple of {64 * args.tp} (heads of 64, cut over --tp), --ffn of {args.tp}"
        )
    return args


def import_seconds() -> dict[str, float]:
    """Median seconds of imports in fresh interpreters: torch alone, and torch and then megatron_flex."""
    alone, both, ours = [], [], []
    for number in range(IMPORT_RUNS + 1):
        torch_only = _import("torch")
        first, total = _import("megatron_flex")
        if number:  # the first one fills the page cache
            alone.append(torch_only[1])
            both.append(total)
            ours.append(total - first)
    median = statistics.median
    return {"torch": median(alone), "torch_and_megatron_flex": median(both), "megatron_flex": median(ours)}


def _import(name: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(name)], capture_output=True, text=True, check=True, timeout=120
    )
    first, total = map(float, done.stdout.split())
    return first, total


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for name in ("torch", "megatron-core", "flex-model"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        chip = next(line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        chip = platform.processor() or platform.machine()
    return {"versions": versions, "cores": os.cpu_count(), "chip": chip}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    from bench_rank import Settings, measure

    from tests.support.pool import run_alone as run_ranks

    settings = {name: getattr(args, name) for name in Settings.__dataclass_fields__}
    load = [os.getloadavg()[0]]
    ranks = run_ranks(args.tp, measure, Settings(**settings), timeout=args.timeout)
    load.append(os.getloadavg()[0])

    def over_ranks(kind: str, join: Callable[[tuple[float, ...]], float]) -> dict[str, list[float]]:
        return {x: list(map(join, zip(*(r[kind][x] for r in ranks), strict=True))) for x in ranks[0][kind]}

    return {
        "command": shlex.join(["scripts/bench", *sys.argv[1:]]),
        **machine(),
        "load": load,
        "settings": settings,
        "mib": ranks[0]["mib"],
        "notes": ranks[0]["notes"],
        # a step takes as long as on its slowest rank, and costs what it costs on all of them
        "ms": over_ranks("wall", max),
        "cpu_ms": over_ranks("cpu", sum),
        "others": over_ranks("others", max),
        "import_seconds": import_seconds(),
    }


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    for mode, module in MODES.items():
        if mode in sys.argv[1:]:
            importlib.import_module(module).main([word for word in sys.argv[1:] if word != mode])
            return
    args = flags()
    if args.launch:
        import bench_launch

        bench_launch.main(args)
        return
    if args.dump:
        import bench_dumps

        bench_dumps.main(args)
        return
    if args.statistics:
        import bench_statistics

        bench_statistics.main(args)
        return
    if args.json:
        Path(args.json).touch()  # a place that cannot be written to is told now, not after minutes
    from bench_report import report, summary

    result = run(args)
    result["summary"] = summary(result["ms"], result["cpu_ms"])
    print(report(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
