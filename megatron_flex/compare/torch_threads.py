"""The number of torch's threads while dumps are compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _TorchThreads:
    """The number of torch's threads, which is of the process: 1 while some comparison is running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._comparisons = 0
        self._before = 1

    @contextmanager
    def one(self) -> Iterator[None]:
        """Let torch compute in one thread, as each core has blocks of its own to sum.

        The threads of torch wait actively for a while after each call, on the cores that sum blocks.
        """
        with self._lock:
            if not self._comparisons:
                self._before = torch.get_num_threads()
                torch.set_num_threads(1)
            self._comparisons += 1
        try:
            yield
        finally:
            with self._lock:
                self._comparisons -= 1
                if not self._comparisons:
                    torch.set_num_threads(self._before)


one_torch_thread = _TorchThreads().one
