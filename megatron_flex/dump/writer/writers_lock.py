"""The lock by which others see that a run is being written: each rank that writes shares it.

The operating system releases it when a process ends, however it ends. A file system without locks holds none.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from weakref import finalize

from megatron_flex.dump.file_names import WRITERS_LOCK

ATTEMPTS, PAUSE = 50, 0.02  # while another process asks for the lock, or removes the file


class WritersLock:
    """The shared lock of one rank on the folder of its run, until `release`.

    The last rank that releases the lock removes its file.
    """

    def __init__(self, folder: Path) -> None:
        self._end: finalize[[int, Path, int], WritersLock] | None = None
        path = folder / WRITERS_LOCK
        with suppress(OSError):  # a folder that cannot be written is reported by the writing itself
            for _ in range(ATTEMPTS):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
                if _lock(descriptor, fcntl.LOCK_SH) and os.fstat(descriptor).st_nlink:
                    self._end = finalize(self, _close, descriptor, path, os.getpid())
                    self._end.atexit = False  # at exit the rest is written, and the system releases the lock
                    return
                os.close(descriptor)
                time.sleep(PAUSE)

    def release(self) -> None:
        if self._end is not None:
            self._end()


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file, if no other process forbids it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _close(descriptor: int, path: Path, owner: int) -> None:
    with suppress(OSError):
        if os.getpid() == owner:  # a forked child shares the lock of its parent, and must not release it
            if _lock(descriptor, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def is_being_written(folder: Path) -> bool:
    """Whether a writer holds the lock of a run; also where that cannot be told."""
    try:
        descriptor = os.open(folder / WRITERS_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # every writer has released it, or is of a version without locks
    except OSError:
        return True
    try:
        return not _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)
