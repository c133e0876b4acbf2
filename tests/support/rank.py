"""One rank of a pool: runs a function, puts back what tests may change, and finds what is left behind.

What a test may change, and the rank puts back: what it sets by `changes`, random states, the environment,
`knobs`, the CPU runtime, the standard streams, the working directory, `sys.path`; open sessions are closed.
Everything else must be what it was when the function is over: see `tests.support.fingerprint`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import sys
import traceback
import weakref
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest

from tests.support import execution, fingerprint

changes = pytest.MonkeyPatch()  # what a function sets through it is put back when the function is over
SEED = 20230
SECONDS = 60  # that a collective waits for the other ranks
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
MAX_GROUPS = 40  # of a rank, each with its sockets and threads; with more it is not used again


class Answer(NamedTuple):
    """What a rank returned.

    Attributes:
        value: it, pickled.
        worn: whether the rank should not be used again.
    """

    value: bytes
    worn: bool


def serve(number: int, world: int, store: str, pipe: Connection) -> None:
    """Be a rank: run what comes through the pipe until it is closed."""
    faulthandler.enable()
    _end_with_parent()
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number))
    try:
        import torch.distributed as dist

        share_device()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=number,
            world_size=world,
            timeout=timedelta(seconds=SECONDS),
        )
        rank = Rank()
        recorder = execution.start()
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((False, _text(error))))
        return
    while True:
        try:
            order = pipe.recv_bytes()
        except EOFError:
            return
        answer = pickle.dumps(rank.answer(order))
        if recorder is not None:
            recorder.write()
        pipe.send_bytes(answer)


def _end_with_parent() -> None:
    """Die with the process that forks ranks: halted ones would outlive a test run that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def share_device() -> None:
    """Let all gloo groups of this process use one device.

    A device has a thread that wakes a hundred times a second. A rank with twenty groups, as many as Megatron
    makes, spends 2.8% of a core on waking if each has a device of its own, and 0.4% with one for all.
    """
    import torch.distributed as dist

    gloo = dist.distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class OnOneDevice(gloo):  # type: ignore[misc, valid-type]
        # torch 2.14 also says whether the group can be reconfigured, which no test does.
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OnOneDevice


class Rank:
    """What a rank remembers from one function to the next."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        from megatron_flex.runtime.session import Session

        if not torch.__version__.startswith("2.13"):
            import torch._dynamo  # wraps torch.manual_seed from torch 2.14 on, which no test does

        self._group = dist.group.WORLD
        self._backend, self._store = dist.distributed_c10d._world.pg_map[self._group]
        self._sessions = _Sessions(Session)
        self._fingerprint = fingerprint.Fingerprint()
        self._calls = 0

    def answer(self, order: bytes) -> tuple[bool, Any]:
        """Run one function: whether it went well, and its answer, or what went wrong."""
        try:
            function, args, alone = pickle.loads(order)
            with self._isolated():
                value = pickle.dumps(function(*args))
                if not alone:
                    self._sessions.close()
            del args
            left = [] if alone else self._left_behind()
        except BaseException as error:
            return False, _text(error)
        if left:
            lines = "\n  ".join(left)
            return False, f"{function.__module__}.{function.__name__} leaves behind on this rank:\n  {lines}"
        return True, Answer(value, fingerprint.groups() > MAX_GROUPS)

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        """A rendezvous store of its own, fixed random states, and back to what was there before."""
        import numpy as np
        import torch
        import torch.distributed as dist

        from megatron_flex.config import flex_config
        from megatron_flex.cpu import switch

        self._calls += 1
        known = dist.distributed_c10d._world.pg_map
        known[self._group] = (self._backend, dist.PrefixStore(f"call{self._calls}", self._store))
        torch.manual_seed(SEED)
        np.random.seed(SEED)
        random.seed(SEED)
        environment, settings, depth = dict(os.environ), dict(vars(flex_config)), switch._RUNTIME.depth
        streams, folder, threads = (sys.stdout, sys.stderr), os.getcwd(), torch.get_num_threads()
        path = list(sys.path)
        dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        if environment.get("FLEX_TEST_QUIET", "1") == "1":
            sys.stdout = io.StringIO()
        self._fingerprint.renew()
        self._sessions.counts_from_zero()
        try:
            yield
        finally:
            changes.undo()
            while switch._RUNTIME.depth > depth:
                switch.disable()
            sys.stdout, sys.stderr = streams
            sys.path[:] = path
            os.chdir(folder)
            torch.set_grad_enabled(True)
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(deterministic)
            vars(flex_config).update(settings)
            if dict(os.environ) != environment:
                os.environ.clear()
                os.environ.update(environment)

    def _left_behind(self) -> list[str]:
        gc.collect()
        return self._fingerprint.differences()


class _Sessions:
    """The sessions of this process, for a test may end with some still open."""

    def __init__(self, kind: Any) -> None:
        self._kind, self._known = kind, weakref.WeakSet[Any]()
        made = kind.__init__

        def init(session: Any, *args: Any, **kwargs: Any) -> None:
            self._known.add(session)
            made(session, *args, **kwargs)

        kind.__init__ = init

    def counts_from_zero(self) -> None:
        """Ranks that made differently many sessions before meet again: the store is a new one."""
        self._kind._counts.clear()
        stages = sys.modules.get("megatron_flex.adapters.pipeline_stages")
        if stages is not None:
            stages.StageLayouts._counts.clear()

    def close(self) -> None:
        """Close what is open, on each rank by itself."""
        for session in list(self._known):
            if getattr(session, "_unwatch", None) is not None:
                session.close(failed=True)
        self._known.clear()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
