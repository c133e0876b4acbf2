"""scripts/gpu: copies from the device to the host: right, pinned, beside the model, and how fast."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from bench_cuda import COPIES, link, pinned
from bench_hooks_rank import HEAD
from bench_hooks_report import LABELS
from bench_rank import Step, _forget, build
from bench_variants import FC1, Subject
from bench_ways import Place, ways
from gpu_checks import Findings, identical
from gpu_costs import settings
from gpu_part import alone
from torch import Tensor

import megatron_flex as mf
from megatron_flex.collectives.transport.device_copies import DeviceCopies
from megatron_flex.collectives.transport.segments import Segment, SharedSegment
from megatron_flex.config import flex_config
from megatron_flex.dump.writer.copy_stream import CopyStream

MIB = 32  # of a copy: what fits the shared memory of most containers
CYCLES = 400_000_000  # of a kernel that does nothing, some 0.2 s: far longer than a copy
WAYS = ("none", "idle", "read", "local", "linear", "general", "statistics", "dump")
SILENT = ("idle", "local", "dump")  # ways that must not make the host wait for the device in a step
ON_CPU = (
    "A CPU has neither pinned memory nor streams: only a read of a tensor that is overwritten right after "
    "was checked."
)


def copies(device: str) -> Findings:
    """Copies of one read at a time, of the library's two roads to the host, and those of whole steps."""
    findings = Findings()
    alone()
    subject, step = build(settings(device, 1), gated=False, head=HEAD, device=device)
    _overwritten(findings, subject, step)
    if device == "cpu":
        findings.notes.append(ON_CPU)
        return findings
    rates: dict[str, float] = {"pinned memory, by hand": pinned(MIB), "pageable memory, by hand": _pageable()}
    with _guarded(findings, "to shared memory"):
        rates |= _to_shared(findings)
    with _guarded(findings, "to a dump's buffers"):
        rates |= _to_buffers(findings)
    with _guarded(findings, "whole steps"):
        _synchronised(findings, subject, step)
    most = link()
    of_link = [f"{rate / most:.2f}" if most else "" for rate in rates.values()]
    rows = [[n, f"{r:.1f}", part] for (n, r), part in zip(rates.items(), of_link, strict=True)]
    head = ["copy", "GB/s", f"of the link, {most} GB/s" if most else "of the link, which is unknown"]
    findings.table(f"Copies of {MIB} MiB to the host", head, rows)
    findings.figures |= {"gb_s": rates, "link_gb_s": most}
    return findings


def _overwritten(findings: Findings, subject: Subject, step: Step) -> None:
    """A read has what passed, though it is overwritten in place right after."""
    name = FC1.format(0)
    module, seen = subject.model.get_submodule(name), []
    keeps = module.register_forward_hook(lambda _, __, output: seen.append(output[0].detach().clone()))
    with mf.attach(subject.model, [mf.HookFunction(name)]) as flex:
        after: list[Tensor] = []

        def overwrite(_: Any, __: Any, output: Any) -> None:
            output[0].detach().zero_()
            after.append(output[0].detach())

        overwrites = module.register_forward_hook(overwrite)
        step(subject.model)
        findings.same(
            "a read of a tensor that is overwritten right after", flex.output_dict[name][0], seen[0]
        )
        overwrites.remove()
    keeps.remove()
    findings.holds("it was overwritten", not identical(after[0], seen[0]))
    for parameter in subject.model.parameters():
        parameter.grad = None


def _pageable() -> float:
    source = torch.empty(MIB << 20, dtype=torch.uint8, device="cuda")
    host = torch.zeros(source.shape, dtype=torch.uint8)
    return _rate(source.nbytes, lambda: host.copy_(source), lambda: None)


def _rate(nbytes: int, start: Callable[[], object], finish: Callable[[], object]) -> float:
    """GB/s of some copies that are started one after the other and then waited for."""
    torch.cuda.synchronize()
    began = perf_counter()
    for _ in range(COPIES):
        start()
    finish()
    torch.cuda.synchronize()
    return COPIES * nbytes / (perf_counter() - began) / 1e9


def _to_shared(findings: Findings) -> dict[str, float]:
    """Reads of several ranks of a node: registered pages that they share, straight and row by row."""
    nbytes, found = MIB << 20, {}
    segment, roads = _segment(2 * nbytes), DeviceCopies(torch.device("cuda", 0))
    columns = 1024
    rows = nbytes // 4 // columns
    wide = segment.entries(torch.float32)[: rows * 2 * columns].view(rows, 2 * columns)
    for what, target in (
        ("to shared memory", wide[: rows // 2]),
        ("the same, rows apart", wide[:, :columns]),
    ):
        source = torch.randn(target.shape, device="cuda")

        def start(target: Tensor = target, source: Tensor = source) -> None:
            roads.start([(target, source)], segment)

        _road(findings, what, target, source, start, roads.finish)
        found[what] = _rate(source.nbytes, start, roads.finish)
    findings.holds("the shared pages are pinned", wide.is_pinned())
    roads.close()
    return found


def _segment(nbytes: int) -> Segment:
    for folder in (flex_config.shared_folder, tempfile.gettempdir()):
        try:
            shared = SharedSegment(Path(folder, f"megatron_flex-{os.getpid()}"), nbytes)
        except OSError as error:
            why = error
        else:
            shared.unlink()
            return shared.segment
    raise RuntimeError(f"no folder has room for {nbytes} bytes of shared memory: {why}")


def _to_buffers(findings: Findings) -> dict[str, float]:
    """Dumps: pinned buffers."""
    host = torch.empty(MIB << 18, dtype=torch.float32, pin_memory=True)
    side = CopyStream(torch.device("cuda", 0))
    source = torch.randn(host.shape, device="cuda")

    def start() -> None:
        side.copy(host, source, owned=False)

    def finish() -> None:
        side.mark().synchronize()

    _road(findings, "to a dump's buffers", host, source, start, finish)
    return {"to a dump's buffers": _rate(source.nbytes, start, finish)}


def _road(
    findings: Findings,
    what: str,
    target: Tensor,
    source: Tensor,
    start: Callable[[], None],
    finish: Callable[[], None],
) -> None:
    """Check that a copy is right, though its source is overwritten; that the host and the model go on."""
    want = source.cpu()
    start()  # what is set up the first time is set up now
    finish()
    target.zero_()
    with _forbidden() as waited:
        start()
        source.zero_()
    findings.holds(f"{what}: the host does not wait", not waited)
    torch.cuda._sleep(CYCLES)
    model = torch.cuda.Event()
    model.record()
    finish()
    findings.holds(f"{what}: it is through while the model's stream is busy", not model.query())
    findings.same(f"{what}: right, though its source is overwritten right after", target, want)
    source.copy_(want)


@contextmanager
def _forbidden() -> Iterator[list[str]]:
    """What waits for the device in here is an error of torch; it is found in the list."""
    waited: list[str] = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield waited
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        waited.append(str(error))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _synchronised(findings: Findings, subject: Subject, step: Step) -> None:
    """How often the host waits for the device in a settled step, as torch counts it."""
    made, rows, counts = ways(Place(None)), [], {}
    for name in WAYS:
        with made[name](subject) as standing:
            for number in range(2):
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    torch.cuda.set_sync_debug_mode("warn" if number else "default")
                    step(standing.call)
                    torch.cuda.set_sync_debug_mode("default")
                _forget(standing, subject.model)
        counts[name] = sum("synchroniz" in str(w.message) for w in seen)
        more = counts[name] - counts["none"]
        rows.append([LABELS[name], str(more) if name != "none" else f"{counts[name]} in all"])
        if name in SILENT:
            findings.at_most(f"{LABELS[name]}: the host waits in a step", more, 0)
    findings.table(
        f"Waits of the host in a step, with {subject.layers} hooks", ["way", "beyond the model's"], rows
    )
    findings.notes.append(
        "On one rank a read ends with a copy of each tensor that is waited for, when the step is over; ranks "
        "of a node that share memory copy as the first table says."
    )
    findings.figures["waits"] = counts


@contextmanager
def _guarded(findings: Findings, what: str) -> Iterator[None]:
    """One road that fails must not hide what the others show."""
    try:
        yield
    except Exception as error:
        findings.holds(f"{what}: it runs ({type(error).__name__}: {str(error)[-400:]})", False)
