"""Reading the next block in a thread while the caller works on this one.

Copies and large checksums leave Python's lock to others. At most one block is read ahead, so two are in
memory, and the reads themselves follow one another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

B = TypeVar("B")
V = TypeVar("V")


def read_ahead(blocks: Iterable[B], read: Callable[[B], V]) -> Iterator[tuple[B, V]]:
    """Each block with its data, in order.

    Args:
        blocks: what to read, one after the other.
        read: reads a block; called in another thread where there are several blocks and several cores.

    Yields:
        A block, and what `read` returned for it.

    Raises:
        Exception: whatever `read` raises for a block, when that block is due.
    """
    left = iter(blocks)
    first = next(left, None)
    second = next(left, None)
    if first is None:
        return
    if second is None or os.cpu_count() == 1:
        yield first, read(first)
        if second is not None:
            yield second, read(second)
            yield from ((block, read(block)) for block in left)
        return
    with ThreadPoolExecutor(1, "megatron_flex reader") as thread:
        block, found = first, thread.submit(read, first)
        following: B | None = second
        while following is not None:
            value = found.result()
            ahead: Future[V] = thread.submit(read, following)
            yield block, value
            block, found, following = following, ahead, next(left, None)
            del value, ahead
        yield block, found.result()
