"""Runs unmodified megatron-core and `megatron.training` on a CPU with gloo: `enable()`, `disable()`.

Importing this changes nothing. Enabling sets attributes of torch and, as they are imported, of Megatron;
disabling puts every one of them back. It is for machines without a GPU, and refuses one that has one.
It may come before or after Megatron is imported. All threads see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_flex.cpu.hybrid_layers import local_hybrid_stack_spec
from megatron_flex.cpu.switch import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled", "local_hybrid_stack_spec", "runtime"]


@contextmanager
def runtime(force: bool = False) -> Iterator[None]:
    """Use the CPU as `enable(force)` does in a scope, and undo it at its end.

    Returns:
        A context manager.

    Examples:
        >>> from megatron_flex import cpu
        >>> with cpu.runtime():
        ...     train_step(chunks)
    """
    enable(force)
    try:
        yield
    finally:
        disable()
