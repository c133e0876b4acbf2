"""Training scripts in fresh processes: by torchrun, or forked from one that has Megatron loaded already."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support import execution

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
SCRIPT = Path(__file__).parent / "scripts" / "pretraining.py"
FLAGS = """
--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --hidden-dropout 0.1 --attention-dropout 0 --tokenizer-type
NullTokenizer --vocab-size 64 --make-vocab-size-divisible-by 64 --micro-batch-size 2
--global-batch-size 4 --seed 1 --lr 1e-2 --train-iters 3 --eval-iters 1 --eval-interval 2
--log-interval 1 --transformer-impl local --distributed-backend gloo --use-cpu-initialization
--num-workers 0 --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion
"""
MODEL = FLAGS.split()
SECONDS = 240  # for a launch; a quiet machine needs a fraction of it


def has_pretrain() -> bool:
    """Whether this environment has the training code of megatron-core 0.19 or newer."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return False
    recent = tuple(int(p) for p in version.split(".")[:2]) >= (0, 19)
    return recent and importlib.util.find_spec("megatron.training") is not None


class Done(NamedTuple):
    """What a launch did: each rank's exit status, or torchrun's, and what each said."""

    status: list[int]
    out: list[str]
    err: list[str]

    @property
    def told(self) -> list[str]:
        """The lines of ours, of all ranks."""
        lines = [line for text in self.err for line in text.splitlines()]
        return [line for line in lines if line.startswith("megatron-flex: ")]


def environment(**more: str) -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "patches"), *filter(None, [os.environ.get("PYTHONPATH")])]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    there = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **quiet, **there, **more}


def torchrun(world: int, folder: Path, *words: str) -> Done:
    """`torchrun ... WORDS` in a folder; each rank's streams apart."""
    logs = folder / "logs"
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--redirects", "3"]
    done = subprocess.run(
        [sys.executable, *command, "--log-dir", str(logs), "--nproc-per-node", str(world), *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    texts = {
        name: [next(logs.rglob(f"{rank}/{name}.log")).read_text() for rank in range(world)]
        for name in ("stdout", "stderr")
    }
    return Done([done.returncode], texts["stdout"], texts["stderr"])


class Server:
    """A process with torch and Megatron loaded, which forks into the ranks of a launch."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.launching"],
            cwd=ROOT,
            env=environment(TORCH_COMPILE_DISABLE="1", WANDB_MODE="offline", WANDB_SILENT="true"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, world: int, folder: Path, *words: object, plain: bool = False) -> Done:
        """The runner with these words, or the script without it, as it is."""
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        told = {"world": world, "folder": str(folder), "words": [*map(str, words)], "port": port}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**told, "plain": plain}) + "\n")
        self.process.stdin.flush()
        status = json.loads(self.process.stdout.readline())
        texts = [
            [(folder / f"{name}-{rank}.log").read_text() for rank in range(world)] for name in ("out", "err")
        ]
        return Done(status, *texts)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def launch_forked(server: Server, folder: Path, mark: str) -> Callable[[list[str], Path], None]:
    """As `launch` of scripts/quickstart.py, with ranks that are forked instead of started by torchrun.

    Args:
        server: forks them.
        folder: has the folders in which they run.
        mark: what a launch prints behind it is for the screen.
    """

    def launch(command: list[str], log: Path) -> None:
        world = int(command[command.index("--nproc-per-node") + 1]) if "--nproc-per-node" in command else 1
        words = command[next(n for n, word in enumerate(command) if word.endswith(".py")) :]
        done = server(world, folder / f"{world} ranks", *words, plain=True)
        assert done.status == [0] * world, done.err
        for line in "".join(done.out).splitlines():
            if line.startswith(mark):
                print(line.removeprefix(mark))

    return launch


def _serve() -> None:
    import torch.distributed as dist

    from megatron_flex import cpu

    with cpu.runtime():
        with contextlib.suppress(ImportError):
            # It loads transformers, for seconds in each rank that would do so after the fork.
            importlib.import_module("megatron.core.tokenizers.text.libraries")
        with contextlib.suppress(ImportError):
            importlib.import_module("matplotlib.pyplot")  # likewise, of the examples' first rank

        import megatron_flex.launch.preview
        import megatron_flex.launch.script_runner  # noqa: F401
    gc.freeze()
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        children = [_forked(rank, job) for rank in range(job["world"])]
        if 0 in children:
            return
        store = dist.TCPStore("localhost", job["port"], is_master=True, wait_for_workers=False)
        status = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        del store  # before the next fork, which cannot take its thread along
        os.write(answers, (json.dumps(status) + "\n").encode())


def _forked(rank: int, job: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.chdir(job["folder"])
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(job["port"]))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is served as torchrun does
    if (recorder := execution.start()) is not None:
        atexit.register(recorder.write)
    sys.argv[:] = ["launch", *job["words"]]
    if job["plain"]:
        import runpy

        from megatron_flex import cpu

        cpu.enable()
        sys.argv[:] = job["words"]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit(0)
    from megatron_flex.launch import run

    sys.exit(run(job["words"]))


if __name__ == "__main__":
    _serve()
