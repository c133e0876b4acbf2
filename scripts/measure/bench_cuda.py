"""scripts/bench --hooks --device cuda: the same ways on one GPU, one process, timed by CUDA events.

What has run on a GPU, docs/contributing/gpu.md says.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

COPIES = 10  # of the bandwidth's measurement
GB_OF_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s of a PCIe lane, by generation


def main(args: argparse.Namespace) -> None:
    """Measure, print, and write the file that was asked for.

    Raises:
        SystemExit: there is no GPU, or several ranks are asked for.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device: leave out --device cuda")
    if args.tp != [1]:
        raise SystemExit("error: on a GPU there is one rank: add --tp 1")
    import torch.distributed as dist
    from bench import machine
    from bench_hooks import settings_of
    from bench_hooks_rank import Settings
    from bench_hooks_report import hooks_table

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    runs = [measure(Settings(**settings_of(args, 1, mib))) for mib in args.mib]
    result = {
        "command": shlex.join(["scripts/bench", *sys.argv[1:]]),
        **machine(),
        "gpu": torch.cuda.get_device_name(),
        "link_gb_s": link(),
        "pinned_gb_s": pinned(max(args.mib)),
        "hooks": runs,
    }
    print(f"{result['command']}\n{result['gpu']}, added ms of a hook, by CUDA events:\n\n{hooks_table(runs)}")
    told = result["link_gb_s"] or "unknown"
    print(f"\na copy to pinned memory, GB/s: {result['pinned_gb_s']:.1f}; the link: {told}")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class Clock:
    """Times of one step: until the device is through with it, and until the host has enqueued it.

    Args:
        device: `cuda`, by events; or `cpu`, where both are the same.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.cuda if device == "cuda" else None

    def start(self) -> None:
        """Begin, when nothing is under way any more."""
        if self._cuda is not None:
            self._start, self._end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            self._cuda.synchronize()
            self._start.record()
        self._began = perf_counter()

    def enqueued(self) -> float:
        """Milliseconds since the start, by the host's clock; waits for nothing."""
        return (perf_counter() - self._began) * 1e3

    def through(self) -> float:
        """Milliseconds from the start until the device is through with all that it was given."""
        if self._cuda is None:
            return self.enqueued()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


def measure(settings: Any, device: str = "cuda") -> dict[str, Any]:
    """Milliseconds of whole steps of one size, by way and round.

    Args:
        settings: `bench_hooks_rank.Settings`.
        device: `cuda`, or `cpu`.

    Returns:
        `ms`, until the captures have arrived; `host`, until the host has enqueued the step; `sent`.
    """
    from bench_hooks_rank import HEAD, _counted, check
    from bench_hooks_report import sent_by
    from bench_rank import _forget, build, orders
    from bench_ways import Place, ways
    from megatron.core import parallel_state

    logging.disable(logging.WARNING)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    subject, step = build(settings, gated=False, head=HEAD, device=device)
    made = ways(Place(settings.folder))
    bound = {n: (lambda w=w: w(subject)) for n, w in made.items() if not settings.only or n in settings.only}
    check(bound, step)
    sent = sent_by([{name: _counted(way, step, subject) for name, way in bound.items()}])
    ms: dict[str, list[float]] = {name: [] for name in bound}
    host: dict[str, list[float]] = {name: [] for name in bound}
    clock = Clock(device)
    gc.collect()
    for number, order in enumerate(orders(list(bound), settings.warmup + settings.rounds), -settings.warmup):
        for name in order:
            with bound[name]() as standing:
                for again in range(2):  # the first one settles it
                    clock.start()
                    step(standing.call)
                    enqueued = clock.enqueued()
                    standing.read()
                    through = clock.through()
                    _forget(standing, subject.model)
                    if again and number >= 0:
                        ms[name].append(through)
                        host[name].append(enqueued)
    return {"tp": 1, "mib": settings.mib, "layers": settings.layers, "ms": ms, "host": host, "sent": sent}


def pinned(mib: float) -> float:
    """GB/s of copies from the GPU to pinned memory."""
    import torch

    device = torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")
    host = torch.empty(device.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(device, non_blocking=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(COPIES):
        host.copy_(device, non_blocking=True)
    end.record()
    end.synchronize()
    return COPIES * device.nbytes / start.elapsed_time(end) / 1e6


def link() -> float | None:
    """GB/s that the PCIe link has by its generation and width; None if unknown."""
    asked = [
        "nvidia-smi",
        "--query-gpu=pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader",
        "-i",
        "0",
    ]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout
        generation, width = (int(word) for word in told.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return round(GB_OF_LANE[generation] * width, 1) if generation in GB_OF_LANE else None
