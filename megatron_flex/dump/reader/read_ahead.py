"""Reading in several threads: blocks before the caller asks for them, or pieces of one array at once.

Copies and checksums of more than 64 KiB release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TypeVar

B = TypeVar("B")
V = TypeVar("V")

MAX_THREADS = 8  # that read the pieces of one array
THREAD_BYTES = 8 << 20  # of an array for each thread; less is read before a thread has begun


class _Local(threading.local):
    """What a thread knows of itself: whether it is one of several that read."""

    is_reader = False


_local = _Local()


def read_ahead(
    blocks: Iterable[B],
    read: Callable[[B], V],
    is_small: Callable[[B], bool] = lambda _: False,
    threads: int = 1,
) -> Iterator[tuple[B, V]]:
    """Each block with its data, in order.

    Each thread reads one block ahead, so that one more block is in memory than there are threads.

    Args:
        blocks: what to read, one after the other.
        read: reads a block; called in another thread, unless it is the first one or there is one core.
        is_small: whether it would take longer to hand a block to another thread than to read the block.
        threads: that read, each one block ahead of the caller.

    Yields:
        A block, and what `read` returned for it.

    Raises:
        Exception: whatever `read` raises for a block, when that block is due.
    """
    remaining = iter(blocks)
    several_cores = os.cpu_count() != 1
    with ThreadPoolExecutor(threads, "megatron_flex reader", _become_reader) as pool:
        due: deque[tuple[B, Future[V] | None]] = deque((b, None) for b in islice(remaining, 1))
        while due:
            block, future = due.popleft()
            value = read(block) if future is None else future.result()
            for following in islice(remaining, threads - len(due)):
                in_thread = several_cores and not is_small(following)
                due.append((following, pool.submit(read, following) if in_thread else None))
            yield block, value
            del value


def read_pieces(pieces: Iterable[Callable[[], object]], nbytes: int) -> None:
    """Call all functions, which read the pieces of an array, in as many threads as the array is large.

    A thread that is itself one of several that read calls them alone, one after the other.

    Args:
        pieces: each reads a piece into memory that no other one writes to.
        nbytes: of the array.

    Raises:
        Exception: what the first of the functions raised that failed; those that follow are not called then.
    """
    threads = min(MAX_THREADS, os.cpu_count() or 1, nbytes // THREAD_BYTES)
    if threads < 2 or _local.is_reader:
        for piece in pieces:
            piece()
        return
    remaining = deque(enumerate(pieces))
    failed: list[tuple[int, BaseException]] = []

    def read() -> None:
        while remaining and not failed:
            try:
                number, piece = remaining.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                piece()
            except BaseException as error:
                failed.append((number, error))

    with ThreadPoolExecutor(threads - 1, "megatron_flex reader", _become_reader) as pool:
        with suppress(RuntimeError):  # the system gives no more threads: those that there are read all
            for _ in range(min(threads, len(remaining)) - 1):
                pool.submit(read)
        read()
    if failed:
        raise min(failed, key=lambda failure: failure[0])[1]


def _become_reader() -> None:
    _local.is_reader = True
