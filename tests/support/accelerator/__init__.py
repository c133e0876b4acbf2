"""A CUDA device, its streams and NCCL's rules on a rank of gloo, with real values: `simulated()`.

It shows on which device each tensor is, when the host waits and for whom, copies that are read too early or
whose source is overwritten or freed, what NCCL refuses, in which order ranks call collectives, and what
depends on the thread of a backward pass. It has no kernels and no time: it cannot show numerics of a GPU, how
fast anything is, that a result of a collective is read before it is there, or where memory runs out.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _device as default_device

from tests.support.accelerator import collectives
from tests.support.accelerator.recording import BACKWARD, Collective, Recording, Wait, Waits, differences
from tests.support.accelerator.streams import CUDA, Device, Event, Stream, device_of_process
from tests.support.accelerator.tensors import NATIVE, DeviceTensor, Dispatch, is_device, native

__all__ = [
    "CUDA",
    "Collective",
    "DeviceTensor",
    "Recording",
    "Wait",
    "Waits",
    "differences",
    "move",
    "simulated",
]

MOE = "megatron.core.transformer.moe"


@contextmanager
def simulated() -> Iterator[Recording]:
    """Let this process have a CUDA device, and its process groups be NCCL's, within a scope.

    All groups of the process must have been made in such a scope, but for the default one: a pool of
    ranks of its own, whose topology has a name of its own.
    """
    from megatron_flex import cpu

    originals = _held()
    cpu.enable(force=True)
    patch = pytest.MonkeyPatch()
    device = device_of_process()
    try:
        _put_back(patch, originals)
        device.start()
        device.recording.clear()
        _install_device(patch, device)
        _install_tensors(patch, device)
        _install_collectives(patch)
        patch.setattr(torch.autograd.Variable, "_execution_engine", BackwardThread(device.recording))
        with Dispatch():
            yield device.recording
    finally:
        patch.undo()
        cpu.disable()


def move(module: nn.Module) -> nn.Module:
    """Move a module to the device; parameters keep what frameworks have written on them."""
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or isinstance(parameter, DeviceTensor):
                continue
            if id(parameter) not in moved:
                new = nn.Parameter(parameter.detach().to(CUDA), parameter.requires_grad)
                for key, value in vars(parameter).items():
                    setattr(new, key, value)
                moved[id(parameter)] = new
            part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(CUDA)
    return module


class BackwardThread:
    """Autograd's engine with a thread for each backward pass, as the device has one."""

    def __init__(self, recording: Recording) -> None:
        self._engine = torch.autograd.Variable._execution_engine
        self._recording, self._inside = recording, threading.local()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """As of torch's engine."""
        if getattr(self._inside, "thread", False):  # a backward pass in a backward pass
            return self._engine.run_backward(*args, **kwargs)
        values: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            self._inside.thread = True
            try:
                with Dispatch():
                    values.append(self._engine.run_backward(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=BACKWARD)
        thread.start()
        thread.join()
        self._recording.pass_is_over()
        if errors:
            raise errors[0]
        return values[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


# What stands in on a CPU for a device that is not there, and is not wanted where one is simulated.
def _owners() -> list[Any]:
    return [torch, torch.fft, torch.nested, Tensor, default_device.DeviceContext]


def _held() -> list[tuple[Any, dict[str, Any]]]:

    owners = _owners()
    if "megatron.core" in sys.modules:
        owners += [importlib.import_module(f"{MOE}.{name}") for name in ("moe_utils", "token_dispatcher")]
    return [(owner, dict(vars(owner))) for owner in owners]


def _put_back(patch: pytest.MonkeyPatch, held: list[tuple[Any, dict[str, Any]]]) -> None:
    """Undo what `cpu.enable` did to functions that take or look at a device."""
    for owner, before in held:
        for name, value in list(vars(owner).items()):
            if name not in before:
                patch.delattr(owner, name)
            elif value is not before[name]:
                patch.setattr(owner, name, before[name])


def _install_device(patch: pytest.MonkeyPatch, device: Device) -> None:
    answers: dict[str, Any] = {
        "current_device": lambda: CUDA,
        "current_stream": device.current_stream,
        "default_stream": lambda of=None: device.main,
        "stream": device.stream,
        "set_stream": device.set_stream,
        "synchronize": device.synchronize,
        "Stream": Stream,
        "Event": Event,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
    load = ctypes.CDLL

    def load_library(name: Any = None, *args: Any, **kwargs: Any) -> Any:
        if name is not None and "cudart" not in str(name):
            return load(name, *args, **kwargs)
        return Runtime(device, load(None))

    patch.setattr(ctypes, "CDLL", load_library)


class Runtime:
    """The functions of CUDA's runtime that are simulated; others are those of this process."""

    def __init__(self, device: Device, loaded: Any) -> None:
        self._loaded = loaded
        self.cudaHostRegister = Function(device.register)
        self.cudaHostUnregister = Function(device.unregister)
        self.cudaMemcpy2DAsync = Function(device.copy_rows)
        self.cudaGetLastError = Function(device.clear_error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)


class Function:
    """A function of a library, whose types of arguments and result can be set."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def _install_tensors(patch: pytest.MonkeyPatch, device: Device) -> None:
    to, tensor, as_tensor = Tensor.to, torch.tensor, torch.as_tensor

    def move_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = native(kwargs["device"])
        return to(self, *(native(a) for a in args[:1]), *args[1:], **kwargs)

    def make(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def from_data(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            if not is_device(kwargs.get("device")):
                return function(data, *args, **kwargs)
            kwargs.pop("device")
            wanted = kwargs.pop("requires_grad", False)
            made = function(data, *args, **kwargs).to(NATIVE)
            return made.requires_grad_() if wanted else made

        return from_data

    def pin(self: Tensor, *args: Any) -> Tensor:
        return device.pin(self.clone())

    patch.setattr(Tensor, "to", move_to)
    patch.setattr(Tensor, "cuda", lambda self, *args, **kwargs: move_to(self, NATIVE))
    patch.setattr(Tensor, "is_pinned", lambda self, *args: device.is_pinned(self))
    patch.setattr(Tensor, "pin_memory", pin)
    patch.setattr(torch, "tensor", make(tensor))
    patch.setattr(torch, "as_tensor", make(as_tensor))


def _install_collectives(patch: pytest.MonkeyPatch) -> None:
    c10d = dist.distributed_c10d
    new_group, get_backend, object_device = dist.new_group, dist.get_backend, c10d._get_object_coll_device

    def make_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        nccl = backend is not None and "nccl" in backend
        if (nccl or backend is None) and kwargs.get("use_local_synchronization"):
            collectives.check_split(ranks)
        group = new_group(ranks, timeout, None if nccl else backend, *args, **kwargs)
        collectives.made(group, backend)
        return group

    def backend_of(group: Any = None) -> Any:
        return "nccl" if collectives.is_nccl(group) else get_backend(group)

    def device_of_objects(group: Any = None) -> Any:
        return "cuda" if collectives.is_nccl(group) else object_device(group)

    for owner in (dist, c10d):
        patch.setattr(owner, "new_group", make_group)
        patch.setattr(owner, "get_backend", backend_of)
    patch.setattr(c10d, "_get_object_coll_device", device_of_objects)
