"""Measurement of collectives at their call: operation, axis, bytes and duration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_flex.collectives.gloo_workers import run_collective
from megatron_flex.mesh import Axis


class Timestamp:
    """A point in time on the device of a tensor."""

    def __init__(self, like: Tensor) -> None:
        self._event: Any = None
        if like.is_cuda:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(like.device))
        else:
            self._at = time.perf_counter()

    def since(self, earlier: Timestamp) -> float:
        """Seconds between two timestamps; on a GPU the host waits for the later one."""
        if self._event is None:
            return self._at - earlier._at
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


@dataclass(slots=True)
class CollectiveCall:
    """One call of a collective.

    Attributes:
        op: its name.
        axis: the axis of the mesh.
        nbytes: the bytes of its result on this rank.
        start: the time of the call.
        end: the time of its completion.
    """

    op: str
    axis: str
    nbytes: int
    start: Timestamp
    end: Timestamp

    @property
    def seconds(self) -> float:
        """The duration, including the wait for other ranks."""
        return self.end.since(self.start)


class CollectiveMeter:
    """Calls a function with every collective, while a function is set.

    Attributes:
        sink: the function; None while nothing is measured.
    """

    sink: Callable[[CollectiveCall], None] | None = None


meter = CollectiveMeter()


def call_metered(
    op: str, axis: Axis, result: Tensor, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Call a collective over an axis's group, and report the call to the meter's sink, if one is set.

    Args:
        op: the name of the collective.
        axis: the axis.
        result: the tensor that the collective fills.
        call: the function of torch.distributed.
        args: its positional arguments.
        kwargs: its keyword arguments, without `group`.
    """
    if meter.sink is None:
        run_collective(call, *args, group=axis.group, **kwargs)
        return
    start = Timestamp(result)
    run_collective(call, *args, group=axis.group, **kwargs)
    meter.sink(CollectiveCall(op, axis.name, result.nbytes, start, Timestamp(result)))
