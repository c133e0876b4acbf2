"""Counting collectives where they are called: which, along which axis, how many bytes, how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_flex.mesh import Axis


class Timestamp:
    """A moment, on the device that a tensor is on."""

    def __init__(self, like: Tensor) -> None:
        self._event: Any = None
        if like.is_cuda:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(like.device))
        else:
            self._at = time.perf_counter()

    def since(self, earlier: Timestamp) -> float:
        """Seconds between the two moments; on a GPU the host waits for the later one."""
        if self._event is None:
            return self._at - earlier._at
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(slots=True)
class CollectiveCall:
    """One collective that was called.

    Attributes:
        op: its name.
        axis: along which axis of the mesh.
        nbytes: how large its result is on this rank.
        start: when it was called.
        end: when it was through.
    """

    op: str
    axis: str
    nbytes: int
    start: Timestamp
    end: Timestamp

    @property
    def seconds(self) -> float:
        """How long it took, waiting for the others included."""
        return self.end.since(self.start)


class CollectiveMeter:
    """Where collectives are told to while someone counts.

    Attributes:
        sink: called with each; None while no one counts.
    """

    sink: Callable[[CollectiveCall], None] | None = None


meter = CollectiveMeter()


def call_metered(op: str, axis: Axis, result: Tensor, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a collective over an axis's group, and tell of it if someone counts.

    Args:
        op: its name.
        axis: the axis.
        result: the tensor that it fills.
        call: the function of torch.distributed.
        args: its arguments.
        kwargs: likewise, `group` apart.
    """
    if meter.sink is None:
        call(*args, group=axis.group, **kwargs)
        return
    start = Timestamp(result)
    call(*args, group=axis.group, **kwargs)
    meter.sink(CollectiveCall(op, axis.name, result.nbytes, start, Timestamp(result)))
