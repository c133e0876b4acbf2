"""`scripts/bench --detection`: what `compare` detects of planted bugs, and what it says of correct runs.

Correct runs of many layouts are compared with one process over steps of Adam: with the seeds on which bounds
were set, and with seeds that were held out, on which nothing may be set. Of each bug of
`tests/support/bugs` the least magnitude that is detected is found by bisection, in each precision. Everything
is kept in one JSON file, which an interrupted run resumes from; `--write docs/contributing/comparison.md`
puts its tables into the page.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.support.bugs import BUGS, BY_NAME
from tests.support.gpt import Case
from tests.support.planted import PRECISIONS, Bench, Pair, judge

DENSE = Case("", layers=2, groups=4)
EXPERTS = replace(DENSE, experts=4, shared_experts=True)
LAYOUTS = [
    replace(DENSE, name="tp2", tp=2),
    replace(DENSE, name="tp2 sp", tp=2, sp=True),
    replace(DENSE, name="tp2 sp recomputed", tp=2, sp=True, recompute=("full",)),
    replace(DENSE, name="pp2", pp=2),
    replace(DENSE, name="cp2", cp=2),
    replace(DENSE, name="dp2", dp=2, microbatches=1),
    replace(EXPERTS, name="experts dp2 ep2", dp=2, ep=2, microbatches=1),
    replace(DENSE, name="tp2 sp pp2 vpp2", tp=2, sp=True, pp=2, vpp=2, layers=4),
]
SEEDS, STEPS = 5, 20
HELD_OUT = 200  # the first of the seeds that no bound was set on
RIGHT = ("right", "held-out")
PARTS = [*RIGHT, "bug", "size"]
FINENESS = {"fp32": 2.0, "bf16": 2.0, "fp16": 4.0, "fp8": 4.0}  # of the bisection, in powers of two
LEAST = {
    "fp32": -30.0,
    "bf16": -17.0,
    "fp16": -17.0,
    "fp8": -17.0,
}  # magnitudes that are tried, powers of two
MAX_SAID = 200  # characters of hints that are kept
ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "data" / "detection.json"
COMPARER = ROOT / "megatron_flex" / "compare"


@dataclass(frozen=True)
class Task:
    """A pair of correct runs, or the sweep of a bug, in one precision."""

    kind: str
    name: str
    precision: str
    seed: int = 0
    steps: int = 1

    @property
    def key(self) -> str:
        """Where its result stands in the file."""
        return f"{self.kind}/{self.precision}/{self.name}" + (f"/{self.seed}" if self.kind in RIGHT else "")

    @property
    def topology(self) -> str:
        """Of the pool that it needs, for an order that uses pools again."""
        found = BY_NAME[self.name].case if self.kind == "bug" else _layout(self.name)
        return f"{found.world} {found.topology}"


def _layout(name: str) -> Case:
    return next(case for case in LAYOUTS if case.name == name)


def flags(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench --detection", description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add("--json", type=Path, default=KEPT, help="results, to go on with (default: tests/data/detection.json)")
    add("--jobs", type=int, default=1, help="processes, each with pools of its own (default %(default)s)")
    add("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS), help="default: all")
    add("--bugs", default="", metavar="WORDS", help="only bugs with these words in their names")
    add("--seeds", type=int, default=SEEDS, help=f"of right pairs; {len(LAYOUTS)} layouts each (%(default)s)")
    add("--steps", type=int, default=STEPS, help="of Adam in right pairs (default %(default)s)")
    add("--only", choices=PARTS, nargs="+", default=PARTS, help="parts (default: all)")
    add("--mib", type=int, default=2048, help="of each of two dumps whose comparison is timed (%(default)s)")
    add("--minutes", type=float, default=600, help="begin nothing after so many (default %(default)s)")
    add("--renew", action="store_true", help="measure anew what another version of the comparer measured")
    add("--folder", help="where dumps are written, kept and used again (default: a temporary folder)")
    add("--write", type=Path, metavar="PAGE", help="put the tables into this page too")
    return parser.parse_args(words)


def digest_comparer(folder: Path = COMPARER) -> str:
    """The version of the comparer: a digest of its source without docstrings, comments and line breaks."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and ast.get_docstring(node, clean=False) is not None:
                node.body[0] = ast.Pass()
        found.update(path.name.encode() + ast.unparse(tree).encode())
    return found.hexdigest()[:8]


def tasks(args: argparse.Namespace) -> list[Task]:
    """The requested cases, in an order in which pools are used again."""
    out = []
    for precision in args.precisions:
        for kind, start in zip(RIGHT, (0, HELD_OUT), strict=True):
            out += [
                Task(kind, case.name, precision, seed, args.steps)
                for case in LAYOUTS
                for seed in range(start, start + args.seeds)
                if kind in args.only
            ]
        if "bug" in args.only:
            out += [Task("bug", b.name, precision) for b in BUGS if args.bugs in b.name]
    # A sweep that is cut off has all precisions and layouts of the first seeds.
    return sorted(out, key=lambda t: (t.seed, t.precision != "fp32", t.topology, t.precision, t.kind))


def perform(task: Task, folder: str, keep: bool) -> dict[str, Any]:
    """One task's result, with dumps in the folder; or in one of its own there, which is removed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix="detection-") as own:
        bench = Bench(Path(folder if keep else own))
        found = right(bench, task) if task.kind in RIGHT else sweep(bench, task)
    return {**found, "seconds": round(time.monotonic() - start, 1)}


def right(bench: Bench, task: Task) -> dict[str, Any]:
    """A correct run against one process."""
    pair = Pair(_layout(task.name), task.precision, task.seed, task.steps, few=True)
    found = bench.compared(pair)
    ratios = [r.error / r.tolerance for r in found.rows if r.tolerance]
    return {
        "verdict": found.verdict,
        "status": found.exit_status,
        "steps": task.steps,
        "tensors": len(found.rows),
        "closest": round(max(ratios, default=0.0), 3),
        "first": "" if found.first is None else f"{found.first.name} ({found.first.iteration})",
        "replicas": len(found.replicas),
        "missing": list(found.missing),
    }


_alarms: dict[str, int] = {}  # of correct runs, by pair: many bugs share one


def _alarm(bench: Bench, pair: Pair) -> int:
    """The exit status of the correct run of a pair."""
    if repr(pair) not in _alarms:
        _alarms[repr(pair)] = bench.compared(pair).exit_status
    return _alarms[repr(pair)]


def sweep(bench: Bench, task: Task) -> dict[str, Any]:
    """The least magnitude of a bug that is detected, to within a factor of four, or sixteen."""
    bug = BY_NAME[task.name]
    pair = Pair(bug.case, task.precision, steps=bug.steps)
    probes: list[list[Any]] = []
    said: list[str] = []

    def probe(magnitude: float) -> bool:
        found = judge(bug, bench.compared(pair, bug.name, magnitude))
        probes.append([magnitude, found.found, found.localised, found.hinted, found.first])
        said.append(found.hints[:MAX_SAID])
        return found.found

    alarm = _alarm(bench, pair)
    seen = probe(bug.magnitude)
    if bug.sweep is not None and seen:
        low, high = (math.log2(m) for m in bug.sweep)  # what is not detected, and what is
        low = max(low, LEAST[task.precision])
        while high - low > FINENESS[task.precision]:
            middle = (low + high) / 2
            if probe(2.0**middle):
                high = middle
            else:
                low = middle
    return {"alarm": alarm, "probes": probes, "hints": said[0]}


# -- two large dumps -------------------------------------------------------------------------------------

SIZE = """
import resource, sys, time
from megatron_flex.compare import compare
start = time.monotonic(), time.process_time()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = compare(sys.argv[1], sys.argv[2])
print(found.verdict, time.monotonic() - start[0], time.process_time() - start[1], before,
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def written(path: str, mib: int, noise: float) -> None:
    """A dump of so many MiB: a plain model's activations, off by `noise`."""
    import torch
    from torch import nn

    import megatron_flex as mf

    layers, width = 16, 1024
    tokens = (mib << 20) // (layers * width * 4)
    model = nn.Sequential(*(nn.LayerNorm(width) for _ in range(layers)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.randn(width, generator=generator))
            layer.weight.mul_(1 + noise * torch.randn(width, generator=generator))
    rows = torch.randn(1, tokens, width, generator=generator)
    with mf.attach(model, dumps=mf.Dump(path, "*")), torch.no_grad():
        model(rows)


def size(mib: int, folder: str) -> dict[str, Any]:
    """Seconds and memory of comparing two large dumps of the same model, in a process of its own."""
    from tests.support.pool import run

    with tempfile.TemporaryDirectory(dir=folder, prefix="detection-") as own:
        for name, noise in (("a", 0.0), ("b", 1e-7)):
            run(1, written, f"{own}/{name}", mib, noise, timeout=600, alone=True)
        held = sum(f.stat().st_size for f in Path(own, "a").rglob("*") if f.is_file())
        done = subprocess.run(
            [sys.executable, "-c", SIZE, f"{own}/a", f"{own}/b"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        verdict, wall, cpu, before, after = done.stdout.rsplit(maxsplit=4)
    return {
        "mib": round(held / 2**20),
        "verdict": verdict,
        "seconds": round(float(wall), 1),
        "cpu_seconds": round(float(cpu), 1),
        "mib_before": round(int(before) / 1024),
        "mib_most": round(int(after) / 1024),
    }


# -- all of it ---------------------------------------------------------------------------------------------


def results(args: argparse.Namespace, todo: list[Task], folder: str) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Perform tasks as time allows."""
    deadline, keep = time.monotonic() + 60 * args.minutes, bool(args.folder)
    if args.jobs == 1:
        for task in todo:
            if time.monotonic() < deadline:
                yield task, _guarded(task, folder, keep)
        return
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_guarded, task, folder, keep, deadline): task for task in todo}
        for done in as_completed(waiting):
            if done.result() is not None:
                yield waiting[done], done.result()


def _guarded(task: Task, folder: str, keep: bool, deadline: float = math.inf) -> dict[str, Any]:
    """A result, or the error; None after the deadline."""
    if time.monotonic() > deadline:
        return None  # type: ignore[return-value]
    try:
        return perform(task, folder, keep)
    except Exception as error:  # of one pair; the others are measured all the same
        return {"error": f"{type(error).__name__}: {str(error)[-600:]}"}


def main(words: list[str]) -> None:
    """Measure what the file lacks."""
    import detection_page
    from bench import machine
    from bench_results import put

    args = flags(words)
    kept: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    kept.setdefault("results", {})
    kept["machine"] = machine()
    kept["bugs"] = {b.name: {"group": b.group, "sweep": b.sweep, "measure": b.measure} for b in BUGS}
    kept["comparer"] = digest_comparer()
    old: dict[str, Any] = kept["results"]
    todo = [
        t
        for t in tasks(args)
        if t.key not in old
        or "error" in old[t.key]
        or (args.renew and old[t.key].get("comparer") != kept["comparer"])
    ]
    with tempfile.TemporaryDirectory(prefix="detection-") as temporary:
        folder = args.folder or temporary
        if "size" in args.only and kept.get("size", {}).get("asked") != args.mib:
            kept["size"] = {"asked": args.mib, **size(args.mib, folder)}
            _keep(args.json, kept)
        for number, (task, found) in enumerate(results(args, todo, folder), 1):
            kept["results"][task.key] = {**found, "comparer": kept["comparer"]}
            _keep(args.json, kept)
            print(f"{number}/{len(todo)} {task.key}: {_say(found)}", flush=True)
    _keep(args.json, kept)
    if args.write:
        page = args.write.read_text(encoding="utf-8")
        for section, text in detection_page.sections(kept).items():
            page = put(page, section, text)
        args.write.write_text(page, encoding="utf-8")


def _keep(path: Path, kept: dict[str, Any]) -> None:
    kept["results"] = dict(sorted(kept["results"].items()))
    lines = [f"  {json.dumps(key)}: {json.dumps(found)}" for key, found in kept["results"].items()]
    rest = json.dumps({k: v for k, v in kept.items() if k != "results"}, indent=1).removesuffix("\n}")
    draft = path.with_suffix(".draft")  # a line for each result
    joined = ",\n".join(lines)
    draft.write_text(f'{rest},\n "results": {{\n{joined}\n }}\n}}\n', encoding="utf-8")
    draft.rename(path)


def _say(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])[-300:]
    if "probes" in found:
        seen = [magnitude for magnitude, detected, *_ in found["probes"] if detected]
        return f"{min(seen):.2g}" if seen else "not detected"
    return f"{found['verdict']} {found['first']} {found['closest']} {found['seconds']} s"
