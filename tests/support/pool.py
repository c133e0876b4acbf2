"""Run a function on several gloo ranks, with a timeout, and bring back what each returned or raised.

Workers are forked from a process that has torch and Megatron loaded already, which takes less time than to
tear Megatron's groups down between tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


class RankError(AssertionError):
    """One or more ranks raised; the message has each one's traceback."""

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*args)` on each of `world` ranks of a fresh process group.

    Returns:
        What the ranks returned, in order.

    Raises:
        RankError: some rank raised, died, or did not finish in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, workers = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            worker = _context.Process(
                target=_work, args=(rank, world, f"{folder}/store", theirs, function, args), daemon=True
            )
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        try:
            return _collect(pipes, workers, timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _collect(pipes: list[Connection], workers: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            for rank in waiting.values():
                errors.setdefault(rank, f"did not finish within {timeout:g} s")
            break
        if errors:  # peers of a failed rank mostly hang; give them a moment to say what they know
            deadline = min(deadline, time.monotonic() + 5)
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)  # type: ignore[index]
            try:
                good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                workers[rank].join(5)
                good, value = False, f"died with exit code {workers[rank].exitcode}"
            if good:
                results[rank] = value
            else:
                errors[rank] = value
    if errors:
        text = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
        raise RankError(text, errors)
    return [results[rank] for rank in range(len(pipes))]


def _work(
    rank: int, world: int, store: str, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    faulthandler.enable()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if os.environ.get("FLEX_TEST_QUIET", "1") == "1":
        sys.stdout = io.StringIO()
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        answer = (True, function(*args))
    except BaseException as error:
        answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    try:
        pipe.send_bytes(pickle.dumps(answer))
    except Exception:
        pipe.send_bytes(pickle.dumps((False, f"answer cannot be sent: {traceback.format_exc()}")))
    with contextlib.suppress(EOFError):
        pipe.recv()  # stay until killed: a rank that leaves early closes connections that others still make
