"""Turns what scripts/bench --hooks measured into tables: added time of a hook, what it sends, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from bench_report import _interval, _markdown, _verdict, spread

LABELS = {
    "none": "nothing attached",
    "idle": "FlexModel attached, no hook",
    "detached": "detached again",
    "clone": "by hand: clone of the shard",
    "read": "read",
    "gather": "by hand: gather to one rank",
    "flex-model read": "flex-model 0.1.0 reads",
    "clone of one": "by hand: clone of one position of the shard",
    "selected": "read of one position",
    "local by hand": "by hand: edit of the shard",
    "local in place": "by hand: edit of the shard, in place",
    "local": "local edit, `scale`",
    "linear": "edit with a reduction, `project_out`",
    "all-gather": "by hand: all-gather, edit, own part",
    "general": "gathered edit, a function",
    "flex-model edit": "flex-model 0.1.0 edits, forward only",
    "statistics": "statistics",
    "dump": "dump",
    "trainable": "trainable module, rank 8",
}
TARGETS = [  # way, its yardstick, how many times as much it may add
    ("read", "clone", 1.5),
    ("read", "flex-model read", 0.15),
    ("selected", "clone of one", 1.1),
    ("local", "local by hand", 1.5),
    ("general", "all-gather", 1.1),
]
STEP_TARGETS = [("statistics", 1.05), ("idle", 1.0), ("detached", 1.0)]  # over nothing attached
NOT_MEASURED = "not measured"
SILENT = ("local",)  # ways that send nothing


def steps_of(
    ranks: list[dict[str, list[list[float]]]], together: Callable[[Iterable[float]], float]
) -> dict[str, list[float]]:
    """From each rank's times by way, round and step to those by way and round.

    Args:
        together: of one step on all ranks: max by the clock, as all wait for the slowest; sum of CPU time.

    A round has the median of its steps.
    """
    return {
        name: [
            statistics.median(together(times) for times in zip(*visits, strict=True))
            for visits in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def sent_by(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What all ranks together send in a step beyond what the model does; calls are those of rank 0."""
    out = {}
    for name in ranks[0]:
        here, none = [r[name] for r in ranks], [r["none"] for r in ranks]
        calls = {op: n - none[0]["calls"].get(op, 0) for op, n in here[0]["calls"].items()}
        wires = (here[0]["wire"], none[0]["wire"])
        out[name] = {
            "calls": {op: n for op, n in calls.items() if n},
            "nbytes": sum(h["nbytes"] for h in here) - sum(n["nbytes"] for n in none),
            "wire": None if None in wires else wires[0] - wires[1],
        }
    return out


def added(run: dict[str, Any], name: str, kind: str = "ms") -> list[float]:
    """Milliseconds that a hook adds, in each round: by the clock, or `cpu` of all ranks together."""
    ms = run[kind]
    return [(t - n) / run["layers"] for t, n in zip(ms[name], ms["none"], strict=True)]


def report(result: dict[str, Any]) -> str:
    """The report of a run."""
    return "\n".join([head(result), "", section(result)])


def head(result: dict[str, Any]) -> str:
    """What was run, and on what."""
    load = result["load"]
    shares = sorted(s for run in result["hooks"] + result["steps"] for s in run["others"])
    some, many = (shares[(len(shares) - 1) * rank // 100] for rank in (50, 90))
    return (
        f"`{result['command']}`, {result['date']}: {result['cores']} cores ({result['chip']}), "
        f"{_versions(result)}; load {load[0]:.1f} before and {load[1]:.1f} after, this run's ranks "
        "included; other processes took "
        f"{some:.0%} of the machine in the median step, {many:.0%} or more in one of ten."
    )


def _versions(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in result["versions"].items())


def section(result: dict[str, Any]) -> str:
    """The tables: a hook's added time over size, targets, and whole steps."""
    lines = []
    for tp in dict.fromkeys(run["tp"] for run in result["hooks"]):
        runs = [run for run in result["hooks"] if run["tp"] == tp]
        lines += [f"{tp} ranks, added ms of a hook:", "", hooks_table(runs), ""]
        if all("cpu" in run for run in runs):
            told = f"{tp} ranks, CPU ms that a hook adds, all ranks together:"
            lines += [told, "", hooks_table(runs, "cpu"), ""]
    lines += ["Targets, what is added over what the yardstick adds:", "", targets_table(result), ""]
    for run in result["steps"]:
        lines += [f"{run['tp']} ranks, whole steps of {run['what']}:", "", steps_table(run), ""]
    return "\n".join(lines).rstrip()


def hooks_table(runs: list[dict[str, Any]], kind: str = "ms") -> str:
    """Ways by sizes: the median over rounds of what a hook adds, and its 95% interval; what a hook sends.

    Args:
        runs: of the same number of ranks.
        kind: `ms` by the clock; `cpu`, without what is sent, which the other table says.
    """
    sends = ["sent, of the tensor", "collectives"] if kind == "ms" else []
    table = [["way", *(f"{run['mib']:g} MiB" for run in runs), *sends]]
    first, last = runs[0], runs[-1]
    for name in (n for n in LABELS if n in first["ms"]):
        if name == "none":
            cells = [f"step {spread(run[kind][name])['median']:.1f}" for run in runs]
            table.append([LABELS[name], *cells, *([""] * len(sends))])
            continue
        cells = [_interval(spread(added(run, name, kind)), 2) for run in runs]
        if not sends:
            table.append([LABELS[name], *cells])
            continue
        whole = last["layers"] * last["mib"] * 2**20
        sent = f"{last['sent'][name]['nbytes'] / whole:.2f}"
        table.append([LABELS[name], *cells, sent, calls(first, name)])
    return _markdown(table)


def calls(run: dict[str, Any], name: str) -> str:
    """Collectives of one rank, for each hook if they are a multiple of the hooks, else of a whole step."""
    told = []
    for op, count in sorted(run["sent"][name]["calls"].items()):
        each, rest = divmod(count, run["layers"])
        told.append(f"{count} {op} a step" if rest or not each else f"{each} {op}")
    return ", ".join(told) or "0"


def targets_table(result: dict[str, Any]) -> str:
    """Each target, by size and ranks: the measured ratio, and whether it is met."""
    runs = result["hooks"]
    table = [["target", *(f"TP={run['tp']}, {run['mib']:g} MiB" for run in runs)]]
    for name, yardstick, bound in TARGETS:
        cells = [judged(run, name, yardstick, bound) for run in runs]
        table.append([f"{LABELS[name]} <= {bound:g} x {LABELS[yardstick]}", *cells])
        if all("cpu" in run for run in runs):
            cells = [judged(run, name, yardstick, bound, "cpu") for run in runs]
            table.append(["the same of CPU time", *cells])
    table += [[f"{LABELS[name]}: 0 bytes", *(_silent(run, name) for run in runs)] for name in SILENT]
    return _markdown(table)


def _silent(run: dict[str, Any], name: str) -> str:
    if name not in run["sent"]:
        return NOT_MEASURED
    nbytes = run["sent"][name]["nbytes"] / run["layers"]
    return f"{nbytes:.0f}: {'missed' if nbytes else 'met'}"


def judged(run: dict[str, Any], name: str, yardstick: str, bound: float, kind: str = "ms") -> str:
    """The ratio of two ways' medians; whether it is met says the difference within a round."""
    if name not in run["ms"] or yardstick not in run["ms"]:
        return NOT_MEASURED
    ours, theirs = added(run, name, kind), added(run, yardstick, kind)
    top, base = statistics.median(ours), statistics.median(theirs)
    ratio = (
        "below the noise" if top <= 0 else f"{top / base:.2f}" if base > 0 else "yardstick below the noise"
    )
    over = spread([o - bound * t for o, t in zip(ours, theirs, strict=True)])
    return f"{ratio}: {_short(_verdict(over, 0.0))}"


def _short(verdict: str) -> str:
    """A verdict for a cell: undecided where the interval allows either."""
    said, *doubt = verdict.split(", ")
    return "undecided" if doubt else said


def steps_table(run: dict[str, Any]) -> str:
    """Whole steps over those with nothing attached, with their targets."""
    table = [["way", "ms (quartiles)", "over nothing attached", "target"]]
    bounds = dict(STEP_TARGETS)
    for name, ms in run["ms"].items():
        of = spread(ms)
        cells = [LABELS[name], f"{of['median']:.1f} ({of['q1']:.1f}–{of['q3']:.1f})"]
        if name == "none":
            table.append([*cells, "1", ""])
            continue
        ratio = spread([t / n for t, n in zip(ms, run["ms"]["none"], strict=True)])
        bound = bounds[name]
        within = bound == 1 and ratio["low"] <= 1  # no dearer, as far as the noise allows to say
        said = "met within noise" if within else _short(_verdict(ratio, bound))
        table.append([*cells, _interval(ratio, 3), f"{bound:.2f}: {said}"])
    return _markdown(table)
