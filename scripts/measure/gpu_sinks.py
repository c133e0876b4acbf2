"""scripts/gpu: dumps and statistics of training steps, against plain hooks of the same steps."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from bench_cuda import measure
from bench_hooks_rank import HEAD, Settings
from bench_hooks_report import LABELS
from bench_rank import Step, build
from bench_report import _interval, spread
from bench_variants import FC1, Subject
from gpu_checks import Findings
from gpu_costs import settings
from gpu_part import alone
from torch import Tensor

import megatron_flex as mf

SITES = [FC1.format("*"), "decoder.layers.*"]
RATE = 1e-3  # of plain gradient descent, so that every step sees other values
# Moments are summed in fp32 within blocks on a CPU and in fp64 on a GPU; docs/statistics.md says five digits.
DIGITS = 1e-5
MOMENTS = ("mean", "std", "rms", "absmax", "zeros", "kurtosis", "norm")
EXACT = ("count", "nans", "infinities", "absmax", "zeros")


def dump(device: str) -> Findings:
    """A dump of training steps, read back, is bit for bit what plain hooks saw before it was overwritten."""
    findings = Findings()
    alone()
    subject, step, count = _subject(device)
    _train(subject, step, 1)
    began = perf_counter()
    with _plain(subject):
        _train(subject, step, count)
        _wait(device)
    without = perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dump")
        with _plain(subject) as seen:
            flex = mf.attach(subject.model, dumps=mf.Dump(path, SITES))
            with _overwriting(subject):
                began = perf_counter()
                _train(subject, step, count)
                _wait(device)
                trained = perf_counter() - began
                flex.restore()
                closed = perf_counter() - began
        written = 0
        with mf.open_dump(path) as found:
            findings.holds(f"{count} iterations are there", list(found.iterations) == list(range(count)))
            for name, tensors in seen.items():
                for number, want in enumerate(tensors):
                    got = found[name][number].torch()
                    findings.same(f"{name}, iteration {number}", got, want.transpose(0, 1))
                    written += want.nbytes
    gib = written / 1e9
    rows = [
        ["steps with plain hooks alone", f"{without:.2f}", ""],
        ["steps with the dump too", f"{trained:.2f}", f"{gib / trained:.2f}"],
        ["until all of it is in files", f"{closed:.2f}", f"{gib / closed:.2f}"],
    ]
    findings.table(f"{count} steps, {gib:.3f} GB", ["what", "seconds", "GB/s"], rows)
    findings.figures |= {"bytes": written, "without_s": without, "with_s": trained, "closed_s": closed}
    return findings


def statistics(device: str) -> Findings:
    """Statistics of training steps, against torch's own in fp64; and what they add to a step."""
    notes = [
        f"Counts, zeros and greatest magnitudes are exact; moments may be off by {DIGITS:g} of themselves."
    ]
    findings = Findings(notes=notes)
    alone()
    subject, step, count = _subject(device)
    with tempfile.TemporaryDirectory() as folder:
        with _plain(subject) as seen, mf.attach(subject.model, statistics=mf.Statistics(folder, SITES)):
            _train(subject, step, count)
        found = mf.open_statistics(folder)
        for name, tensors in seen.items():
            series = found[name]
            findings.holds(f"{name}: {count} iterations", len(series) == count == len(tensors))
            far = dict.fromkeys([*MOMENTS, *EXACT], 0.0)
            for number, tensor in enumerate(tensors):
                for what, want in of(tensor).items():
                    far[what] = max(far[what], off(float(getattr(series, what)[number]), want))
            for what, worst in far.items():
                findings.at_most(f"{name}, {what}", worst, 0.0 if what in EXACT else DIGITS)
            counted = all(sum(h) == t.numel() for h, t in zip(series.histogram, tensors, strict=True))
            findings.holds(f"{name}, histogram counts every value", counted)
    run = measure(_costed(device), device)
    rows = [
        [LABELS["none"], _interval(spread(run["ms"]["none"]), 2), _interval(spread(run["host"]["none"]), 2)]
    ]
    for name in ("statistics", "dump"):
        more = (
            _interval(spread([t - n for t, n in zip(run[kind][name], run[kind]["none"], strict=True)]), 2)
            for kind in ("ms", "host")
        )
        rows.append([f"{LABELS[name]}, added", *more])
    title = f"A step with {run['layers']} tensors of {run['mib']:g} MiB, ms"
    findings.table(title, ["way", "by the device", "by the host, until it is enqueued"], rows)
    findings.figures["run"] = run
    return findings


def of(tensor: Tensor) -> dict[str, float]:
    """Statistics of a tensor of finite values by torch, in fp64."""
    x = tensor.double()
    mean, std = x.mean(), x.std(correction=0)
    return {
        "count": x.numel(),
        "nans": int(x.isnan().sum()),
        "infinities": int(x.isinf().sum()),
        "mean": float(mean),
        "std": float(std),
        "rms": float(x.square().mean().sqrt()),
        "absmax": float(x.abs().max()),
        "zeros": float((x == 0).double().mean()),
        "kurtosis": float(((x - mean) ** 4).mean() / std**4),
        "norm": float(x.norm()),
    }


def off(got: float, want: float) -> float:
    """How far a number is from another, in parts of that; of numbers below one, the distance itself."""
    return abs(got - want) / max(abs(want), 1.0)


def _subject(device: str) -> tuple[Subject, Step, int]:
    """A model, a step of it, and how many steps are run."""
    chosen = settings(device, 64 if device == "cuda" else 1)
    subject, step = build(chosen, gated=False, head=HEAD, device=device)
    return subject, step, 4 if device == "cuda" else 2


def _costed(device: str) -> Settings:
    return settings(device, 64 if device == "cuda" else 1, ("none", "statistics", "dump"))


def _train(subject: Subject, step: Step, count: int) -> None:
    for _ in range(count):
        step(subject.model)
        with torch.no_grad():
            for parameter in subject.model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                parameter.grad = None


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _plain(subject: Subject) -> Iterator[dict[str, list[Tensor]]]:
    """Plain hooks that copy to the host, by the name of the hook point."""
    seen: dict[str, list[Tensor]] = defaultdict(list)

    def keeps(name: str) -> Callable[..., None]:
        return lambda _, __, output: seen[name].append(output[0].detach().to("cpu", copy=True))

    names = [n for i in range(subject.layers) for n in (FC1.format(i), f"decoder.layers.{i}")]
    handles = [subject.model.get_submodule(n).register_forward_hook(keeps(f"{n}:output")) for n in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _overwriting(subject: Subject) -> Iterator[None]:
    """Plain hooks that overwrite fc1's output right after everybody has seen it."""

    def overwrite(_: Any, __: Any, output: Any) -> None:
        output[0].detach().mul_(1.01)

    modules = [subject.model.get_submodule(FC1.format(i)) for i in range(subject.layers)]
    handles = [module.register_forward_hook(overwrite) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
