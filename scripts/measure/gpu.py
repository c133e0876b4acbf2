"""What scripts/gpu runs: parts that prove the package on one GPU, each a process of its own; and the page.

A part's result is a file, so that a run can be resumed. This file needs no more than Python's own library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import gpu_page
import gpu_wheels

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing" / "gpu.md"
SOURCES = ("megatron_flex/**/*.py", "scripts/**/*.py", "tests/support/*.py", "tests/distributed/matrix.py")
TAIL = 1500  # characters of a part's output that its result keeps where it failed to finish
PASSED, FAILED, LATE, CRASHED = "passed", "failed", "did not finish", "crashed"


class Part(NamedTuple):
    """A part: what it shows, and the seconds after which it is ended."""

    says: str
    limit: int


# the most valuable first
PARTS = {
    "values": Part(
        "values, gradients and edits of every kind of hook point, fp32, against plain PyTorch", 420
    ),
    "bf16": Part("the same in bf16", 420),
    "hooks": Part("device and host time of a hook, compared with hand-written code", 420),
    "copies": Part("copies to the host are correct, pinned, and overlap with compute; their rate", 240),
    "dump": Part("a dump of training steps, read back bit for bit; its rate", 240),
    "statistics": Part("statistics against torch's own; what they cost a step", 240),
    "memory": Part("memory with hooks, and what they leave", 240),
    "two_ranks": Part("two tensor parallel ranks on one GPU over gloo: values, gradients, edits", 420),
}


def flags(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="Prove megatron_flex on one GPU, in parts that are each ended at a time limit below "
        "eight minutes. A part that finished is not run again (same sources, device and torch); one that "
        "crashes, is late or finds something wrong never stops the next. Exits with 1 if any part did not "
        "pass.",
        epilog="Without a network on the GPU's machine: `scripts/gpu --carry FOLDER` where there is a "
        "package index gathers wheels of what such a machine lacks (megatron-core and a few packages, below "
        "60 MiB; torch is not among them: the machine has it). There, `FLEX_PYTHON=PYTHON scripts/gpu "
        "--wheels FOLDER` with the Python that has torch makes an environment over its packages, from these "
        "wheels alone, and runs.",
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the command (default cuda)")
    add("--part", nargs="+", metavar="NAME", choices=PARTS, default=list(PARTS), help="only these")
    add("--list", action="store_true", help="name the parts and what is known about them; run nothing")
    add("--out", type=Path, metavar="FOLDER", help="where results are kept (default build/gpu/DEVICE)")
    add("--fresh", action="store_true", help="run parts again that have finished")
    add(
        "--write",
        type=Path,
        metavar="PAGE",
        help="default docs/contributing/gpu.md; of a CPU, in the out folder",
    )
    add("--venv", type=Path, metavar="FOLDER", help="the environment to run in, or to make with --wheels")
    add(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="install from these wheels alone (default build/gpu/venv)",
    )
    add("--carry", type=Path, metavar="FOLDER", help="gather those wheels here; run nothing")
    add("--limit", type=float, metavar="SECONDS", help="for each part (default: its own)")
    args = parser.parse_args(words)
    args.out = args.out or ROOT / "build" / "gpu" / args.device
    if args.device == "cpu" and args.write and args.write.resolve().is_relative_to(PAGE.parent):
        parser.error(
            f"--write {args.write}: figures of a CPU do not go among the documents; name another page"
        )
    args.write = args.write or (PAGE if args.device == "cuda" else args.out / PAGE.name)
    if args.wheels and not args.venv:
        args.venv = ROOT / "build" / "gpu" / "venv"
    return args


def sources() -> str:
    """A hash of the code that is run and of the code that runs it."""
    digest = hashlib.sha256()
    for path in sorted(p for pattern in SOURCES for p in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def commit() -> str:
    """The commit of the checkout, with a mark where files differ from it; `unknown` without git."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine(python: str, device: str) -> dict[str, Any]:
    """What the environment says of the machine and of itself.

    Raises:
        SystemExit: it has no such device, or lacks a package.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "machine.json")
        done = subprocess.run(
            _command(python, "machine", device, target), env=_environment(), stdout=sys.stderr
        )
        if done.returncode:
            raise SystemExit(f"error: {python} cannot be used, see above")
        told: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return told | {"commit": commit(), "sources": sources()}


def run_part(command: Sequence[str], target: Path, limit: float) -> dict[str, Any]:
    """Run a part to its end or to its time limit, and say how it went.

    Args:
        command: writes what it finds to `target`.
        target: a file.
        limit: seconds after which it, and all that it started, is ended.
    """
    target.unlink(missing_ok=True)
    log, began = target.with_suffix(".log"), time.monotonic()
    status, error = "", ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            status, error = LATE, f"ended after {limit:g} s"
        finally:
            _end(process)
    found: dict[str, Any] = {"checks": [], "tables": [], "notes": [], "figures": {}}
    if not status and code == 0 and target.exists():
        found = json.loads(target.read_text(encoding="utf-8"))
        status = PASSED if found["checks"] and all(c["good"] for c in found["checks"]) else FAILED
    elif not status:
        status, error = CRASHED, f"exit status {code}: " + _tail(log)
    target.unlink(missing_ok=True)
    return {"status": status, "error": error, "seconds": time.monotonic() - began, **found}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and the processes that it started, which have its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()


def _command(python: str, name: str, device: str, target: Path) -> list[str]:
    return [python, str(ROOT / "scripts" / "measure" / "gpu_part.py"), name, device, str(target)]


def _environment() -> dict[str, str]:
    """One device, this checkout's package, kernels that can be repeated, nothing compiled by Megatron."""
    given = os.environ
    path = os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    visible = given.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    fixed |= {"TORCH_COMPILE_DISABLE": "1", "CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path}
    return {**given, **fixed}


class Store:
    """Results of parts, one file each, that hold for the same sources, device and versions.

    Args:
        folder: where they are.
        key: what they hold for; None for whatever is there.
    """

    def __init__(self, folder: Path, key: dict[str, str] | None) -> None:
        self.folder, self.key = folder, key

    def get(self, name: str) -> dict[str, Any] | None:
        """A part's result; None if there is none, or one of something else."""
        try:
            found: dict[str, Any] = json.loads(self._file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if self.key is None or found["key"] == self.key else None

    def put(self, name: str, result: dict[str, Any]) -> None:
        """Keep a result, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rough = self._file(name).with_suffix(".rough")
        rough.write_text(json.dumps({"key": self.key, **result}, indent=1) + "\n", encoding="utf-8")
        rough.replace(self._file(name))

    def all(self) -> dict[str, dict[str, Any]]:
        """All results that hold."""
        found = {name: self.get(name) for name in PARTS}
        return {name: result for name, result in found.items() if result is not None}

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def finished(result: dict[str, Any] | None) -> bool:
    """Whether a part came to its end, so that running it again would find the same."""
    return result is not None and result["status"] in (PASSED, FAILED)


def run(args: argparse.Namespace, python: str) -> int:
    """Run what is wanted, write the page; the exit status."""
    here = machine(python, args.device)
    key = {name: str(here[name]) for name in ("device", "name", "torch", "megatron-core", "sources")}
    store = Store(args.out, key)
    for name in args.part:
        result = store.get(name)
        if args.fresh or not finished(result):
            print(f"{name}: {PARTS[name].says} ...", flush=True)
            limit = args.limit or PARTS[name].limit
            args.out.mkdir(parents=True, exist_ok=True)
            target = args.out / f"{name}.found"
            result = run_part(_command(python, name, args.device, target), target, limit)
            store.put(name, result)
            write(args.write, here, store.all())
        assert result is not None
        checks = result["checks"]
        good = sum(c["good"] for c in checks)
        print(
            f"{name}: {result['status']}, {good} of {len(checks)} checks in {result['seconds']:.0f} s",
            *([result["error"]] if result["error"] else []),
            *(
                f"  wrong: {c['what']}: {c['found']:g}, at most {c['bound']:g}"
                for c in checks
                if not c["good"]
            ),
            sep="\n",
            flush=True,
        )
    found = store.all()
    write(args.write, here, found)
    print(f"{args.write} is written")
    return 0 if all(found[name]["status"] == PASSED for name in args.part) else 1


def write(page: Path, here: dict[str, Any] | None, found: dict[str, dict[str, Any]]) -> None:
    """Write the page, and the raw figures beside it."""
    result = {
        "machine": here,
        "parts": {n: {k: v for k, v in r.items() if k != "key"} for n, r in found.items()},
    }
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page.write_text(text(result), encoding="utf-8")


def text(result: dict[str, Any]) -> str:
    """The page of raw figures."""
    return gpu_page.page(result, {name: part.says for name, part in PARTS.items()})


def show(store: Store) -> None:
    """Name the parts, and what is known about each."""
    for name, part in PARTS.items():
        result = store.get(name)
        told = f"{result['status']} (sources {result['key']['sources']})" if result else "not run"
        print(f"{name:12} {part.says}; at most {part.limit} s: {told}")


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    args = flags(words)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the part that runs, too
    if args.list:
        show(Store(args.out, None))
        return 0
    if args.carry:
        gpu_wheels.carry(args.carry)
        return 0
    python = gpu_wheels.environment(args.venv, args.wheels) if args.venv else sys.executable
    return run(args, python)


if __name__ == "__main__":
    sys.exit(main())
