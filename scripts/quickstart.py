"""What scripts/quickstart runs: the training in four processes, the same weights in one, the comparison."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
MARK = "quickstart: "  # what a launch prints behind it is for the screen
DUMP_EVERY = 10  # iterations
# The same model as a GPTModel, and as a HybridModel of attention and MLP layers, over so many stages.
KINDS = {
    "gpt": ("GPTModel of 4 layers", lambda stages: "--num-layers 4"),
    "hybrid": (
        "HybridModel of 4 attention and 4 MLP layers",
        lambda stages: (
            f"--hybrid-layer-pattern {'|'.join(['*-' * (4 // stages)] * stages)} "
            "--spec megatron_flex.cpu.hybrid_spec hybrid_stack_spec"
        ),
    ),
}
MODEL = """
--hidden-size 128 --ffn-hidden-size 256 --swiglu
--num-attention-heads 8 --group-query-attention --num-query-groups 4
--normalization RMSNorm --disable-bias-linear
--position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length 128 --max-position-embeddings 128 --hidden-dropout 0 --attention-dropout 0
--tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 128
--micro-batch-size 8 --global-batch-size 32 --seed 1 --init-method-std 0.05
--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --adam-beta2 0.95
--eval-iters 0 --eval-interval 1000 --log-interval 1
"""
# What Megatron needs where there is neither a GPU nor Transformer Engine.
CPU = """
--transformer-impl local --distributed-backend gloo --use-cpu-initialization --num-workers 0
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
"""
SPREAD = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
SECONDS = 900  # for a launch; a quiet machine needs a fraction of it
TAIL = 40  # lines of the log that are shown if a launch fails


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/quickstart",
        description="Train a small Megatron model on this machine's CPU in four processes (tensor and "
        "pipeline parallel), read and edit it with megatron_flex, and compare with the same weights in one "
        "process.",
    )
    parser.add_argument("--iterations", type=int, default=40, help="of training (default %(default)s)")
    parser.add_argument(
        "--model",
        choices=list(KINDS),
        default="gpt",
        help="Megatron's GPTModel, which it deprecates, or its HybridModel (default %(default)s)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="write the dump, the weights, the page and the log there (default: a new temporary folder)",
    )
    args = parser.parse_args(words)
    if args.iterations < 1:
        parser.error(f"--iterations {args.iterations}: must be at least 1")
    return args


def environment() -> dict[str, str]:
    """What the launches see: one thread a process, no GPU, connections within this machine."""
    path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
    }


def launch(command: list[str], log: Path) -> None:
    """Run Python with a command, show the lines that are marked and write all of them to the log.

    Raises:
        SystemExit: it failed or took too long; the end of the log is shown.
    """
    with log.open("a", encoding="utf-8") as kept:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        timer = threading.Timer(SECONDS, process.terminate)
        timer.start()
        try:
            for line in process.stdout or ():
                kept.write(line)
                _, mark, rest = line.partition(MARK)
                if mark:
                    print(rest, end="", flush=True)
            status = process.wait()
        finally:
            timer.cancel()
            process.terminate()
    if status:
        print("\n".join(complaint(log.read_text(encoding="utf-8").splitlines())), file=sys.stderr)
        sys.exit(f"error: a launch ended with status {status}; its log is {log}")


def complaint(lines: list[str]) -> list[str]:
    """Why a launch failed: what the first rank that raised says, else the end before torchrun's summary."""
    raised = [line for line in lines if line.startswith("[rank")]
    if raised:
        first = raised[0].partition(":")[0]
        return [line for line in raised if line.startswith(first)][-TAIL:]
    ends = [n for n, line in enumerate(lines) if "torch/distributed/elastic/" in line]
    return lines[: ends[0] if ends else None][-TAIL:]


def train(model: str, iterations: int, folder: Path, log: Path) -> None:
    """The training script in four processes."""
    what, layers = KINDS[model]
    print(
        f"training a {what} on the source of Python's standard library: {iterations} iterations,\n"
        "4 microbatches each; 4 processes: tensor parallel 2, pipeline parallel 2, sequence parallel, gloo",
        flush=True,
    )
    torchrun = "-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 4"
    flags = [*f"{layers(2)}{MODEL}{CPU}{SPREAD} --train-iters {iterations}".split(), "--folder", str(folder)]
    launch([*torchrun.split(), str(HERE / "quickstart_train.py"), *flags], log)


def repeat(model: str, folder: Path, log: Path) -> None:
    """The same weights in one process."""
    print("reading the same weights and the same batch in 1 process, by plain PyTorch hooks", flush=True)
    flags = [*f"{KINDS[model][1](1)}{MODEL}{CPU} --train-iters 1".split(), "--folder", str(folder)]
    launch([str(HERE / "quickstart_single.py"), *flags], log)


def run(model: str, iterations: int, folder: Path) -> int:
    """Train, repeat in one process, compare; the exit status. The files stay in `folder`."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    began = time.monotonic()
    train(model, iterations, folder, log)
    middle = time.monotonic()
    repeat(model, folder, log)
    end = time.monotonic()
    from quickstart_compare import main as compare  # imports torch, which nobody should wait for at the start

    print(f"training {middle - began:.0f} s, 1 process {end - middle:.0f} s; Megatron's log: {log}\n")
    status = compare(folder)
    print("\n".join(["", "Try on the dump:", *commands(iterations, folder / "dump")]))
    print(f"Open in a browser: {folder / 'page.html'}")
    return status


def commands(iterations: int, dump: Path) -> list[str]:
    """Three commands that read the dump, each ready to be pasted."""
    script = Path(sys.executable).with_name("megatron-flex")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "megatron_flex.cli"]
    last = (iterations - 1) // DUMP_EVERY * DUMP_EVERY
    arguments = (
        ["dump", "ls", str(dump)],
        ["dump", "show", str(dump), "decoder.layers.0", "-i", str(last)],
        ["dump", "verify", str(dump)],
    )
    return [f"  {shlex.join([*program, *words])}" for words in arguments]


def main() -> int:
    """Run in the given folder, or in a new one."""
    args = arguments()
    if args.folder is None:
        return run(args.model, args.iterations, Path(tempfile.mkdtemp(prefix="quickstart-")))
    args.folder.mkdir(parents=True, exist_ok=True)
    return run(args.model, args.iterations, args.folder.resolve())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
