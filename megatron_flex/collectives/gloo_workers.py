"""Tensors of collectives, of which the process waits at exit until gloo's worker threads have released them.

A worker thread of gloo releases the tensors of a collective after it has reported the collective as complete.
For a tensor that Python knows the thread takes the interpreter's lock. If the interpreter is finalizing, that
ends the thread inside a C++ destructor, and the process aborts, after the script has done everything right.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

EXIT_SECONDS = 10.0  # for collectives that have not ended, because other ranks never enter them
FAILED_SECONDS = 1.0  # after an exception, whose traceback may hold tensors

_lent: list[weakref.ref[Tensor]] = []


def run_collective(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch.distributed.

    The tensors are passed as views: a view exists until no thread, of Python or of gloo, refers to it, which
    can be observed, whoever else has the tensor.
    """
    return call(*map(_lend, args), **kwargs)


def _lend(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_lend(item) for item in value]
    if not isinstance(value, Tensor) or not value.is_cpu:
        return value
    view = value.detach()
    _lent[:] = [item for item in _lent if item() is not None]
    _lent.append(weakref.ref(view))
    return view


def _await_workers() -> None:
    seconds = FAILED_SECONDS if hasattr(sys, "last_value") else EXIT_SECONDS
    end = time.monotonic() + seconds
    while any(view() is not None for view in _lent) and time.monotonic() < end:
        time.sleep(1e-3)  # releases the interpreter's lock, which the workers take


atexit.register(_await_workers)
os.register_at_fork(after_in_child=_lent.clear)  # the threads are not copied
