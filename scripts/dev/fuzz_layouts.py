"""Prove random cases for as long as one likes; the exit status is 1 when something failed."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are many, cores are few

from tests.support import edit_table, random_cases
from tests.support.random_cases import Draw
from tests.support.random_proof import Verdict, prove
from tests.support.shrinker import shrink

SHRINKING = 60  # cases at most to make one smaller


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(prog="scripts/dev/fuzz_layouts", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after so many (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="which cases are drawn (default 0)")
    parser.add_argument("--start", type=int, default=0, help="the number of the first case of the seed")
    parser.add_argument("--count", type=int, help="stop after so many cases")
    parser.add_argument(
        "--world", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes (1 2 4)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default 1)")
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first failure")
    parser.add_argument(
        "--shrink", type=int, default=SHRINKING, help="runs to make a failure smaller; 0: none"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="cases that have all of these, such as dp failing: see the totals",
    )
    parser.add_argument("--case", help="run this case, a JSON that was printed, and no other")
    parser.add_argument("--json", type=Path, help="write a record of each case to this file")
    return parser.parse_args(arguments)


def numbered(seed: int, number: int, worlds: list[int]) -> Draw:
    """Case `number` of a seed."""
    return random_cases.one(random.Random(f"{seed}/{number}"), worlds)


def verdicts(flags: argparse.Namespace) -> Iterator[tuple[str, Verdict]]:
    """What became of each case, with its number, until the time is over."""
    if flags.case:
        yield "case", prove(Draw.read(flags.case))
        return
    end = time.monotonic() + 60 * flags.minutes
    draws = ((n, numbered(flags.seed, n, flags.world)) for n in itertools.count(flags.start))
    wanted = ((n, draw) for n, draw in draws if set(flags.only) <= set(features(draw)))
    cases = itertools.islice(wanted, flags.count)
    if flags.jobs == 1:
        for number, draw in cases:
            yield str(number), prove(draw)
            if time.monotonic() > end:
                return
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(flags.jobs, mp_context=context) as executor:
        waiting: dict[Future[Verdict], int] = {}
        while True:
            while (
                len(waiting) < flags.jobs
                and time.monotonic() < end
                and (case := next(cases, None)) is not None
            ):
                waiting[executor.submit(prove, case[1])] = case[0]
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield str(waiting.pop(future)), future.result()


def features(draw: Draw) -> Iterator[str]:
    """What a case has of each axis."""
    yield f"model {draw.kind}"
    yield f"ranks {draw.world}"
    for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp"):
        if getattr(draw, name) > 1:
            yield name
    named = (
        "sp",
        "first",
        "forward_only",
        "dropout",
        "bf16",
        "gathered",
        "verify",
        "dump",
        "statistics",
        "padding",
    )
    yield from (name for name in named if getattr(draw, name))
    yield from (f"recompute {name}" for name in draw.recompute)
    for row in draw.failures:
        yield from ("failing", f"failing {row.kind}", f"failing in {row.mode}")
    for what in {draw.frozen, *(row.frozen for row in draw.failures)} - {""}:
        yield from ("frozen", f"frozen {what}")
    for hook in draw.hooks:
        yield f"hook {hook.kind}"
        if hook.edit:
            yield f"edit {hook.edit}"
            yield "edit of a gradient" if hook.backward else "edit of a value"
            yield f"run {hook.run}"
        if hook.wish:
            yield f"kept {hook.wish}"


def again(draw: Draw) -> str:
    """The command that runs a case."""
    return f"scripts/dev/fuzz_layouts --case {shlex.quote(draw.text())}"


def failed(verdict: Verdict, flags: argparse.Namespace) -> dict[str, Any]:
    """Tell a failure, and the smallest case that still fails in the same way."""
    print(f"  {verdict.told()}".replace("\n", "\n  "), flush=True)
    print(f"  again: {again(verdict.draw)}", flush=True)
    if not flags.shrink:
        return {}
    raised = bool(verdict.error)

    def fails(draw: Draw) -> bool:
        got = prove(draw)
        return bool(got.error) if raised else bool(got.bad)

    found = shrink(verdict.draw, fails, flags.shrink)
    last = prove(found.draw)
    print(f"  the smallest that fails, after {found.runs} runs:\n  {last.told()}".replace("\n", "\n  "))
    print(f"  again: {again(found.draw)}", flush=True)
    return {"smallest": found.draw.text(), "runs": found.runs}


def record(number: str, verdict: Verdict) -> dict[str, Any]:
    """What a file of records has of a case."""
    bad = [{"site": c.site, "check": c.check, "error": c.error, "bound": c.bound} for c in verdict.bad]
    return {
        "number": number,
        "case": verdict.draw.text(),
        "good": verdict.good,
        "compared": len(verdict.cells),
        "unjudged": verdict.unjudged,
        "greatest_error": max((c.error for c in verdict.cells), default=0.0),
        "seconds": round(verdict.seconds, 2),
        "bad": bad,
        "error": verdict.error,
    }


def totals(records: Iterable[dict[str, Any]], seconds: float) -> Iterator[str]:
    """The lines at the end."""
    done = list(records)
    compared, bad = sum(r["compared"] for r in done), [r for r in done if not r["good"]]
    yield f"{len(done)} cases, {compared} comparisons in {seconds / 60:.1f} minutes; {len(bad)} cases failed"
    if unjudged := sum(len(r["unjudged"]) for r in done):
        yield f"{unjudged} tensors are so sensitive to the last bits of the weights that they prove nothing"
    draws: Counter[str] = Counter()
    cells: Counter[str] = Counter()
    for r in done:
        for name in set(features(Draw.read(r["case"]))):
            draws[name] += 1
            cells[name] += r["compared"]
    yield from (f"  {name}: {draws[name]} cases, {cells[name]} comparisons" for name in sorted(draws))
    absent = [n for n in edit_table.TABLE if f"edit {n}" not in draws]
    if absent and len(done) >= 100:
        yield f"  never drawn: {', '.join(absent)}"


def main(arguments: list[str]) -> int:
    """Run the command."""
    flags, started, records = parsed(arguments), time.monotonic(), []
    for number, verdict in verdicts(flags):
        result = "agrees" if verdict.good else "FAILS"
        draw = verdict.draw
        hooks = len(draw.hooks) + len(draw.failures)
        told = f"{hooks} hooks, {len(verdict.cells)} comparisons: {result}"
        print(f"{number}: {draw.layout}, {told}, {verdict.seconds:.1f} s", flush=True)
        kept = record(number, verdict)
        if not verdict.good:
            kept |= failed(verdict, flags)
        records.append(kept)
        if flags.json:
            flags.json.write_text(
                json.dumps({"seed": flags.seed, "world": flags.world, "cases": records}, indent=1)
            )
        if flags.stop_at_first and not verdict.good:
            break
    print("\n".join(totals(records, time.monotonic() - started)))
    return 0 if records and all(r["good"] for r in records) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
