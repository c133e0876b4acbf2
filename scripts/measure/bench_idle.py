"""scripts/bench --idle: instructions of a step with nothing attached, attached and idle, and detached.

Counted by valgrind's callgrind in one process: unlike times, counts do not depend on what else goes on.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from bench_results import add_result_flags, check_page, command_line, publish

HERE = Path(__file__).resolve().parent
SECTION = "idle"
WAYS = ("none", "idle", "detached")
COUNTER = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *what) { CALLGRIND_DUMP_STATS_AT(what); CALLGRIND_STOP_INSTRUMENTATION; }
"""
NEEDED = "--idle counts with valgrind and a C compiler: install them, for example 'apt install valgrind gcc'"


def flags(words: list[str]) -> argparse.Namespace:
    """The command line behind --idle."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench --idle",
        description="Count the instructions of a step of a Megatron GPT by valgrind (about four minutes).",
    )
    parser.add_argument("--steps", type=int, default=7, help="counted of each way (default %(default)s)")
    add_result_flags(parser, "each step's count")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds (default %(default)s)")
    args = parser.parse_args(words)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    return args


def count(steps: int, timeout: float) -> dict[str, list[int]]:
    """Instructions of each step, by way.

    Raises:
        SystemExit: a tool is missing, or the run failed.
    """
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
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        command = [*tool, sys.executable, str(HERE / "bench_idle_step.py"), library, str(steps)]
        places = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": places, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise SystemExit(f"{done.stderr[-3000:]}\nerror: the step under valgrind failed")
        texts = [path.read_text(encoding="utf-8") for path in folder.glob("out.*")]
    return counts(texts)


def counts(dumps: list[str]) -> dict[str, list[int]]:
    """From the files of a run to instructions by way, in the order of the steps."""
    found: dict[str, list[tuple[int, int]]] = {way: [] for way in WAYS}
    for text in dumps:
        part = re.search(r"^part: (\d+)$", text, re.MULTILINE)
        way = re.search(r"^desc: Trigger: Client Request: (\w+)$", text, re.MULTILINE)
        total = re.search(r"^summary: (\d+)", text, re.MULTILINE)
        if part and way and total:
            found[way[1]].append((int(part[1]), int(total[1])))
    return {way: [n for _, n in sorted(numbers)] for way, numbers in found.items()}


def table(instructions: dict[str, list[int]]) -> str:
    """The median of each way, how far its steps lie apart, and over nothing attached."""
    from bench_hooks_report import LABELS
    from bench_report import _markdown

    base = statistics.median(instructions["none"])
    rows = [["way", "instructions of a step, millions", "least to most", "over nothing attached"]]
    for way, numbers in instructions.items():
        middle, least, most = (x / 1e6 for x in (statistics.median(numbers), min(numbers), max(numbers)))
        over = "1" if way == "none" else f"{middle * 1e6 / base:.4f}"
        rows.append([LABELS[way], f"{middle:.2f}", f"{least:.2f} to {most:.2f}", over])
    return _markdown(rows)


def main(words: list[str]) -> None:
    """Count, print, and write the requested files."""
    args = flags(words)
    check_page(args, SECTION)
    instructions = count(args.steps, args.timeout)
    command = command_line()
    text = (
        f"`{command}`, {date.today().isoformat()}, {args.steps} steps of each way.\n\n{table(instructions)}"
    )
    publish(args, SECTION, {"command": command, "instructions": instructions}, text)


if __name__ == "__main__":
    main(sys.argv[1:])
