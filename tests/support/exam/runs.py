"""A row of the exam, run: the bug and its clean pair, and what was said of both."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from tests.support import gpt, ranks, wrapped
from tests.support.exam import PATCHES, STEPS, Row
from tests.support.gpt import Case
from tests.support.planted import Bench, Pair, judge
from tests.support.pool import run

PARAMETER = re.compile(r"\b(?:decoder|embedding|output_layer|mtp)\.[\w.]*\w")


@dataclass(frozen=True)
class Outcome:
    """What was said of a row.

    Attributes:
        found: whether anything was.
        first: the first site.
        right: whether the site is the right one.
        named: whether the cause is; None where the row has none to name.
        words: what was said of the cause.
        silent: whether nothing was said of the clean pair.
        clean: what was said of it.
    """

    found: bool
    first: str
    right: bool
    named: bool | None
    words: str
    silent: bool
    clean: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ask(row: Row, bench: Bench) -> Outcome:
    """Run a row and its clean pair."""
    return (verified if row.tool == "verify" else compared)(row, bench)


def compared(row: Row, bench: Bench) -> Outcome:
    """By the dumps of both runs, each against one process."""
    wrong = bench.compared(Pair(row.case, row.precision, steps=row.steps, setting=row.setting), row.name, 1.0)
    setting = row.setting if row.clean_setting is None else row.clean_setting
    pair = Pair(row.clean or row.case, row.precision, steps=row.steps, setting=setting)
    right = bench.compared(pair, f"{row.name}, clean", 1.0)
    told = judge(row.expected, wrong)
    first = told.first or next((f"{o.name} (replicas)" for o in wrong.replicas), "")
    clean = "" if right.exit_status == 0 else str(right).partition("\n\n")[0]
    return Outcome(told.found, first, told.localised, told.hinted, told.hints, right.exit_status == 0, clean)


def stepped(case: Case, precision: str, bench: Bench) -> dict[str, Any]:
    """Steps of Adam without a bug, against one process: how many tensors, and what was said."""
    found = bench.compared(Pair(case, precision, steps=STEPS, few=True, routers=bool(case.experts)))
    silent = found.exit_status == 0
    return {"tensors": len(found.rows), "silent": silent, "clean": "" if silent else str(found)[:400]}


def verified(row: Row, bench: Bench) -> Outcome:
    """By `verify()` of the run alone."""
    wrong = run(row.case.world, steps_verified, row.case, row.name, dict(row.ddp))[0]
    case = row.clean or row.case
    right = run(case.world, steps_verified, case, f"{row.name}, clean", dict(row.ddp))[0]
    first = next(iter(PARAMETER.findall(wrong)), "")
    begins = (row.first,) if isinstance(row.first, str) else row.first
    named = bool(re.search(row.cause, wrong)) if row.cause else None
    return Outcome(bool(wrong), first, first.startswith(begins), named, wrong, not right, right)


def steps_verified(case: Case, patch: str, ddp: dict[str, Any]) -> str:
    """What `verify()` says of two steps of Megatron's optimizer."""
    chunks = ranks.start(case)
    state = gpt.randomize(chunks[0]) if case.world == 1 else {}
    models = wrapped.ddp(chunks, **ddp)
    with PATCHES[patch](models, state, 1.0):
        return wrapped.verify_steps(case, models, bool(ddp.get("use_distributed_optimizer")))
