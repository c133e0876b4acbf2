"""Ranks that are killed at random moments, and a dump that is looked at after each time."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

import megatron_flex as mf
from megatron_flex.checksums import compute_block_checksums
from megatron_flex.dump.file_names import parse_iteration_folder, parse_part_name
from megatron_flex.dump.part_format import read_part
from megatron_flex.dump.schema import ShardEntry
from megatron_flex.dump.writer.run_creation import list_begun_runs
from tests.support.dumps import complete_parts
from tests.support.pool import _context

Fed = Callable[[int, int, ShardEntry], Tensor]  # what a rank was fed: iteration, rank, of which tensor
LONGEST = 120.0  # seconds for ranks that nobody kills


def killed(world: int, work: Callable[..., None], args: tuple[Any, ...], moments: list[float] | None) -> int:
    """Run `work(begun, *args)` on some ranks and kill them; returns how many had not ended by themselves.

    Args:
        world: number of ranks.
        work: calls `begun()` when its loop starts.
        args: for it.
        moments: seconds after which each rank is killed; counted from the moment when all loops have begun,
            or from the start of the processes if negative. None to kill nobody.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            worker = _context.Process(target=_run, args=(rank, world, f"{folder}/store", theirs, work, args))
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        try:
            if moments is None:
                for worker in workers:
                    worker.join(LONGEST)
                codes = [w.exitcode for w in workers]
                logs = "".join(Path(f"{folder}/store{rank}.log").read_text() for rank in range(world))
                assert codes == [0] * world, f"ranks ended with {codes}: {logs}"
                return 0
            started = time.monotonic()
            if min(moments) >= 0:
                for pipe in pipes:
                    pipe.poll(20)
                started = time.monotonic()
            count = 0
            for moment, worker in sorted(zip(map(abs, moments), workers, strict=True), key=lambda m: m[0]):
                time.sleep(max(0.0, started + moment - time.monotonic()))
                count += worker.exitcode is None
                worker.kill()
            return count
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _run(
    rank: int, world: int, store: str, pipe: Connection, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    sys.stdout = sys.stderr = open(f"{store}{rank}.log", "w")  # noqa: SIM115  # to the process's end
    import torch.distributed as dist

    file = dist.FileStore(store, world)
    dist.init_process_group(
        "gloo", store=file, rank=rank, world_size=world, timeout=timedelta(seconds=LONGEST)
    )
    work(lambda: pipe.send_bytes(b"begun"), *args)
    dist.barrier()  # who leaves early closes connections that others still need
    os._exit(0)


class Watch(ABC):
    """A dump that is written by ranks which are killed.

    Attributes:
        whole: run and iteration of all that was seen whole and was right.
        inside: how many files were found half written.
        torn: how many iterations were found that some ranks had closed, or begun, and not all.
        opening: how many runs had begun to be opened.
    """

    def __init__(self, path: Path, fed: Fed) -> None:
        self.path, self.fed = path, fed
        self.whole: set[tuple[str, str]] = set()
        self._rough: set[Path] = set()
        self._torn: set[Path] = set()

    @property
    def inside(self) -> int:
        return sum(not p.name.startswith(".run-") for p in self._rough)

    @property
    def torn(self) -> int:
        return len(self._torn)

    @property
    def opening(self) -> int:
        return sum(p.name.startswith(".run-") for p in self._rough)

    def look(self) -> None:
        """What is whole is right, what was whole still is, and what is not whole is not to be seen."""
        self._rough |= {*self.path.glob(".run-*"), *self.path.glob("run-*/*/.*.tmp")}
        seen: set[tuple[str, str]] = set()
        for run in list_begun_runs(self.path) if self.path.is_dir() else ():
            ranks = [rank for rank, _ in run.manifest.ranks]
            for folder in (f for f in run.folder.iterdir() if f.is_dir()):
                parts = complete_parts(folder, ranks)
                if parts is None:
                    self._torn.add(folder)
                    continue
                seen.add((run.folder.name, folder.name))
                if (run.folder.name, folder.name) not in self.whole:
                    for rank, paths in parts.items():
                        self._right(folder, rank, paths)
        assert self.whole <= seen, f"lost: {sorted(self.whole - seen)}"
        self.whole = seen
        if seen:
            with mf.open_dump(self.path) as dump:
                assert dump.iterations == sorted({int(name) for _, name in seen})

    def _right(self, folder: Path, rank: int, paths: list[Path]) -> None:
        """Every tensor that the rank was fed is there, once, with its checksum."""
        number = parse_iteration_folder(folder.name)
        assert number is not None
        found: set[str] = set()
        for count, path in enumerate(paths):
            part = read_part(path)
            assert parse_part_name(path.name) == (rank, count, part.index.parts)
            assert (part.index.rank, part.index.iteration, part.index.part) == (rank, number[0], count)
            content = path.read_bytes()
            for entry in part.index.entries:
                _, _, first, nbytes = part.where[entry.tensor]
                data = content[first : first + nbytes]
                assert compute_block_checksums(memoryview(data)) == entry.blocks, (
                    f"{path}: {entry.tensor} is damaged"
                )
                want = self.fed(number[0], rank, entry).contiguous().numpy().tobytes()
                assert data == want, f"{path}: {entry.tensor} is not what was fed"
                assert entry.tensor not in found
                found.add(entry.tensor)
        assert found == self.names(rank), f"{folder}, rank {rank}: {sorted(found)}"

    @abstractmethod
    def names(self, rank: int) -> set[str]:
        """The tensors of a rank's iteration."""


def moments(chance: random.Random, world: int, longest: float) -> list[float]:
    """When to kill each rank: mostly in the loop, sometimes while the dump is being opened."""
    opening = chance.random() < 0.1
    at = [chance.uniform(0.0, longest) for _ in range(world)]
    if chance.random() < 0.5:  # all at once, as when a node is lost
        at = [at[0]] * world
    return [-0.3 - t for t in at] if opening else at
