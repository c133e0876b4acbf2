"""One part of scripts/gpu, in a process of its own: `gpu_part.py NAME DEVICE FILE`, or `machine DEVICE FILE`.

What it finds goes to FILE as JSON. A failing check is not an error here: who started it looks at the checks.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MODULES = {
    "values": "gpu_values",
    "bf16": "gpu_values",
    "hooks": "gpu_costs",
    "copies": "gpu_copies",
    "dump": "gpu_sinks",
    "statistics": "gpu_sinks",
    "memory": "gpu_costs",
    "two_ranks": "gpu_values",
}


def prepare(device: str) -> None:
    """One device, the same kernels at each run, full fp32; Megatron's stand-ins where there is no GPU.

    Raises:
        SystemExit: torch has no CUDA device.
    """
    import torch

    # Both are read when first used: for cuBLAS's deterministic kernels, and since jit_fuser compiles.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if device == "cpu":
        from megatron_flex import cpu

        cpu.enable()
        return
    if not torch.cuda.is_available():
        raise SystemExit(
            f"error: torch {torch.__version__} has no CUDA device; --device cpu tries the command without one"
        )
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def alone() -> None:
    """Make a process group of this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def machine(device: str) -> dict[str, Any]:
    """What the figures hold for."""
    import torch
    from bench import machine as host

    try:
        megatron = version("megatron-core")
    except PackageNotFoundError:
        raise SystemExit(
            "error: megatron-core is not installed: use --wheels, or an environment that has it"
        ) from None
    told: dict[str, Any] = {
        "device": device,
        "name": str(host()["chip"]),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron,
    }
    if device == "cuda":
        prepare(device)
        found = torch.cuda.get_device_properties(0)
        told |= {
            "name": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return told


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def main(words: list[str]) -> None:
    """Run a part and write what it found, whole or not at all."""
    name, device, target = words
    if name == "machine":
        found = machine(device)
    else:
        prepare(device)
        found = getattr(importlib.import_module(MODULES[name]), name)(device).as_json()
    rough = Path(f"{target}.rough")
    rough.write_text(json.dumps(found), encoding="utf-8")
    rough.replace(target)


if __name__ == "__main__":
    main(sys.argv[1:])
