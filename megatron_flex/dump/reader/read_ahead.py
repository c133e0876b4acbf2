"""Reading the next block in a thread while the caller works on this one.

Copies and checksums of more than 64 KiB release the GIL. At most one block is read ahead, so two are in
memory, and the reads themselves follow one another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

B = TypeVar("B")
V = TypeVar("V")


def read_ahead(
    blocks: Iterable[B], read: Callable[[B], V], is_small: Callable[[B], bool] = lambda _: False
) -> Iterator[tuple[B, V]]:
    """Each block with its data, in order.

    Args:
        blocks: what to read, one after the other.
        read: reads a block; called in another thread, unless it is the first one or there is one core.
        is_small: whether it would take longer to hand a block to another thread than to read the block.

    Yields:
        A block, and what `read` returned for it.

    Raises:
        Exception: whatever `read` raises for a block, when that block is due.
    """
    left = iter(blocks)
    several_cores = os.cpu_count() != 1
    with ThreadPoolExecutor(1, "megatron_flex reader") as thread:
        block, found = next(left, None), None
        while block is not None:
            value = read(block) if found is None else found.result()
            following, found = next(left, None), None
            if following is not None and several_cores and not is_small(following):
                found = thread.submit(read, following)
            yield block, value
            del value
            block = following
