"""Which ranks of the job have ended, for ranks that wait for them through the rendezvous store.

Each process registers itself under its node, so that the other ranks of the node see that it is gone, even if
it was killed. A process that ends with an error, or with a model that was not restored, says so itself, to
all nodes.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

PREFIX = "megatron_flex/processes"
KILLED = "its process is gone"
FINISHED = "its script came to its end"


class RankLiveness:
    """The processes of a job that share a rendezvous store.

    Args:
        store: the store.
    """

    def __init__(self, store: Any) -> None:
        self.store, self._rank, self._pid = store, dist.get_rank(), os.getpid()
        self._node = f"{PREFIX}/{_node_name()}"
        self._here: list[tuple[int, int, str]] = []  # rank, process and its start, of this node
        self._told = 0  # ranks that were read from the store
        self._ended: dict[int, str] = {}
        self._append(self._node, f"{self._rank} {self._pid} {_start_time(self._pid)}")

    def find_ended(self) -> dict[int, str]:
        """The ranks that have ended, each with the reason."""
        for text in self._read(self._node, len(self._here)):
            rank, pid, start = text.split(" ")
            self._here.append((int(rank), int(pid), start))
        for text in self._read(f"{PREFIX}/ended", self._told):
            rank, _, why = text.partition(" ")
            self._told += 1
            self._ended.setdefault(int(rank), why)
        for node_rank, process, started in self._here:
            if node_rank not in self._ended and _start_time(process) != started:
                self._ended[node_rank] = KILLED
                self._append(f"{PREFIX}/ended", f"{node_rank} {KILLED}")  # for the ranks of other nodes
        return self._ended

    def tell_end(self, why: str) -> None:
        """Tell the ranks that wait for this one that it ends."""
        if os.getpid() == self._pid:  # not in a forked child
            with suppress(Exception):  # the store may have ended before
                self._append(f"{PREFIX}/ended", f"{self._rank} {why}")

    def _append(self, name: str, text: str) -> None:
        self.store.set(f"{name}/{self.store.add(f'{name}/count', 1)}", text)

    def _read(self, name: str, known: int) -> list[str]:
        count = self.store.add(f"{name}/count", 0)
        keys = [f"{name}/{n}" for n in range(known + 1, count + 1)]
        return [self.store.get(k).decode() for k in keys] if keys and self.store.check(keys) else []


_current: RankLiveness | None = None
_open: set[str] = set()  # the names of sessions whose model is not restored


def rank_liveness() -> RankLiveness:
    """The processes of the job, in which this one is registered."""
    global _current
    store = dist.distributed_c10d._get_default_store()
    if _current is None or _current.store is not store:
        _current = RankLiveness(store)
    return _current


def note_open(name: str, is_open: bool) -> None:
    """Note that a session is open, so that its ranks may wait for this one."""
    (_open.add if is_open else _open.discard)(name)


def _tell_end() -> None:
    error = getattr(sys, "last_value", None)
    if _current is not None and (error is not None or _open):
        _current.tell_end(FINISHED if error is None else f"it raised {type(error).__name__}")


atexit.register(_tell_end)


def _start_time(pid: int) -> str:
    """When a process started, in the system's clock ticks; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _signalled(pid)
    except OSError:  # no more descriptors, for example: nothing is known of it
        return "unknown"
    return "" if fields[0] in "ZX" else fields[19]


def _signalled(pid: int) -> str:
    """Where there is no /proc: whether the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"


def _node_name() -> str:
    """The same for processes that see each other's numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return os.uname().nodename
