"""scripts/gpu: what a hook costs beside code by hand, by the device's clock and the host's, and in memory.

The ways, their check against each other and the timing are those of scripts/bench --hooks.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from bench_cuda import measure
from bench_hooks import flags, settings_of
from bench_hooks_rank import HEAD, Settings
from bench_hooks_report import LABELS, added, judged
from bench_rank import _forget, build
from bench_report import _interval, spread
from bench_ways import Place, ways
from gpu_checks import Findings
from gpu_part import alone

WAYS = ("none", "idle", "clone", "read", "local by hand", "local in place", "local", "all-gather", "general")
HELD = ("none", "read", "dump", "idle", "local", "general", "statistics")
ON_CPU = 3  # of these: to go through all objects of the process takes seconds
RATIOS = [
    ("read", "clone", 1.5),
    ("local", "local by hand", 1.5),
    ("local", "local in place", 1.5),
    ("general", "all-gather", 1.1),
]
CLOCKS = {"ms": "by the device", "host": "by the host, until the step is enqueued"}
SETTLED = 3  # steps, the first of which sets things up


def settings(device: str, mib: float, only: tuple[str, ...] = WAYS) -> Settings:
    """The model and the rounds of a size; small ones where there is no GPU."""
    rounds = ["--rounds", "25"] if device == "cuda" else ["--rounds", "2", "--ffn", "512", "--seq", "32"]
    chosen = settings_of(flags(["--tp", "1", "--mib", f"{mib:g}", *rounds, "--only", *only]), 1, mib)
    return Settings(**chosen | ({} if device == "cuda" else {"layers": 2}))


def hooks(device: str) -> Findings:
    """Reads, local edits and edits of the whole at fc1's output, in turn with the same by hand."""
    findings = Findings(
        notes=[
            "What a hook adds is a step with it less the step without, of the same round, over the number of "
            "hooks: the median, and its 95% interval. A step is over when its captures are on the host.",
            "Before timing, ways that read are compared bit for bit, those that edit by the model's output.",
        ]
    )
    alone()
    runs = []
    for mib in (1, 8, 64, 256) if device == "cuda" else (1,):
        runs.append(measure(settings(device, mib), device))
        findings.holds(f"{mib:g} MiB: all ways read the same, or edit alike", True)  # else `measure` raises
    sizes = [f"{run['mib']:g} MiB" for run in runs]
    for kind, clock in CLOCKS.items():
        steps = [f"step {spread(run[kind]['none'])['median']:.2f}" for run in runs]
        rows = [["nothing attached", *steps]]
        rows += [
            [LABELS[name], *(_interval(spread(added(run, name, kind)), 3) for run in runs)]
            for name in WAYS[1:]
        ]
        findings.table(f"Added ms of a hook, {clock}", ["way", *sizes], rows)
    rows = [
        [f"{LABELS[name]}, over {LABELS[yardstick]}", f"{bound:g}"]
        + [judged(run, name, yardstick, bound, kind) for run in runs]
        for name, yardstick, bound in RATIOS
        for kind in CLOCKS
    ]
    findings.table("Ratios, by the device and then by the host", ["of what is added", "aim", *sizes], rows)
    findings.figures["runs"] = runs
    return findings


def memory(device: str) -> Findings:
    """The most that the device holds in a step, with hooks and without, and what they leave."""
    findings = Findings()
    alone()
    chosen = settings(device, 64 if device == "cuda" else 1)
    subject, step = build(chosen, gated=False, head=HEAD, device=device)
    made = ways(Place(None))
    rows, figures = [], {}
    for name in HELD if device == "cuda" else HELD[:ON_CPU]:
        for _ in range(2):  # what the first time leaves for all later ones is not a leak
            before = _held(device)
            most = _most(made[name](subject), step, subject, device)
            left = _held(device) - before
        figures[name] = {"most": most, "left": left}
        findings.at_most(f"{LABELS[name]}: {'bytes' if most else 'tensors'} left when it is removed", left, 0)
        beyond = "" if most is None else f"{(most - figures['none']['most']) / 2**20:.1f}"
        rows.append([LABELS[name], "" if most is None else f"{most / 2**20:.1f}", beyond, str(left)])
    what = "bytes" if device == "cuda" else "tensors"
    head = ["way", "greatest, MiB", "beyond nothing attached, MiB", f"{what} left"]
    title = f"{chosen.layers} hooks, each on a tensor of {chosen.mib:g} MiB"
    findings.table(title, head, rows)
    findings.figures |= figures
    if device == "cpu":
        findings.notes.append("A CPU does not count what is allocated: tensors that are left are counted.")
    return findings


def _most(way: Any, step: Any, subject: Any, device: str) -> int | None:
    """The most bytes that a GPU held at once in a settled step of a way."""
    with way as standing:
        for number in range(SETTLED):
            if device == "cuda" and number == SETTLED - 1:
                torch.cuda.reset_peak_memory_stats()
            step(standing.call)
            standing.read()
            _forget(standing, subject.model)
        return torch.cuda.max_memory_allocated() if device == "cuda" else None


def _held(device: str) -> int:
    """Bytes of the device, or on a CPU the number of tensors, that are referenced."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
