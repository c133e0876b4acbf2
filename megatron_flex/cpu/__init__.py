"""Runs unmodified megatron-core and `megatron.training` on a CPU with gloo: `enable()`, `disable()`.

Importing this changes nothing. Enabling sets attributes of torch and, as they are imported, of Megatron;
disabling puts every one of them back. It is for machines without a GPU, and refuses one that has one.
It may come before or after Megatron is imported. All threads see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_flex.cpu.switch import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled", "runtime"]


@contextmanager
def runtime(force: bool = False) -> Iterator[None]:
    """`enable(force)` on entry, `disable()` on the way out."""
    enable(force)
    try:
        yield
    finally:
        disable()
