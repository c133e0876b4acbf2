"""Counts copies of tensors where torch makes them: exact, whatever the machine does meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = ("copy_", "clone", "_to_copy", "cat", "stack", "index_select", "index", "contiguous")


class _Copies(TorchDispatchMode):
    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().rpartition("::")[2].partition(".")[0]
        if name in COPIES and isinstance(out, Tensor) and out.nbytes >= self.least:
            self.found[name] += out.nbytes
        return out


@contextmanager
def copies(least: int) -> Iterator[Counter[str]]:
    """The bytes that this thread copies, by operation, counted in copies of at least so many bytes."""
    with _Copies(least) as mode:
        yield mode.found


def more(having: Counter[str], without: Counter[str]) -> int:
    """The bytes that the first copies more."""
    return having.total() - without.total()
