"""Ranks that persist: a pool of gloo processes for each topology, started once and used by every test of it.

A pool's ranks are forked from a process that has loaded torch and Megatron, make their process groups once,
and then run one function after the other. What a function leaves behind on a rank is an error of its test
(`tests.support.rank`). A pool is thrown away when a rank fails, dies or does not answer in time.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tests.support import rank

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])

MAX_RANKS = 24  # of all pools of this process; the pools that were used longest ago are stopped beyond
GRACE = 5.0  # seconds in which the peers of a failed rank, which mostly wait for it, may say what they know


class RankError(AssertionError):
    """One or more ranks raised; the message has each one's traceback."""

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


class Topology(NamedTuple):
    """What a pool is made for: how many ranks, and how their framework divides them (empty: not at all)."""

    world: int
    framework: str


class Pool:
    """The ranks of one topology.

    Attributes:
        calls: how many functions its ranks have run.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology, self.calls = topology, 0
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        for number in range(topology.world):
            ours, theirs = _context.Pipe()
            worker = _context.Process(
                target=rank.serve,
                args=(number, topology.world, f"{self._folder}/store", theirs),
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float, alone: bool = False
    ) -> list[Any]:
        """What the ranks return, in order; `alone`: they end then, so that they may leave anything behind.

        Raises:
            RankError: some rank raised, died, did not finish in time, or was left other than it was.
        """
        self.calls += 1
        self._signal(signal.SIGCONT)
        order = pickle.dumps((function, args, alone))
        for pipe in self._pipes:
            try:
                pipe.send_bytes(order)
            except OSError:  # the rank is dead, which collecting says
                continue
        return self._collect(timeout)

    def stop(self) -> None:
        """End the ranks, whatever they do."""
        for worker in self._workers:
            worker.kill()
        for worker, pipe in zip(self._workers, self._pipes, strict=True):
            worker.join()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def rest(self) -> None:
        """Halt the ranks until the next `run`: gloo's threads, one a group, wake a hundred times a second."""
        self._signal(signal.SIGSTOP)

    @property
    def alive(self) -> bool:
        """Whether every rank can be asked."""
        return all(w.is_alive() for w in self._workers)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        waiting = {pipe: number for number, pipe in enumerate(self._pipes)}
        while waiting:
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE)
            left = deadline - time.monotonic()
            if left <= 0:
                why = "waited for a rank that failed" if errors else f"did not finish within {timeout:g} s"
                for number in waiting.values():
                    errors.setdefault(number, why)
                break
            for pipe in wait(list(waiting), left):
                number = waiting.pop(pipe)  # type: ignore[index]
                try:
                    good, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._workers[number].join(5)
                    good, value = False, f"died with exit code {self._workers[number].exitcode}"
                (results if good else errors)[number] = value
        if errors:
            text = "\n".join(f"--- rank {number} ---\n{text}" for number, text in sorted(errors.items()))
            raise RankError(text, errors)
        return [results[number] for number in range(len(self._pipes))]


_pools: OrderedDict[Topology, Pool] = OrderedDict()  # the one used last comes last


def run(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, alone: bool = False
) -> list[Any]:
    """Call `function(*args)` on each of `world` ranks of a process group.

    The ranks are those of the topology that an argument names by its attribute `topology`, or of none. A
    function begins with the same random state on every rank and with a rendezvous store of its own.

    Args:
        world: how many ranks.
        function: of a module, so that the ranks can import it.
        timeout: seconds until the ranks are given up.
        alone: on ranks of its own, which end with it: for functions that end processes, tear down process
            groups, or load a framework that changes torch for good.

    Returns:
        What the ranks returned, in order.

    Raises:
        RankError: some rank raised, died, did not finish in time, or was left other than it was.
    """
    for argument in args:
        if hasattr(argument, "require"):
            argument.require()
    topology = Topology(world, next((a.topology for a in args if hasattr(a, "topology")), ""))
    pool = None if alone else _pools.pop(topology, None)
    if pool is not None and not pool.alive:
        pool.stop()
        pool = None
    if pool is None:
        pool = Pool(topology)
    try:
        answers = pool.run(function, args, timeout, alone)
    except BaseException:
        pool.stop()
        raise
    if alone or any(a.worn for a in answers):
        pool.stop()
    else:
        _keep(pool)
    return [pickle.loads(a.value) for a in answers]


def run_alone(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`run` with `alone=True`: for tests of frameworks whose own state cannot be put back."""
    return run(world, function, *args, timeout=timeout, alone=True)


def stop() -> None:
    """End all pools."""
    while _pools:
        _pools.popitem()[1].stop()


def _keep(pool: Pool) -> None:
    _pools[pool.topology] = pool
    pool.rest()
    while sum(t.world for t in _pools) > MAX_RANKS:
        _pools.popitem(last=False)[1].stop()


atexit.register(stop)
