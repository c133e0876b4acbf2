"""Ranks that import some packages from another folder: a second process with a pool of its own.

What multiprocessing forks workers from is one for a whole process, and it has imported its Megatron already.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]


class Elsewhere:
    """Runs functions on ranks for which a folder is first on the path.

    Args:
        folder: it; packages in it hide those that are installed.
    """

    def __init__(self, folder: Path) -> None:
        self._pipe, theirs = mp.Pipe()
        path = [str(folder), str(ROOT), str(ROOT / "patches"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.elsewhere", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """As `tests.support.pool.run`, whose errors come back as their text."""
        self._pipe.send_bytes(pickle.dumps((world, function, args, timeout)))
        good, value = pickle.loads(self._pipe.recv_bytes())
        if not good:
            raise AssertionError(value)
        return value


def serve(pipe: Connection) -> None:
    """Run what is asked for until nobody is there to ask."""
    from tests.support.pool import run

    while True:
        try:
            world, function, args, timeout = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, run(world, function, *args, timeout=timeout)
        except Exception:  # whatever it is, the test that asked must fail with it
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
