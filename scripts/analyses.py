"""What scripts/analyses runs: training, unless there are weights; analyses in four processes; the report."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from quickstart import CPU, HERE, KINDS, MODEL, SPREAD, launch, train

TORCHRUN = "-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 4"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/analyses",
        description="Look into a small GPT that runs in four processes (tensor and pipeline parallel): "
        "induction heads, the logit lens, the tuned lens, by megatron_flex's caches and trainable modules.",
    )
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="the folder of scripts/quickstart --folder DIR"
    )
    parser.add_argument("--iterations", type=int, default=40, help="of training (default %(default)s)")
    parser.add_argument(
        "--tuning", type=int, default=40, help="steps of the tuned lens (default %(default)s)"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write pictures there (needs matplotlib)")
    args = parser.parse_args(words)
    if min(args.iterations, args.tuning) < 1:
        parser.error("--iterations and --tuning must be at least 1")
    if args.weights is not None and not (args.weights / "weights").is_file():
        parser.error(
            f"no file 'weights' in {args.weights}; make one with scripts/quickstart --folder {args.weights}"
        )
    return args


def main() -> int:
    """Everything, in a folder that goes away; the log stays."""
    args = arguments()
    handle, log = tempfile.mkstemp(prefix="analyses-", suffix=".log")
    os.close(handle)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="analyses-") as name:
        folder = Path(name)
        if args.weights is None:
            train("gpt", args.iterations, folder, Path(log))
        else:
            shutil.copy(args.weights / "weights", folder)
        middle = time.monotonic()
        print(
            "analyses in 4 processes: tensor parallel 2, pipeline parallel 2, sequence parallel", flush=True
        )
        torchrun = TORCHRUN.split()
        layers = KINDS["gpt"][1](2)
        flags = f"{layers}{MODEL}{CPU}{SPREAD} --train-iters 1 --tuning {args.tuning}".split()
        flags += [] if args.plots is None else ["--plots", str(args.plots.resolve())]
        launch([*torchrun, str(HERE / "analyses_run.py"), *flags, "--folder", str(folder)], Path(log))
        end = time.monotonic()
        from analyses_report import report  # imports torch, which nobody should wait for at the start

        print(f"training {middle - began:.0f} s, analyses {end - middle:.0f} s; Megatron's log: {log}\n")
        report(folder / "analyses")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
