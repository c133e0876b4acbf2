"""scripts/bench --hooks: what a hook adds, by size of the tensor, in every way and beside code by hand.

All ways take turns in one run. The figures, a plot and a page are made of the same result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

STEP_MODEL = {"layers": 4, "hidden": 512, "ffn": 2048, "seq": 256, "batch": 2}
SECTION = "hooks"
ALWAYS = ("none", "gather", "all-gather")  # by which the others are checked
WAYS = (
    *ALWAYS,
    *("idle", "detached", "clone", "read", "clone of one", "selected", "local by hand", "local in place"),
    *("local", "linear", "general", "statistics", "dump", "trainable", "flex-model read", "flex-model edit"),
)


def flags(words: list[str]) -> argparse.Namespace:
    """The command line behind --hooks."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench --hooks",
        description="Measure what a hook at fc1's output adds to forward and backward of a Megatron GPT, "
        "tensor parallel, one thread for each rank: ways of megatron_flex, of its predecessor, and by hand.",
    )
    add = parser.add_argument
    add("--tp", type=int, nargs="+", default=[2, 4], help="ranks, one run each (default 2 4)")
    add("--mib", type=float, nargs="+", default=[1, 8, 64, 256], help="sizes of the full tensor (1 8 64 256)")
    add("--rounds", type=int, default=9, help="in which each way is visited once (default %(default)s)")
    add("--warmup", type=int, default=1, help="rounds before those (default %(default)s)")
    add("--repeats", type=int, default=5, help="timed steps of a visit, fewer of large sizes (%(default)s)")
    add("--hidden", type=int, default=64, help="of the model that is hooked (default %(default)s)")
    add("--ffn", type=int, default=4096, help="fc1's features (default %(default)s)")
    add("--seq", type=int, default=64, help="tokens of a sequence; samples follow (default %(default)s)")
    add("--only", nargs="+", metavar="WAY", default=[], help=f"by name; {', '.join(ALWAYS)} are always there")
    add("--folder", help="where dumps and statistics are written (default: a temporary folder)")
    add("--timeout", type=float, default=3600, help="seconds for one size (default %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the same ways on a GPU, one process")
    add("--json", metavar="FILE", help="write everything there too, whenever a size is done")
    add("--plot", metavar="FILE", help="draw it into a PNG")
    add("--write", metavar="PAGE", help="put the tables between the page's comments, the plot beside it")
    add("--from", dest="source", nargs="+", metavar="FILE", help="measure nothing: take files of --json")
    args = parser.parse_args(words)
    for name in ("rounds", "repeats", "hidden", "ffn", "seq"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    if unknown := [name for name in args.only if name not in WAYS]:
        parser.error(f"--only {unknown[0]}: name some of {', '.join(map(repr, WAYS))}")
    for tp in args.tp:
        if tp < 1 or args.hidden % (16 * tp) or args.ffn % tp:
            parser.error(
                f"--tp {tp}: --hidden must be a multiple of {16 * tp} (heads of 16, cut over ranks), "
                f"--ffn of {tp}"
            )
    for mib in args.mib:
        if mib <= 0 or (mib * 2**18) % (args.ffn * args.seq):
            parser.error(
                f"--mib {mib:g}: must be a multiple of {args.ffn * args.seq / 2**18:g}, the fp32 values of a "
                "sequence of --seq tokens with --ffn features"
            )
    return args


def settings_of(args: argparse.Namespace, tp: int, mib: float) -> dict[str, Any]:
    """The model of a size: fewer layers and steps of large tensors, so that memory and time stay bounded."""
    return {
        "tp": tp,
        "mib": mib,
        "layers": 8 if mib <= 8 else 4 if mib <= 64 else 2,
        "hidden": args.hidden,
        "ffn": args.ffn,
        "seq": args.seq,
        "batch": round(mib * 2**18 / args.ffn / args.seq),
        "rounds": args.rounds,
        "warmup": args.warmup,
        "repeats": max(1, min(args.repeats, math.ceil(128 / mib))),
        "folder": args.folder,
        "only": tuple(dict.fromkeys([*ALWAYS, *args.only])) if args.only else (),
    }


def run(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure everything; `keep` gets all that is measured so far whenever a size is done."""
    from bench import machine
    from bench_hooks_rank import Settings, measure, measure_steps
    from bench_hooks_report import sent_by

    from tests.support.pool import run_alone as run_ranks

    hooks: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    before = os.getloadavg()[0]
    result = {
        "command": shlex.join(["scripts/bench", *_told_of(sys.argv[1:])]),
        "date": date.today().isoformat(),
        **machine(),
        "load": [before, before],
        "hooks": hooks,
        "steps": steps,
    }

    def done() -> None:
        result["load"] = [before, os.getloadavg()[0]]
        keep(result)

    for tp in args.tp:
        for mib in args.mib:
            settings = settings_of(args, tp, mib)
            ranks = run_ranks(tp, measure, Settings(**settings), timeout=args.timeout)
            sent = sent_by([rank["sent"] for rank in ranks])
            hooks.append(settings | _times(ranks) | {"sent": sent})
            done()
        if args.only or STEP_MODEL["hidden"] % (64 * tp):
            continue
        settings = settings_of(args, tp, 8) | STEP_MODEL
        ranks = run_ranks(tp, measure_steps, Settings(**settings), timeout=args.timeout)
        steps.append({"tp": tp, "what": _told(STEP_MODEL)} | _times(ranks))
        done()
    return result


def _told_of(words: list[str]) -> list[str]:
    """A command line without where its figures are kept, which is nobody else's place."""
    places = ("--json", "--plot", "--folder")
    at = [n for n, word in enumerate(words) if word in places]
    at += [n + 1 for n in at] + [n for n, word in enumerate(words) if word.partition("=")[0] in places]
    return [word for n, word in enumerate(words) if n not in at]


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one machine as one, their commands one behind the other; `load` is that of their ends.

    Raises:
        SystemExit: they ran on different machines or versions, and cannot stand in one table.
    """
    first, *others = results
    for other in others:
        for what in ("cores", "chip", "versions"):
            if other[what] != first[what]:
                raise SystemExit(f"error: --from: {what} {other[what]} beside {first[what]}: tell them apart")
    return first | {
        "command": "` and `".join(result["command"] for result in results),
        "date": max(result["date"] for result in results),
        "load": [first["load"][0], results[-1]["load"][1]],
        "hooks": [run for result in results for run in result["hooks"]],
        "steps": [run for result in results for run in result["steps"]],
    }


def _times(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all ranks: what the clock says, as long as on the slowest, and CPU time, together."""
    from bench_hooks_report import steps_of

    ms = steps_of([rank["ms"] for rank in ranks], max)
    cpu = steps_of([rank["cpu"] for rank in ranks], sum)
    return {"ms": ms, "cpu": cpu, "others": ranks[0]["others"]}


def _told(model: dict[str, int]) -> str:
    return (
        f"a GPT of {model['layers']} layers, hidden {model['hidden']}, gated MLP of {model['ffn']}, "
        f"{model['seq']} tokens x {model['batch']}, fp32"
    )


def main(words: list[str]) -> None:
    """Measure, or load an earlier result; print, and write the requested files."""
    args = flags(words)
    from bench_hooks_report import head, report, section
    from bench_results import check_page, put

    if args.device == "cuda":
        import bench_cuda

        bench_cuda.main(args)
        return
    for path in (args.json, args.plot):
        if path and not args.source:
            Path(path).touch()  # a place that cannot be written to is told now, not after minutes
    check_page(args, SECTION)

    def keep(result: dict[str, Any]) -> None:
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    kept = [json.loads(Path(path).read_text(encoding="utf-8")) for path in args.source or ()]
    result = joined(kept) if kept else run(args, keep)
    keep(result)
    print(report(result))
    plots = [Path(args.plot)] if args.plot else []
    if args.write:
        page = Path(args.write)
        plots.append(page.with_name(f"{SECTION}.png"))
        said = f"{head(result)}\n\n![Added time of a hook over size]({SECTION}.png)\n\n{section(result)}"
        page.write_text(put(page.read_text(encoding="utf-8"), SECTION, said), encoding="utf-8")
    for path in plots:
        from bench_plot import draw

        draw(result, path)
