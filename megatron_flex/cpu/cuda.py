"""A CPU in the place of `torch.cuda`: stand-ins for its functions, and the CPU wherever "cuda" is asked for.

Megatron asks `torch.cuda` for its device, for streams and for memory figures; none of that changes a number
on a CPU.
Each name gets a function object of its own: dynamo refuses two torch names for one.

Factories, `.cuda()`, `.to("cuda")` and pinned memory are redirected by a `TorchFunctionMode`, which sees
every call of torch on its own thread, and only there: a thread that allocates on "cuda" by name has to
enter a `CpuDevices()` itself (`torch.cuda.current_device()` needs none).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.data import dataloader

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


_CPU = torch.device("cpu")


class CpuDevices(TorchFunctionMode):
    """While it is entered, a CUDA device named in a torch call means the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer the few methods that are about the device, and rewrite the arguments of the others."""
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs or {})
        if kwargs:
            kwargs = _redirect_arguments(kwargs)
        for arg in args:  # every call of torch comes here, attributes of tensors too, so nothing is allocated
            if type(arg) is torch.device and arg.type == "cuda":
                args = tuple(_cpu_for(arg) if isinstance(arg, torch.device) else arg for arg in args)
                break
        return func(*args, **kwargs) if kwargs else func(*args)


def _cpu_for(device: Any) -> Any:
    """The CPU where `device` means a CUDA device (by object, name or index), else `device` itself."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


def _redirect_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is None and not kwargs.get("pin_memory"):
        return kwargs
    changed = dict(kwargs)
    if "device" in changed:
        changed["device"] = _cpu_for(changed["device"])
    # There is no device to copy to, so nothing gains from pinned memory, and allocating it fails.
    changed.pop("pin_memory", None)
    return changed


def _return_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.cuda()`: it is there already."""
    return args[0]


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0], *(_cpu_for(arg) for arg in args[1:2]), *args[2:], **_redirect_arguments(kwargs))


def _type(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.type()`: Megatron's optimizer compares the name with "torch.cuda.FloatTensor"."""
    if len(args) == 1 and not kwargs:
        name: str = func(args[0])
        return name.replace("torch.", "torch.cuda.", 1)
    wanted = [arg.replace("torch.cuda.", "torch.") if isinstance(arg, str) else arg for arg in args[1:]]
    return func(args[0], *wanted, **kwargs)


def _not_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.cuda: _return_tensor,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _return_tensor,
    torch.Tensor.is_pinned: _not_pinned,
}


def _leave_mode(mode: CpuDevices) -> None:
    """Remove `mode` from the stack of this thread, also below modes that were pushed later."""
    above: list[Any] = []
    while mode in _get_current_function_mode_stack():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def _enter_mode_in_backward(run: Callable[..., Any], mode: CpuDevices) -> Callable[..., Any]:
    """`run`, with the mode entered: `backward()` passes through a mode, and torch leaves that mode meanwhile.

    Recomputation happens in there, and allocates as the forward pass does.
    """

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if mode in _get_current_function_mode_stack():
            return run(*args, **kwargs)
        with mode:
            return run(*args, **kwargs)

    return run_backward


def _without_pinning(init: Callable[..., None]) -> Callable[..., None]:
    def start(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        """Begin to iterate as if the loader had not been asked for pinned memory (it would only warn)."""
        asked, loader.pin_memory = loader.pin_memory, False
        try:
            init(self, loader, *args, **kwargs)
        finally:
            loader.pin_memory = asked

    return start


def install_cpu_devices(patches: Patches) -> None:
    """Enter the mode on this thread, until `patches` are restored."""
    mode = CpuDevices()
    _push_mode(mode)
    patches.on_restore(lambda: _leave_mode(mode))
    loading = dataloader._BaseDataLoaderIter
    patches.set(loading, "__init__", _without_pinning(vars(loading)["__init__"]))
    # Bound in both modules, once by import.
    backward = _enter_mode_in_backward(torch.autograd.graph._engine_run_backward, mode)
    for module in (torch.autograd.graph, torch.autograd):
        patches.set_present(module, "_engine_run_backward", backward)
