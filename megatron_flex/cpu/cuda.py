"""A CPU in the place of `torch.cuda`: stand-ins for its functions.

Megatron asks `torch.cuda` for its device, for streams and for memory figures; none of that changes a number
on a CPU. Each name gets a function object of its own: dynamo refuses two torch names for one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from megatron_flex.cpu.patches import Patches

_MEMORY_FIGURES = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("device_memory_used", "memory_usage", "utilization", "temperature", "power_draw", "clock_rate"),
)
_NOTHING_TO_DO = (
    *("set_device", "synchronize", "empty_cache", "set_stream", "init", "_lazy_init", "ipc_collect"),
    *("check_error", "_sleep", "reset_peak_memory_stats", "reset_max_memory_allocated"),
)


class Stream:
    """A queue of work that is always empty: every operation has run before its call returned."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def wait_stream(self, stream: Any) -> None:
        """Everything earlier has finished already."""

    def wait_event(self, event: Any) -> None:
        """Everything earlier has finished already."""

    def synchronize(self) -> None:
        """Everything earlier has finished already."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event of this moment."""
        return event if event is not None else Event()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority: there is one."""
        return (0, 0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Event:
    """A moment in a `Stream`; it has always passed, and uses the wall clock for times."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._seconds = perf_counter()

    def wait(self, stream: Any = None) -> None:
        """It has passed already."""

    def synchronize(self) -> None:
        """It has passed already."""

    def query(self) -> bool:
        """Whether it has passed: always."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`, by the wall clock."""
        return (end_event._seconds - self._seconds) * 1e3


class Device:
    """`torch.cuda.device(...)` as a context manager: there is one device, so nothing is switched."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


@dataclass(frozen=True)
class DeviceProperties:
    """What Megatron reads of a device: its name, its architecture and its memory in bytes."""

    name: str = "CPU"
    major: int = 8
    minor: int = 0
    total_memory: int = 0
    multi_processor_count: int = 1
    warp_size: int = 32


def host_memory() -> tuple[int, int]:
    """Free and total memory of this machine, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def local_ranks() -> int:
    """How many devices this machine seems to have: one for each process the launcher started on it."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def _stream_context(stream: Any = None) -> Iterator[Any]:
    yield stream


def _make_stand_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own that answers to `name`."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    stand_in.__name__ = stand_in.__qualname__ = name
    return stand_in


def _stand_in_functions() -> dict[str, Callable[..., Any]]:
    stream = Stream()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": local_ranks,
        # A torch.device, not an index: Megatron allocates its gather buffers on it, in any thread.
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": _stream_context,
        "get_device_name": lambda device=None: DeviceProperties.name,
        "get_device_capability": lambda device=None: (DeviceProperties.major, DeviceProperties.minor),
        "get_device_properties": lambda device=None: DeviceProperties(total_memory=host_memory()[1]),
        "mem_get_info": lambda device=None: host_memory(),
        "memory_stats": lambda device=None: {},
        "memory_snapshot": lambda *args, **kwargs: [],
        "cudart": lambda: None,
    }


def install_cuda_stand_ins(patches: Patches) -> None:
    """Put the stand-ins into `torch.cuda`, and let `torch.accelerator` report none."""
    answers = _stand_in_functions()
    answers.update({name: lambda *args, **kwargs: 0 for name in _MEMORY_FIGURES})
    answers.update({name: lambda *args, **kwargs: None for name in _NOTHING_TO_DO})
    for name, function in answers.items():
        patches.set_present(torch.cuda, name, _make_stand_in(name, function))
    for name, stand_in in (("Stream", Stream), ("Event", Event), ("device", Device)):
        patches.set(torch.cuda, name, stand_in)
    nvtx: dict[str, Callable[..., Any]] = {
        "range_push": lambda *args: 0,
        "range_pop": lambda *args: 0,
        "mark": lambda *args: None,
        "range": _stream_context,
    }
    for name, function in nvtx.items():
        patches.set_present(torch.cuda.nvtx, name, _make_stand_in(name, function))
    patches.set(torch.Tensor, "record_stream", _make_stand_in("record_stream", lambda tensor, stream: None))
    # A CUDA build of torch without a GPU names "cuda" as its accelerator, and asks the stand-ins above
    # whether there is one; the optimizer and the data loader would then call into the driver.
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        patches.set(accelerator, "is_available", _make_stand_in("is_available", lambda: False))
        patches.set(
            accelerator, "current_accelerator", _make_stand_in("current_accelerator", _no_accelerator)
        )


def _no_accelerator(check_available: bool = False) -> None:
    return None
