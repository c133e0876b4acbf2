"""scripts/bench hook-cost: CPU instructions and Python calls of one hook, beside the hook written by hand.

Counted in one process, instructions by valgrind's callgrind: unlike times, counts do not depend on what else
the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench_results import check_page, command_line, publish

HERE = Path(__file__).resolve().parent
KEPT = HERE.parents[1] / "tests" / "data" / "hook_cost.json"
SECTION = "hook-cost"
BY_HAND, NONE, IDLE = " by hand", "none", "idle"
PARTS = ("begin", "pass", "end")
COUNTER = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void begin(void) { CALLGRIND_ZERO_STATS; }
void end(const char *what) { CALLGRIND_DUMP_STATS_AT(what); }
"""
NEEDED = (
    "hook-cost counts with valgrind and a C compiler: install them, for example 'apt install valgrind gcc', "
    "or say --calls-only"
)
Figures = dict[str, dict[str, dict[str, int]]]  # by way, part and kind


def flags(words: list[str]) -> argparse.Namespace:
    """The command line behind hook-cost."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench hook-cost",
        description="Count the instructions and Python calls of one hook on a tensor of 4 KiB, for each pass "
        "and each step, beside those of the hook that a person writes by hand (about five minutes).",
    )
    parser.add_argument("--calls-only", action="store_true", help="without valgrind, in some seconds")
    parser.add_argument("--json", metavar="FILE", help=f"write the figures there, such as {KEPT.name}")
    parser.add_argument("--from", dest="source", metavar="FILE", help="take the figures of such a file")
    parser.add_argument("--before", metavar="FILE", help="show the figures of such a file beside them")
    parser.add_argument("--write", metavar="PAGE", help="put the table between the page's comments")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds (default %(default)s)")
    return parser.parse_args(words)


def count(timeout: float, instructions: bool) -> Figures:
    """The calls of each way, and its instructions.

    Raises:
        SystemExit: a tool is missing, or a run failed.
    """
    command = [sys.executable, str(HERE / "hook_cost_step.py")]
    found: Figures = json.loads(_run(command, timeout))
    if instructions:
        for way, parts in _count_instructions(command, timeout).items():
            for part, number in parts.items():
                found[way][part]["instructions"] = number
    return found


def _run(command: list[str], timeout: float) -> str:
    places = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": places, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-3000:]}\nerror: the counted process failed")
    return done.stdout


def _count_instructions(command: list[str], timeout: float) -> dict[str, dict[str, int]]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or shutil.which("valgrind") is None:
        raise SystemExit(f"error: {NEEDED}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "counter.c").write_text(COUNTER, encoding="ascii")
        library = str(folder / "counter.so")
        build = [compiler, "-O1", "-shared", "-fPIC", "-o", library, str(folder / "counter.c")]
        made = subprocess.run(build, capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(f"{made.stderr}error: {NEEDED}; its headers too (valgrind/callgrind.h)")
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
        _run([*tool, f"--callgrind-out-file={folder}/out", *command, library], timeout)
        return instructions_in([path.read_text(encoding="utf-8") for path in folder.glob("out.*")])


def instructions_in(dumps: list[str]) -> dict[str, dict[str, int]]:
    """From the files of a run to the instructions of the main thread by way and part: the median of steps."""
    found: dict[tuple[str, str], list[int]] = {}
    for text in dumps:
        of = re.search(r"^desc: Trigger: Client Request: (.+)\|(\w+)$", text, re.MULTILINE)
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        thread = re.search(r"^thread: (\d+)$", text, re.MULTILINE)
        if of and total and (thread is None or thread[1] == "1"):
            found.setdefault((of[1], of[2]), []).append(int(total[1]))
    out: dict[str, dict[str, int]] = {}
    for (way, part), numbers in found.items():
        out.setdefault(way, {})[part] = int(median(numbers))
    return out


# -- what a hook adds ----------------------------------------------------------------------------------------


def added(figures: Figures, way: str, kind: str, layers: int = 1) -> dict[str, int]:
    """What a way adds to a pass and to a step.

    A hook of ours adds to an attached model without hooks, one by hand to the model alone.
    """
    alone = way == IDLE or way.endswith(BY_HAND)
    found, base = figures.get(way), figures[f"{NONE if alone else IDLE} of {layers}"]
    found = figures[f"{IDLE} of {layers}"] if found is None else found
    more = {part: found[part][kind] - base[part][kind] for part in PARTS}
    return {"pass": more["pass"], "step": more["begin"] + more["end"]}


def table(figures: Figures, before: Figures | None = None) -> str:
    """What each way adds, beside what it added before, and over what the hook by hand adds."""
    from bench_report import _markdown
    from hook_cost_ways import WAYS

    counted = "instructions" in figures[f"{NONE} of 1"]["pass"]
    head = ["hook", "our calls: pass", "step"]
    head += ["instructions: pass", "by hand", "ratio", "step", "by hand"] if counted else []
    rows = [head]
    for way, pair in WAYS.items():
        compare = partial(_beside, figures, before, pair.layers)
        cells = [way, compare(way, "calls", "pass"), compare(way, "calls", "step")]
        if counted:
            hand = way + BY_HAND
            more = added(figures, way, "instructions", pair.layers)["pass"]
            if hand in figures:
                cost = added(figures, hand, "instructions", pair.layers)
                by_hand = [f"{cost['pass'] / 1e3:.0f}k", f"{more / cost['pass']:.2f}"]
                step = f"{max(0, cost['step']) / 1e3:.0f}k"
            else:
                by_hand, step = ["", ""], ""
            cells += [compare(way, "instructions", "pass"), *by_hand]
            cells += [compare(way, "instructions", "step"), step]
        rows.append(cells)
    return _markdown(rows)


def _beside(figures: Figures, before: Figures | None, layers: int, way: str, kind: str, part: str) -> str:
    unit, digits = (1e3, "k") if kind == "instructions" else (1, "")
    shown = f"{added(figures, way, kind, layers)[part] / unit:.0f}{digits}"
    if before is None:
        return shown
    return f"{shown} (was {added(before, way, kind, layers)[part] / unit:.0f}{digits})"


def main(words: list[str]) -> None:
    """Count, print, and write the requested files."""
    args = flags(words)
    check_page(args, SECTION)
    if args.source:
        result: dict[str, Any] = json.loads(Path(args.source).read_text(encoding="utf-8"))
    else:
        from bench import machine

        command = command_line()
        result = {"command": command, **machine(), "figures": count(args.timeout, not args.calls_only)}
    before = json.loads(Path(args.before).read_text(encoding="utf-8"))["figures"] if args.before else None
    text = table(result["figures"], before)
    publish(args, SECTION, result, text)


if __name__ == "__main__":
    main(sys.argv[1:])
