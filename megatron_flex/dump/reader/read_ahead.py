"""Reading the next blocks in other threads while the caller works on this one.

Copies and checksums of more than 64 KiB release the GIL. Each thread reads one block ahead, so that there is
one more in memory than there are threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

B = TypeVar("B")
V = TypeVar("V")


def read_ahead(
    blocks: Iterable[B],
    read: Callable[[B], V],
    is_small: Callable[[B], bool] = lambda _: False,
    threads: int = 1,
) -> Iterator[tuple[B, V]]:
    """Each block with its data, in order.

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
    left = iter(blocks)
    several_cores = os.cpu_count() != 1
    with ThreadPoolExecutor(threads, "megatron_flex reader") as pool:
        due: deque[tuple[B, Future[V] | None]] = deque((b, None) for b in islice(left, 1))
        while due:
            block, found = due.popleft()
            value = read(block) if found is None else found.result()
            for following in islice(left, threads - len(due)):
                in_thread = several_cores and not is_small(following)
                due.append((following, pool.submit(read, following) if in_thread else None))
            yield block, value
            del value
